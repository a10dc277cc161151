"""The end of a window, in place on every machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from gradcombine.backends.registry import load
from gradcombine.integrations.jax.axes import align, aligned
from gradcombine.types import Array, Tree


def run_if(condition: Array, run: Callable[[Tree], tuple[Tree, Tree]], kept: Tree) -> tuple[Tree, Tree]:
    """``run(kept)`` where the scalar condition holds; else ``kept`` as it is, and zeros for the metrics beside it.

    Whatever else `run` reads it closes over, and it is not written; ``kept`` is changed in place. A conditional would
    copy every buffer that passes through it, or, on GPUs, run both branches and select, so this is a loop that turns
    once or not at all. As JAX has no reverse of such a loop, derivatives are those of the conditional.

    Args:
      condition: boolean scalar, the same on all replicas.
      run: ``kept -> (kept, told)``, with the shapes and dtypes that were kept.
      kept: a tree of arrays.

    Returns:
      What is kept, and what is told.
    """
    if not isinstance(condition, Tracer):
        return run(kept) if condition else (kept, _zeros(run, kept))
    traced, (specs, told) = jax.make_jaxpr(run, return_shape=True)(kept)
    while not aligned(kept, specs):
        kept = align(kept, specs)
        traced, (specs, told) = jax.make_jaxpr(run, return_shape=True)(kept)
    # All that is traced is an argument, also what `run` closes over: a derivative does not see through a closure.
    leaves, constants = jax.tree.leaves(kept), traced.consts

    def begin(arrays: Sequence[Array]) -> tuple[Sequence[Array], list[Array]]:
        zeros = [jnp.zeros(spec.shape, spec.dtype) for spec in jax.tree.leaves(told)]
        return arrays[: len(constants)], [*arrays[len(constants) :], *align(zeros, jax.tree.leaves(told))]

    def turned(constants: Sequence[Array], held: list[Array]) -> list[Array]:
        return align(eval_jaxpr(traced.jaxpr, constants, *held[: len(leaves)]), held)

    def loop(condition: Array, *arrays: Array) -> list[Array]:
        closed, held = begin(arrays)

        def turn(carry: list[Array]) -> list[Array]:
            return [jnp.zeros_like(condition), *turned(closed, carry[1:])]

        return jax.lax.while_loop(lambda carry: carry[0], turn, [condition, *held])[1:]

    def conditional(condition: Array, *arrays: Array) -> list[Array]:
        closed, held = begin(arrays)
        return jax.lax.cond(condition, lambda: turned(closed, held), lambda: held)

    flat = load("jax").custom_derivative(loop, conditional, [condition, *constants, *leaves])
    return jax.tree.unflatten(jax.tree.structure((specs, told)), flat)


def conditional(condition: Array, run: Callable[[Tree], tuple[Tree, Tree]], kept: Tree) -> tuple[Tree, Tree]:
    """The same by a conditional, which GPUs turn into selects where all of its operations are elementwise."""
    if not isinstance(condition, Tracer):
        return run_if(condition, run, kept)
    return jax.lax.cond(condition, run, lambda kept: (kept, _zeros(run, kept)), kept)


def _zeros(run: Callable[[Tree], tuple[Tree, Tree]], kept: Tree) -> Tree:
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(run, kept)[1])
