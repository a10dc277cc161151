# pyright: standard
"""The compiled programs of windows whose microbatches and whose end are separate requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine.integrations.jax.contribution import Objective
from gradcombine.integrations.jax.on_replicas import on_replicas
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.jax.step_functions import StepMetrics, holds_aux, keep_dtypes, microbatch, optimize
from gradcombine.integrations.jax.training_step import compile_step
from gradcombine.places.window import Window
from gradcombine.settings import UNTIL_FLUSH
from gradcombine.types import AccumulateState, Array, Scalar, State, Tree

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class RequestPrograms:
    """Programs on one window of one slot, shared by all slots whose arrays have the same shapes.

    A node is a state of the reduction, each replica's own. The numbers of microbatches and windows are arrays: nothing
    is traced again for them.
    """

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs

    @cached_property
    def begin(self) -> jax.stages.Wrapped:
        """``begin(params, index, number, batch, kwargs) -> node``: a window of one microbatch."""
        return compile_step(self._begun, ())

    @cached_property
    def more(self) -> jax.stages.Wrapped:
        """``more(node, params, index, number, batch, kwargs) -> node``, in place of the first argument."""
        return compile_step(self._added, (0,))

    @cached_property
    def merge(self) -> jax.stages.Wrapped:
        """``merge(node, later) -> node``, in order "tree"."""
        return compile_step(self._merged, (0,))

    @cached_property
    def end(self) -> jax.stages.Wrapped:
        """``end(params, opt_state, node, index) -> params, opt_state, node, metrics``, in place."""
        return compile_step(self._ended, (0, 1, 2))

    @cached_property
    def merge_replicas(self) -> jax.stages.Wrapped:
        """``merge_replicas(node) -> state``: of all replicas."""
        return compile_step(self._merged_replicas, ())

    @cached_property
    def on_the_first(self) -> jax.stages.Wrapped:
        """``on_the_first(state, params) -> node``, of which the first replica has the state, and the others nothing."""
        return jax.jit(self._on_the_first, keep_unused=True)  # the parameters say which devices

    def _begun(
        self, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> State:
        return self._computed(params, index, number, batch, kwargs, ())

    def _added(
        self, node: State, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> State:
        return self._computed(params, index, number, batch, kwargs, (node,))

    def _computed(
        self,
        params: Tree,
        index: Scalar,
        number: Scalar,
        batch: Sequence[Tree],
        kwargs: dict[str, Tree],
        own: tuple[State, ...],
    ) -> State:
        over = self.objective.over

        def contribute(called: list[Tree], kwargs: dict[str, Tree], whole: Tree, own: Tree) -> tuple[Tree, Tree]:
            index, number = whole
            added = microbatch(self.objective, called, kwargs, index, number * over.size() + over.rank())
            window = self.window("aux" in added.parts)
            held = window_of(own[0]) if own else window.init(added.parts)
            return (), window.contribute(held, added.parts, added.weight).levels[0]

        return self.objective.on_replicas(contribute, [params, *batch], kwargs, (index, number), own)[1]

    def _merged(self, node: State, later: State) -> State:
        reduction = self.window(holds_aux(window_of(node))).reduction

        def merge(whole: Tree, rows: Tree, own: Tree) -> tuple[Tree, State]:
            return (), reduction.merge(*own)

        return on_replicas(self.objective.over, merge, (), own=(node, later))[1]

    def _ended(self, params: Tree, opt_state: Tree, node: State, index: Array) -> tuple[Tree, Tree, State, StepMetrics]:
        window = self.window(holds_aux(window_of(node)))
        window = dataclasses.replace(window, params=params, order=self.objective.order, max_every=1)

        def close(kept: Tree, combined: dict[str, Tree]) -> tuple[Tree, StepMetrics]:
            (params, opt_state), told = optimize(self.optimizer, kept[0], kept[1], self.objective.told(combined))
            return (params, keep_dtypes(opt_state, kept[1])), told

        held = window_of(node)._replace(index=index)
        held, kept, metrics = window.apply_if(np.True_, held, close, (params, opt_state), run_if)
        return *kept, held.levels[0], metrics

    def no_metrics(self) -> StepMetrics:
        """The metrics of a request that has applied nothing."""
        loss, zero = self.objective.loss, jnp.zeros(())
        norm = zero if loss.grad_norm else None
        if loss.terms is None:
            return StepMetrics(jnp.asarray(False), zero, zero, None, norm)
        by_denominator = dict.fromkeys(sorted(set(loss.terms.values())), zero)
        norms = by_denominator if loss.grad_norm and loss.totals is None else None
        return StepMetrics(jnp.asarray(False), dict.fromkeys(loss.terms, zero), by_denominator, None, norm, norms)

    def _merged_replicas(self, node: State) -> State:
        window = self.window(holds_aux(window_of(node)))

        def merge(whole: Tree, rows: Tree, own: Tree) -> tuple[State, Tree]:
            return window.merged(window_of(own))[0], ()

        return on_replicas(self.objective.over, merge, (), own=node)[0]

    def _on_the_first(self, state: State, params: Tree) -> State:
        reduction, over = self.window(holds_aux(window_of(state))).reduction, self.objective.over

        def place(whole: Tree, rows: Tree, own: Tree) -> tuple[Tree, State]:
            value, first = whole[0], over.rank() == 0
            return (), jax.tree.map(lambda x, empty: jnp.where(first, x, empty), value, reduction.clear(value))

        return on_replicas(over, place, (state, params))[1]

    def window(self, has_aux: bool) -> Window:
        """The window of a node, whose microbatches are added one after another."""
        return dataclasses.replace(self.objective, order="sequential").window(UNTIL_FLUSH, has_aux=has_aux)


def window_of(node: State) -> AccumulateState:
    """The window of a node that is not empty."""
    return AccumulateState((node,), np.int32(1), np.int32(0))
