"""Microbatches on their way into the window of an optax transformation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError
from gradcombine.integrations.jax.axes import own
from gradcombine.integrations.jax.numbers import as_arrays
from gradcombine.integrations.jax.on_replicas import ReplicatedWindow
from gradcombine.integrations.jax.placement import place_beside
from gradcombine.integrations.optax.contribution import gradients_like, in_dtypes_of_window
from gradcombine.integrations.optax.placeholder import init_for
from gradcombine.integrations.optax.skip import Skip, SkipState, decide, first_detail
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, Array, Order, Tree
from gradcombine.window import require_flag


class AccumulateUpdatesState(NamedTuple):
    """The state of `accumulate` and `accumulate_and_apply`.

    Attributes:
      window: the microbatches so far. ``window.levels`` is each replica's own, all else is the same on all replicas.
      inner: the state of the inner transformation.
      applied: boolean scalar, whether the inner transformation ran in the last update.
      skip: a `SkipState` with a skip function, else (). Its ``detail`` is each replica's own too.
    """

    window: AccumulateState
    inner: Any
    applied: Array
    skip: Any = ()


class Accumulation:
    """The window, the inner transformation, and what is left out; the arguments are those of `accumulate`."""

    def __init__(
        self,
        operation: str,
        inner: optax.GradientTransformation,
        every: int | Callable[[Array], Any],
        reduction: Reduction | None,
        over: Collective | None,
        skip: Skip | None,
        order: Order,
        max_every: int | None,
    ) -> None:
        reduction = gc.reductions.mean() if reduction is None else reduction
        self.window = ReplicatedWindow(
            operation, reduction, every, gc.LOCAL if over is None else over, order, max_every
        )
        if not isinstance(inner, optax.GradientTransformation):
            raise GradCombineError(operation, "an optax.GradientTransformation", type(inner).__name__)
        if skip is not None and not callable(skip):
            raise GradCombineError(operation, "a skip function, or None", repr(skip))
        self.inner = optax.with_extra_args_support(inner)
        self._skip, self._operation = skip, operation

    def init(self, params: optax.Params) -> AccumulateUpdatesState:
        """No window begun."""
        params = as_arrays(params)
        like = gradients_like(params)
        window = jax.tree.map(jnp.asarray, init_for(self.window.init, like))
        skipped: Any = ()
        if self._skip is not None:
            skipped = SkipState(jnp.int32(0), jnp.int32(0), first_detail(self._operation, self._skip, like))
        # Outside of the mapped function the axis is not bound, and there is nothing to mark.
        with contextlib.suppress(GradCombineError):
            window, skipped = self.window.own(window), self._own(skipped)
        state = AccumulateUpdatesState(window, self.inner.init(params), jnp.asarray(False), skipped)
        return place_beside(like, state)

    def contribute(
        self, updates: optax.Updates, state: Any, params: optax.Params | None, weight: Any, flush: Any
    ) -> tuple[AccumulateUpdatesState, Tree]:
        """One more microbatch.

        Returns:
          The state after it, but for ``inner``, which runs where ``applied`` says so; and specs of the dtypes in which
          it is to be given the combined gradients, see `cast_as`.
        """
        self._require_state(state)
        updates = as_arrays(updates)
        contribution, dtypes = in_dtypes_of_window(self.window, updates, state.window)
        left_out: Any = False
        detail: Any = ()
        if self._skip is not None:
            index, _ = self.window.next(state.window)
            left_out, detail = decide(self._operation, self._skip, updates, index, params)
        flush, left_out = self.window.agreed([require_flag(self._operation, "flush", flush), left_out])
        window = self.window.contribute(state.window, contribution, weight, left_out=left_out)
        skipped = self._own(_counted(state.skip, left_out, detail)) if self._skip is not None else ()
        in_a_row = skipped.in_a_row if isinstance(skipped, SkipState) else None
        window, due = self.window.due(window, flush=flush, left_out_in_a_row=in_a_row)
        return AccumulateUpdatesState(window, state.inner, due, skipped), dtypes

    def _own(self, skipped: Any) -> Any:
        return skipped._replace(detail=own(self.window.over, skipped.detail)) if self._skip is not None else ()

    def _require_state(self, state: Any) -> None:
        """Refuses another transformation's."""
        if not isinstance(state, AccumulateUpdatesState):
            raise GradCombineError(self._operation, "an AccumulateUpdatesState", type(state).__name__)
        if isinstance(state.skip, SkipState) != (self._skip is not None):
            with_or_without = "without" if self._skip is None else "with"
            expected = f"a state made {with_or_without} a skip function"
            raise GradCombineError(self._operation, expected, type(state.skip).__name__)


def _counted(state: SkipState, left_out: Any, detail: Any) -> SkipState:
    skipped = jnp.where(left_out, state.skipped + 1, state.skipped)
    return SkipState(skipped, jnp.where(left_out, state.in_a_row + 1, 0), detail)
