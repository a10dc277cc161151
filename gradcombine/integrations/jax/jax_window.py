# pyright: standard
"""The end of a window in JAX: the all-reduce, over a mesh axis too, and a branch that updates its operands in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from gradcombine.backends.jax_backend import BACKEND, vary, varying
from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.integrations.jax.on_replicas import finalized, is_sharded, on_replicas, require_jax_collective, unbound
from gradcombine.places.window import Window
from gradcombine.types import AccumulateState, Array, State, Tree

SEPARATE_BYTES = 30 * 2**20
"""Bytes per replica from which XLA all-reduces an array on its own on GPUs, in place if nothing reads it again.

Smaller arrays are copied into a common buffer first, so that the originals stay intact.
"""


@dataclass(frozen=True)
class ReplicatedWindow(Window):
    """A window that merges the replicas of a mesh axis even if no surrounding transformation binds it.

    Attributes:
      params: the parameters, as for `finalized`.
    """

    params: Tree = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_jax_collective(self.over)

    def may_overwrite(self, array: Array) -> bool:
        if not isinstance(self.over, JaxAxis):
            return False
        if self.over.is_bound():
            return array.nbytes >= SEPARATE_BYTES
        # The first axis is that of the replicas. For sharded parameters, see `finalized`.
        return array.nbytes >= SEPARATE_BYTES * array.shape[0] and not is_sharded(self.over, self.params)

    def exchanged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[Tree, list[Array]]:
        axis = unbound(self.over)
        if axis is None:
            return super().exchanged(state, taken)

        def merge(counters: Tree, batch: Tree, levels: Tree) -> tuple[State, list[Array]]:
            return self.merged(AccumulateState(levels, *counters), taken)

        counters = state.step, state.index
        merged, arrays = on_replicas(axis, merge, counters, local=state.levels)
        return finalized(axis, self.reduction, merged, self.params), arrays


Run: TypeAlias = Callable[[Tree], tuple[Tree, Tree]]
"""``kept -> (kept, metrics)``; shapes and dtypes of ``kept`` do not change."""


def run_if(condition: Array, run: Run, kept: Tree) -> tuple[Tree, Tree]:
    """Returns ``run(kept)`` if the condition is true; else ``kept`` unchanged, and zeros for the metrics.

    A conditional would copy every buffer that passes through it, or, on GPUs, run both branches and select. So this is
    a while loop of at most one iteration, which updates ``kept`` in place and only reads what ``run`` closes over. JAX
    cannot differentiate a while loop in reverse mode: derivatives are those of the conditional.

    Args:
      condition: boolean scalar, the same on all replicas.
      run: ends a window, for instance.
    """
    if not isinstance(condition, Tracer):
        return conditional(condition, run, kept)
    branch = _Branch(run, kept)
    flat = BACKEND.custom_derivative(branch.loop, branch.conditional, [condition, *branch.arguments])
    return branch.results(flat)


def conditional(condition: Array, run: Run, kept: Tree) -> tuple[Tree, Tree]:
    """`run_if` as a conditional, which XLA turns into selects on GPUs if all of its operations are elementwise."""
    if isinstance(condition, Tracer):
        branch = _Branch(run, kept)
        return branch.results(branch.conditional(condition, *branch.arguments))
    if condition:
        return run(kept)
    return kept, jax.tree.map(jnp.zeros_like, jax.eval_shape(run, kept)[1])


class _Branch:
    """A traced ``run``, as a function of flat arrays.

    Arrays that it closes over become arguments, as custom derivatives cannot differentiate closed-over values.
    """

    def __init__(self, run: Run, kept: Tree) -> None:
        traced, specs = jax.make_jaxpr(run, return_shape=True)(kept)
        while not is_aligned(kept, specs[0]):
            kept = align(kept, specs[0])
            traced, specs = jax.make_jaxpr(run, return_shape=True)(kept)
        self._jaxpr, self._n_constants, self._specs = traced.jaxpr, len(traced.consts), specs
        self.arguments = [*traced.consts, *jax.tree.leaves(kept)]

    def loop(self, condition: Array, *arrays: Array) -> list[Array]:
        constants, operands = self._constants_and_operands(arrays)

        def body(carry: list[Array]) -> list[Array]:
            return [jnp.zeros_like(condition), *self._run(constants, carry[1:])]

        return jax.lax.while_loop(lambda carry: carry[0], body, [condition, *operands])[1:]

    def conditional(self, condition: Array, *arrays: Array) -> list[Array]:
        constants, operands = self._constants_and_operands(arrays)
        return jax.lax.cond(condition, lambda: self._run(constants, operands), lambda: operands)

    def results(self, arrays: Sequence[Array]) -> tuple[Tree, Tree]:
        return jax.tree.unflatten(jax.tree.structure(self._specs), arrays)

    def _constants_and_operands(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], list[Array]]:
        """Arrays that ``run`` closes over; and what the branch returns: ``kept``, and zeros for the metrics."""
        metrics = jax.tree.leaves(self._specs[1])
        zeros = align([BACKEND.full(spec.shape, 0, spec.dtype, [spec]) for spec in metrics], metrics)
        return arrays[: self._n_constants], [*arrays[self._n_constants :], *zeros]

    def _run(self, constants: Sequence[Array], operands: list[Array]) -> list[Array]:
        kept = operands[: len(self.arguments) - self._n_constants]
        return align(eval_jaxpr(self._jaxpr, constants, *kept), operands)


def align(values: Tree, specs: Tree) -> Tree:
    """Marks values as varying over the axes of their specs, as the carry of a scan or conditional requires."""
    return jax.tree.map(lambda value, spec: vary(value, varying(spec)), values, specs)


def is_aligned(values: Tree, specs: Tree) -> bool:
    """Whether `align` would change nothing."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs), strict=True)
    return all(varying(spec) <= varying(value) for value, spec in pairs)
