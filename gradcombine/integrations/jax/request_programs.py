# pyright: standard
"""Compiled programs for windows whose microbatches and updates are separate requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine.integrations.jax.contribution import Objective
from gradcombine.integrations.jax.on_replicas import on_replicas
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.jax.step_functions import StepMetrics, holds_aux, microbatch, optimize_combined
from gradcombine.integrations.jax.training_step import compile_step
from gradcombine.places.window import Window
from gradcombine.settings import UNTIL_FLUSH
from gradcombine.types import AccumulateState, Array, Scalar, State, Tree

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class RequestPrograms:
    """Programs for one window of one slot, shared by all slots with arrays of the same shapes.

    A node is a state of the reduction, different on each replica. Numbers of microbatches and windows are arrays, so
    that new numbers do not retrace.
    """

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs

    @cached_property
    def begin(self) -> jax.stages.Wrapped:
        """``begin(params, index, number, batch, kwargs) -> node``: the node of the first microbatch."""
        return compile_step(self._begin, ())

    @cached_property
    def more(self) -> jax.stages.Wrapped:
        """``more(node, params, index, number, batch, kwargs) -> node``: adds a microbatch; donates the node."""
        return compile_step(self._more, (0,))

    @cached_property
    def merge(self) -> jax.stages.Wrapped:
        """``merge(node, later) -> node``, for order "tree"; donates the first node."""
        return compile_step(self._merge, (0,))

    @cached_property
    def end(self) -> jax.stages.Wrapped:
        """``end(params, opt_state, node, index) -> params, opt_state, node, metrics``; donates the first three."""
        return compile_step(self._end, (0, 1, 2))

    @cached_property
    def merge_replicas(self) -> jax.stages.Wrapped:
        """``merge_replicas(node) -> state``."""
        return compile_step(self._merge_replicas, ())

    @cached_property
    def place_on_first(self) -> jax.stages.Wrapped:
        """``place_on_first(state, params) -> node``: the state on the first replica, empty states on the others."""
        return jax.jit(self._place_on_first, keep_unused=True)  # the parameters determine the devices

    def _begin(
        self, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> State:
        return self._contribute(params, index, number, batch, kwargs, ())

    def _more(
        self, node: State, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> State:
        return self._contribute(params, index, number, batch, kwargs, (node,))

    def _contribute(
        self,
        params: Tree,
        index: Scalar,
        number: Scalar,
        batch: Sequence[Tree],
        kwargs: dict[str, Tree],
        nodes: tuple[State, ...],
    ) -> State:
        """Adds a microbatch to the node in ``nodes``, or to an empty one."""
        over = self.objective.over

        def contribute(loss_args: list[Tree], kwargs: dict[str, Tree], shared: Tree, local: Tree) -> tuple[Tree, Tree]:
            index, number = shared
            added = microbatch(self.objective, loss_args, kwargs, index, number * over.size() + over.rank())
            window = self.window("aux" in added.parts)
            held = window_of(local[0]) if local else window.init(added.parts)
            return (), window.contribute(held, added.parts, added.weight).levels[0]

        return self.objective.on_replicas(contribute, [params, *batch], kwargs, (index, number), nodes)[1]

    def _merge(self, node: State, later: State) -> State:
        reduction = self.window(holds_aux(window_of(node))).reduction

        def merge(shared: Tree, batch: Tree, local: Tree) -> tuple[Tree, State]:
            return (), reduction.merge(*local)

        return on_replicas(self.objective.over, merge, (), local=(node, later))[1]

    def _end(self, params: Tree, opt_state: Tree, node: State, index: Array) -> tuple[Tree, Tree, State, StepMetrics]:
        window = self.window(holds_aux(window_of(node)))
        window = dataclasses.replace(window, params=params, order=self.objective.order, max_every=1)

        close = partial(optimize_combined, self.objective, self.optimizer)
        held = window_of(node)._replace(index=index)
        held, kept, metrics = window.apply_if(np.True_, held, close, (params, opt_state), run_if)
        return *kept, held.levels[0], metrics

    def no_metrics(self) -> StepMetrics:
        """Metrics of a request that applied nothing: zeros."""
        loss, zero = self.objective.loss, jnp.zeros(())
        norm = zero if loss.grad_norm else None
        if loss.terms is None:
            return StepMetrics(jnp.asarray(False), zero, zero, None, norm)
        by_denominator = dict.fromkeys(sorted(set(loss.terms.values())), zero)
        norms = by_denominator if loss.grad_norm and loss.totals is None else None
        return StepMetrics(jnp.asarray(False), dict.fromkeys(loss.terms, zero), by_denominator, None, norm, norms)

    def _merge_replicas(self, node: State) -> State:
        window = self.window(holds_aux(window_of(node)))

        def merge(shared: Tree, batch: Tree, local: Tree) -> tuple[State, Tree]:
            return window.merged(window_of(local))[0], ()

        return on_replicas(self.objective.over, merge, (), local=node)[0]

    def _place_on_first(self, state: State, params: Tree) -> State:
        reduction, over = self.window(holds_aux(window_of(state))).reduction, self.objective.over

        def place(shared: Tree, batch: Tree, local: Tree) -> tuple[Tree, State]:
            state, is_first = shared[0], over.rank() == 0
            return (), jax.tree.map(lambda x, empty: jnp.where(is_first, x, empty), state, reduction.clear(state))

        return on_replicas(over, place, (state, params))[1]

    def window(self, has_aux: bool) -> Window:
        """Window that adds microbatches to a node one after another."""
        return dataclasses.replace(self.objective, order="sequential").window(UNTIL_FLUSH, has_aux=has_aux)


def window_of(node: State) -> AccumulateState:
    """The state of a window with the contents of a node that is not empty."""
    return AccumulateState((node,), np.int32(1), np.int32(0))
