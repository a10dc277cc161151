# pyright: standard
"""Norms of a window's gradient, and of its parts by denominator."""

from __future__ import annotations

from gradcombine import tree
from gradcombine.backends.registry import load
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.numbered import without_numbers
from gradcombine.reductions.per_leaf import PerLeaf
from gradcombine.reductions.ratios import Ratios
from gradcombine.reductions.wrappers import global_norm
from gradcombine.types import Array, State, Tree


class WithNorms(Wrapper):
    """Adds the norms of the gradients to the value of a reduction of the parts of a `Contribution`.

    The states are those of the wrapped reduction.

    Args:
      of: the reduction of the parts, a `PerLeaf`.
      gradients: the reduction of the gradients, one of the parts.
    """

    def __init__(self, of: PerLeaf, gradients: Reduction) -> None:
        super().__init__(of)
        self._gradients, self._at = without_numbers(gradients), list(of.prefix.paths()).index("['grads']")

    def around(self, of: Reduction) -> Reduction:
        return WithNorms(of, self._gradients)

    @property
    def description(self) -> str:
        return self.of.description

    def finalize(self, state: State) -> Tree:
        combined = self.of.finalize(state)
        norms = {"grad_norm": _norm(combined["grads"])}
        if isinstance(self._gradients, Ratios):
            # Repeats the divisions of the finalize above; the compiler merges the two.
            parts = self._gradients.of.finalize(state.parts[self._at])
            norms["grad_norms"] = {name: _norm(part) for name, part in parts.items()}
        return combined | norms


def _norm(gradients: Tree) -> Array:
    return global_norm(load("jax"), *tree.flatten(gradients))
