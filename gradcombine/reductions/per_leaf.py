"""Combines the parts of a tree by different reductions, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import resolve
from gradcombine.errors import invalid, operation, within
from gradcombine.reductions.algebra import Reduction, described
from gradcombine.reductions.weights import presence
from gradcombine.settings import check
from gradcombine.types import Order, Scalar, State, Tree


class PerLeafState(NamedTuple):
    """The partial states of the reductions, in the order of the leaves of the prefix tree."""

    parts: tuple[State, ...]


@operation("per_leaf")
def per_leaf(reductions: Tree) -> Reduction:
    """Combines each part of a tree by its own reduction.

    Args:
      reductions: a tree of reductions that is a prefix of the trees to combine: each reduction combines the subtree at
        its path.

    Returns:
      A reduction of trees with the prefix ``reductions``. The weight of a contribution applies to the parts that are
      averages (`mean`); the other parts get weight 0 or 1. So token counts that also serve as weights are summed, and
      not multiplied by themselves.

    Bits: those of the reduction of each part.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import reductions
    >>> step = reductions.per_leaf({"grads": reductions.mean(), "tokens": reductions.sum(), "amax": reductions.max()})
    >>> a = {"grads": {"w": np.float32([1])}, "tokens": np.int32(3), "amax": np.float32(7)}
    >>> b = {"grads": {"w": np.float32([5])}, "tokens": np.int32(1), "amax": np.float32(2)}
    >>> out = gc.combine(step, [a, b], weights=[3, 1])
    >>> out["grads"]["w"].item(), int(out["tokens"]), float(out["amax"])
    (2.0, 4, 7.0)
    """
    members, prefix = tree.flatten(reductions, is_leaf=lambda node: isinstance(node, Reduction))
    for path, member in zip(prefix.paths(), members, strict=True):
        with within(path):
            check(reduction=member)
    return PerLeaf(members, prefix)


class PerLeaf(Reduction):
    """See `per_leaf`.

    Attributes:
      members: the reductions.
      prefix: the structure of the tree whose leaves they are.
    """

    name, state = "per_leaf", PerLeafState
    scales_by_weight = True

    def __init__(self, members: Sequence[Reduction], prefix: tree.Structure) -> None:
        self.members, self.prefix = members, prefix

    @property
    def description(self) -> str:
        pairs = zip(self.prefix.paths(), self.members, strict=True)
        return described("per_leaf", *[f"{path}: {member.description}" for path, member in pairs])

    @property
    def derivative(self) -> Reduction | None:
        if all(member.derivative is None for member in self.members):
            return None
        return PerLeaf([member.derivative or member for member in self.members], self.prefix)

    def init(self, like: Tree) -> PerLeafState:
        likes = tree.split_as(self.prefix, like)
        return PerLeafState(self._each("init", likes))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> PerLeafState:
        values = tree.split_as(self.prefix, value)
        leaves, _ = tree.flatten(value)
        present = presence(resolve([*leaves, weight]), weight)
        weights = [weight if member.scales_by_weight else present for member in self.members]
        return PerLeafState(self._each("update", self._parts(state), values, weights))

    def finalize(self, state: State) -> Tree:
        return tree.unflatten(self.prefix, self._each("finalize", self._parts(state)))

    def all_merge(self, state: State, collective: Collective, order: Order) -> PerLeafState:
        return PerLeafState(self._each("all_merge", self._parts(state), collective=collective, order=order))

    def merge(self, a: State, b: State) -> PerLeafState:
        return PerLeafState(self._each("merge", self._parts(a), self._parts(b)))

    def clear(self, state: State) -> PerLeafState:
        return PerLeafState(self._each("clear", self._parts(state)))

    def gradients(self, value: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        pairs = self._each("gradients", tree.split_as(self.prefix, value))

        def rebuild(changed: Tree) -> Tree:
            parts = tree.split_as(self.prefix, changed)
            return tree.unflatten(self.prefix, [make(part) for (_, make), part in zip(pairs, parts, strict=True)])

        return tree.unflatten(self.prefix, [gradients for gradients, _ in pairs]), rebuild

    def _each(self, method: str, *columns: Sequence[Tree], **settings: object) -> tuple[Any, ...]:
        """Calls a method of each member with its part of each column; errors have the path of the member."""
        results: list[Any] = []
        for path, member, *row in zip(self.prefix.paths(), self.members, *columns, strict=True):
            with within(path):
                results.append(getattr(member, method)(*row, **settings))
        return tuple(results)

    def _parts(self, state: State) -> tuple[State, ...]:
        parts = self.require(state).parts
        if len(parts) != len(self.members):
            raise invalid(f"a state of {len(self.members)} parts", len(parts))
        return parts
