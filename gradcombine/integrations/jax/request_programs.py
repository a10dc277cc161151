# pyright: standard
"""Compiled programs for windows whose microbatches and updates are separate requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Wrapped

from gradcombine.integrations.jax.jax_window import run_if
from gradcombine.integrations.jax.objective import Objective
from gradcombine.integrations.jax.on_replicas import on_replicas
from gradcombine.integrations.jax.step_functions import StepMetrics, holds_aux, microbatch, optimize
from gradcombine.integrations.jax.training_step import compile_step
from gradcombine.places.window import Window
from gradcombine.reductions.feedback import require_none
from gradcombine.settings import UNTIL_FLUSH
from gradcombine.types import AccumulateState, Array, Scalar, State, Tree

if TYPE_CHECKING:
    import optax


def program(*donated: int, keep_unused: bool = False) -> Callable[[Callable[..., Tree]], cached_property[Wrapped]]:
    """Decorates a method: makes it a property, the method compiled on first use.

    Args:
      donated: positions of the donated arguments, without ``self``.
      keep_unused: as for jax.jit.
    """

    def decorate(method: Callable[..., Tree]) -> cached_property[Wrapped]:
        @wraps(method)
        def compiled(self: RequestPrograms) -> Wrapped:
            return compile_step(partial(method, self), donated, keep_unused)

        return cached_property(compiled)

    return decorate


@dataclass(frozen=True)
class RequestPrograms:
    """Programs for one window of one slot, shared by all slots with arrays of the same shapes.

    A node is a state of the reduction, different on each replica. Numbers of microbatches and windows are arrays, so
    that new numbers do not retrace.
    """

    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs

    @program()
    def begin(self, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]) -> State:
        """The node of the first microbatch."""
        return self._contribute(params, index, number, batch, kwargs, ())

    @program(0)
    def more(
        self, node: State, params: Tree, index: Array, number: Array, batch: Sequence[Tree], kwargs: dict[str, Tree]
    ) -> State:
        """Adds a microbatch to the node, which is donated."""
        return self._contribute(params, index, number, batch, kwargs, (node,))

    @program(0)
    def merge(self, node: State, later: State) -> State:
        """Merges two nodes, for order "tree"; donates the first one."""
        reduction = self._window_of(node).reduction

        def merge(shared: Tree, batch: Tree, local: Tree) -> tuple[Tree, State]:
            return (), reduction.merge(*local)

        return on_replicas(self.objective.over, merge, (), local=(node, later))[1]

    @program(0, 1, 2)
    def end(self, params: Tree, opt_state: Tree, node: State, index: Array) -> tuple[Tree, Tree, State, StepMetrics]:
        """Runs the optimizer; returns the first three, which are donated, and the metrics."""
        window = dataclasses.replace(self._window_of(node), params=params, order=self.objective.order, max_every=1)
        close = partial(optimize, self.objective, self.optimizer)
        held = window_of(node)._replace(index=index)
        held, kept, metrics = window.apply_if(np.True_, held, close, (params, opt_state), run_if)
        return *kept, held.levels[0], metrics

    @program()
    def merge_replicas(self, node: State) -> State:
        """Merges a node over the replicas."""
        window = self._window_of(node)

        def merge(shared: Tree, batch: Tree, local: Tree) -> tuple[State, Tree]:
            return window.merged(window_of(local))[0], ()

        return on_replicas(self.objective.over, merge, (), local=node)[0]

    @program(keep_unused=True)  # the parameters determine the devices
    def place_on_first(self, state: State, params: Tree) -> State:
        """The state as the first replica's node, and empty nodes on the others."""
        reduction, over = self._window_of(state).reduction, self.objective.over

        def place(shared: Tree, batch: Tree, local: Tree) -> tuple[Tree, State]:
            state, is_first = shared[0], over.rank() == 0
            return (), jax.tree.map(lambda x, empty: jnp.where(is_first, x, empty), state, reduction.clear(state))

        return on_replicas(over, place, (state, params))[1]

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

        def on_one(
            loss_args: list[Tree], kwargs: dict[str, Tree], shared: Tree, local: Tree
        ) -> tuple[Tree, Tree, Tree]:
            index, number = shared
            added = microbatch(self.objective, loss_args, kwargs, index, number * over.size() + over.rank())
            window = self.window("aux" in added.parts)
            held = window_of(local[0]) if local else window.init(added.parts)
            require_none(held.levels)
            return (), window.contribute(held, added.parts, added.weight).levels[0], None

        return self.objective.on_replicas(on_one, [params, *batch], kwargs, (index, number), nodes)[1]

    def no_metrics(self) -> StepMetrics:
        """Metrics of a request that applied nothing: zeros."""
        loss, zero = self.objective.loss, jnp.zeros(())
        norm = zero if loss.grad_norm else None
        if loss.terms is None:
            return StepMetrics(jnp.asarray(False), zero, zero, None, norm)
        by_denominator = dict.fromkeys(sorted(set(loss.terms.values())), zero)
        norms = by_denominator if loss.grad_norm and loss.totals is None else None
        return StepMetrics(jnp.asarray(False), dict.fromkeys(loss.terms, zero), by_denominator, None, norm, norms)

    def _window_of(self, node: State) -> Window:
        return self.window(holds_aux(window_of(node)))

    def window(self, has_aux: bool) -> Window:
        """Window that adds microbatches to a node one after another."""
        return dataclasses.replace(self.objective, order="sequential").window(UNTIL_FLUSH, has_aux=has_aux)


def window_of(node: State) -> AccumulateState:
    """The state of a window with the contents of a node that is not empty."""
    return AccumulateState((node,), np.int32(1), np.int32(0))
