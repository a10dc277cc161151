"""Accumulation over microbatches and replicas, around an optax transformation."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

import gradcombine as gc
from gradcombine.accumulate import window as whole
from gradcombine.backends.protocol import Collective
from gradcombine.checks import require_collective
from gradcombine.errors import GradCombineError
from gradcombine.integrations.jax.numbers import as_arrays
from gradcombine.integrations.jax.placement import place_beside
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.optax.agree import any_replica, require_flag
from gradcombine.integrations.optax.contribution import cast_as, gradients_like, keep_dtypes, weight_unless, widen
from gradcombine.integrations.optax.placeholder import init_for
from gradcombine.integrations.optax.skip import Skip, SkipState, decide, first_detail
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, Array, Order


class AccumulateUpdatesState(NamedTuple):
    """The state of `accumulate`.

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


def accumulate(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Any],
    *,
    reduction: Reduction | None = None,
    over: Collective | None = None,
    skip: Skip | None = None,
    order: Order = "sequential",
    max_every: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation once a window, on the gradients combined over its microbatches and over the replicas.

    The last microbatch of a window merges the replicas' windows, divides once, and runs ``inner``; all others return
    zeros and leave its state alone. So clipping, weight decay and schedules inside ``inner`` happen once a window, and
    replicas exchange gradients once a window.

    Args:
      inner: the transformation to run, an optimizer for instance.
      every, order, max_every: as for `gradcombine.accumulate`.
      reduction: from `gradcombine.reductions`; None: their mean.
      over: the replicas that share the parameters: `gradcombine.jax_axis`, or `gradcombine.LOCAL`; None: the latter.
      skip: which microbatches to leave out: `skip_not_finite()`, `skip_large(max_norm)` or any function
        ``(updates, gradient_step, params) -> (boolean scalar, detail)``. It sees this replica's gradients as they
        arrive. Where it says so on any replica, the microbatch is left out on all of them, agreed by one small exchange
        an update. One that is left out has weight 0 and still is a step of its window: so windows end with the same
        microbatches as without it, at a batch's, an epoch's or a checkpoint's end, and schedules stay in step with the
        data, while the mean is over what was kept. A window of which nothing was kept does not run ``inner``: neither
        momentum nor decay acts on a gradient that was not there. (`MultiSteps` waits for ``every`` good ones instead.)

    Returns:
      A transformation. Its ``init(params)`` makes an `AccumulateUpdatesState`; a parameter that never has a gradient is
      None in ``params``, and then in all updates. Its ``update`` takes ``(updates, state, params=None, *, weight=1.0,
      flush=False, **extra_args)``:

      - ``updates``: gradients of the parameters' shapes, in their dtypes or in narrower ones, which are widened without
        loss. A leaf that is None for once adds nothing there. What ``inner`` gets has the dtypes that the reduction
        gives to such updates: their own, unless it was made with another ``output_dtype``.
      - ``weight``: of this microbatch on this replica, for instance its number of tokens.
      - ``flush``: a boolean scalar. True ends the window with this microbatch, as at the end of the data, and divides
        by what it holds. A traced one is agreed over the replicas, where any of them flushes all do, by one more small
        exchange an update. Where no data is left, flush with any updates and weight 0.
      - ``extra_args``: for ``inner``, which gets those of the window's last microbatch.

    Raises:
      GradCombineError: as `gradcombine.accumulate`, and in ``update`` also for a ``flush`` that is not a boolean
        scalar, for an axis that is not bound, and for updates that shard_map (check_vma) knows to be combined already.

    In shard_map, make the state inside and scan over the microbatches there; then only ``inner`` has to leave, under
    specs ``P()``. A window that outlives the call has one part a replica: ``window.levels`` gets a leading axis of
    replicas (``x[None]`` as it leaves, ``x[0]`` as it enters) and specs ``P(axis)``, all else ``P()``. With check_vma,
    differentiate by ``jax.lax.pcast(params, axis, to="varying")``: the gradients have to be the replica's own.

    Bits: ``inner`` gets those of `gradcombine.combine` over the microbatches; over replicas, those of
    `gradcombine.merge_replicas`.

    References: `optax.MultiSteps <https://optax.readthedocs.io/en/latest/api/optimizer_wrappers.html>`_.

    >>> import jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import accumulate
    >>> tx = accumulate(optax.sgd(1.0), every=2)
    >>> params = {"w": jnp.zeros(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"w": jnp.float32([1, 2])}, state, params, weight=1)
    >>> updates["w"].tolist(), bool(state.applied)
    ([0.0, 0.0], False)
    >>> updates, state = tx.update({"w": jnp.float32([3, 4])}, state, params, weight=3)
    >>> updates["w"].tolist(), bool(state.applied)
    ([-2.5, -3.5], True)
    """
    reduction = gc.reductions.mean() if reduction is None else reduction
    acc = gc.accumulate(reduction, every, order=order, max_every=max_every)
    length_at = every if callable(every) else lambda index: operator.index(every)
    replicas = gc.LOCAL if over is None else over
    require_collective("accumulate", replicas)
    if not isinstance(inner, optax.GradientTransformation):
        raise GradCombineError("accumulate", "an optax.GradientTransformation", type(inner).__name__)
    if skip is not None and not callable(skip):
        raise GradCombineError("accumulate", "a skip function, or None", repr(skip))
    wrapped = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> AccumulateUpdatesState:
        params = as_arrays(params)
        like = gradients_like(params)
        window = jax.tree.map(jnp.asarray, init_for(acc.init, like))
        skipped = ()
        if skip is not None:
            skipped = SkipState(jnp.int32(0), jnp.int32(0), first_detail("accumulate", skip, like))
        # Outside of the mapped function the axis is not bound, and there is nothing to mark.
        with contextlib.suppress(GradCombineError):
            window, skipped = _own(replicas, window, skipped)
        state = AccumulateUpdatesState(window, wrapped.init(params), jnp.asarray(False), skipped)
        return place_beside(like, state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        weight: Any = 1.0,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateUpdatesState]:
        before, updates = _checked(state, skip), as_arrays(updates)
        contribution, given = widen(reduction, updates, jax.eval_shape(acc.value, before.window), replicas)
        left_out, detail = False, ()
        if skip is not None:
            index = jnp.where(acc.ready(before.window), before.window.index + 1, before.window.index)
            left_out, detail = decide("accumulate", skip, updates, index, params)
        flushed, left_out = any_replica([require_flag("accumulate", "flush", flush), left_out], replicas)
        window = acc.update(contribution, before.window, weight_unless("accumulate", left_out, weight))
        skipped, empty = (), False
        if skip is not None:
            skipped = _count(before.skip, left_out, detail)
            empty = skipped.in_a_row >= window.step
        window, skipped = _own(replicas, window, skipped)
        # A flushed window counts as full: the next update begins another.
        length = jnp.asarray(length_at(window.index), window.step.dtype)
        window = window._replace(step=jnp.where(flushed, jnp.maximum(window.step, length), window.step))
        applied = acc.ready(window) if skip is None else jnp.logical_and(acc.ready(window), ~empty)

        # The window is only read here: a buffer that passes through a conditional is copied.
        def apply(inner_state: Any) -> tuple[Any, optax.Updates]:
            merged = gc.merge_replicas(reduction, whole(reduction, window), over=replicas, order=order)
            gradients = cast_as(reduction.finalize(merged), given)
            result, new = wrapped.update(gradients, inner_state, params, **extra_args)
            return keep_dtypes(new, inner_state), result

        def wait(inner_state: Any) -> tuple[Any, optax.Updates]:
            return inner_state, jax.tree.map(jnp.zeros_like, jax.eval_shape(apply, inner_state)[1])

        if not isinstance(applied, Tracer):
            inner_state, result = apply(before.inner) if applied else wait(before.inner)
        elif replicas is gc.LOCAL:
            # Of elementwise branches, which GPUs fuse with what reads the updates; a loop would have to write them.
            inner_state, result = jax.lax.cond(applied, apply, wait, before.inner)
        else:
            inner_state, result = run_if(applied, apply, before.inner)
        return result, AccumulateUpdatesState(window, inner_state, jnp.asarray(applied), skipped)

    return optax.GradientTransformationExtraArgs(init, update)


def _own(over: Collective, window: AccumulateState, skipped: Any) -> tuple[AccumulateState, Any]:
    """What is this replica's own, typed so from the start, so that a scan may carry it under check_vma."""
    own = (window.levels, skipped.detail if isinstance(skipped, SkipState) else ())
    arrays, structure = jax.tree.flatten(own)
    levels, detail = jax.tree.unflatten(structure, over.mark_varying(arrays))
    marked = skipped._replace(detail=detail) if isinstance(skipped, SkipState) else skipped
    return window._replace(levels=levels), marked


def _count(state: SkipState, left_out: Any, detail: Any) -> SkipState:
    skipped = jnp.where(left_out, state.skipped + 1, state.skipped)
    return SkipState(skipped, jnp.where(left_out, state.in_a_row + 1, 0), detail)


def _checked(state: Any, skip: Skip | None) -> AccumulateUpdatesState:
    """The state, refused if it is another transformation's."""
    if not isinstance(state, AccumulateUpdatesState):
        raise GradCombineError("accumulate", "an AccumulateUpdatesState", type(state).__name__)
    if isinstance(state.skip, SkipState) != (skip is not None):
        expected = "a state made without a skip function" if skip is None else "a state made with a skip function"
        raise GradCombineError("accumulate", expected, type(state.skip).__name__)
    return state
