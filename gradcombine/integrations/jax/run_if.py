# pyright: standard
"""The end of a window, in place on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from gradcombine.backends.registry import load
from gradcombine.integrations.jax.on_replicas import align, aligned
from gradcombine.types import Array, Tree

Run: TypeAlias = Callable[[Tree], tuple[Tree, Tree]]
"""``kept -> (kept, metrics)``, with the shapes and dtypes that were kept."""


def run_if(condition: Array, run: Run, kept: Tree) -> tuple[Tree, Tree]:
    """``run(kept)`` where the scalar condition holds; else ``kept`` as it is, and zeros for the metrics.

    Whatever else `run` reads it closes over, and it is not written; ``kept`` is changed in place. A conditional would
    copy every buffer that passes through it, or, on GPUs, run both branches and select, so this is a loop that turns
    once or not at all. As JAX has no reverse of such a loop, derivatives are those of the conditional.

    Args:
      condition: boolean scalar, the same on all replicas.
      run: what happens at the end of a window.
      kept: a tree of arrays.

    Returns:
      What is kept, and the metrics.
    """
    if not isinstance(condition, Tracer):
        return _at_once(condition, run, kept)
    branch = _Branch(run, kept)
    flat = load("jax").custom_derivative(branch.loop, branch.conditional, [condition, *branch.arguments])
    return branch.results(flat)


def conditional(condition: Array, run: Run, kept: Tree) -> tuple[Tree, Tree]:
    """`run_if` by a conditional, which GPUs turn into selects where all of its operations are elementwise."""
    if not isinstance(condition, Tracer):
        return _at_once(condition, run, kept)
    branch = _Branch(run, kept)
    return branch.results(branch.conditional(condition, *branch.arguments))


def _at_once(condition: Array, run: Run, kept: Tree) -> tuple[Tree, Tree]:
    if condition:
        return run(kept)
    return kept, jax.tree.map(jnp.zeros_like, jax.eval_shape(run, kept)[1])


class _Branch:
    """A run, traced once, over flat arrays.

    All that is traced is an argument, also what the run closes over: a derivative does not see through a closure.
    """

    def __init__(self, run: Run, kept: Tree) -> None:
        traced, specs = jax.make_jaxpr(run, return_shape=True)(kept)
        while not aligned(kept, specs[0]):
            kept = align(kept, specs[0])
            traced, specs = jax.make_jaxpr(run, return_shape=True)(kept)
        self._jaxpr, self._constants, self._specs = traced.jaxpr, len(traced.consts), specs
        self.arguments = [*traced.consts, *jax.tree.leaves(kept)]

    def loop(self, condition: Array, *arrays: Array) -> list[Array]:
        closed, carried = self._begun(arrays)

        def turn(carry: list[Array]) -> list[Array]:
            return [jnp.zeros_like(condition), *self._run(closed, carry[1:])]

        return jax.lax.while_loop(lambda carry: carry[0], turn, [condition, *carried])[1:]

    def conditional(self, condition: Array, *arrays: Array) -> list[Array]:
        closed, carried = self._begun(arrays)
        return jax.lax.cond(condition, lambda: self._run(closed, carried), lambda: carried)

    def results(self, arrays: Sequence[Array]) -> tuple[Tree, Tree]:
        return jax.tree.unflatten(jax.tree.structure(self._specs), arrays)

    def _begun(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], list[Array]]:
        metrics = jax.tree.leaves(self._specs[1])
        zeros = align([load("jax").full(spec.shape, 0, spec.dtype, [spec]) for spec in metrics], metrics)
        return arrays[: self._constants], [*arrays[self._constants :], *zeros]

    def _run(self, constants: Sequence[Array], carried: list[Array]) -> list[Array]:
        kept = carried[: len(self.arguments) - self._constants]
        return align(eval_jaxpr(self._jaxpr, constants, *kept), carried)
