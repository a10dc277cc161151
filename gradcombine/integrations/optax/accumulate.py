"""Accumulation over microbatches and replicas, around an optax transformation."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

import gradcombine as gc
from gradcombine import tree
from gradcombine.accumulate import window as whole
from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError
from gradcombine.integrations.optax.checks import require_collective
from gradcombine.reductions import dtypes
from gradcombine.types import AccumulateState, Array, Order, Reduction, Tree


class AccumulateUpdatesState(NamedTuple):
    """The state of `accumulate`.

    Attributes:
      window: the microbatches so far. ``window.levels`` is each replica's own, all else is the same on all replicas.
      inner: the state of the inner transformation.
      applied: boolean scalar, whether the last update ended a window, so that the inner transformation ran.
    """

    window: AccumulateState
    inner: Any
    applied: Array


def accumulate(
    inner: optax.GradientTransformation,
    every: int | Callable[[Array], Any],
    *,
    reduction: Reduction | None = None,
    over: Collective = gc.LOCAL,
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
      over: the replicas that share the parameters: `gradcombine.LOCAL` or `gradcombine.jax_axis`.

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
    require_collective("accumulate", over)
    if not isinstance(inner, optax.GradientTransformation):
        raise GradCombineError("accumulate", "an optax.GradientTransformation", type(inner).__name__)
    wrapped = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> AccumulateUpdatesState:
        window = jax.tree.map(jnp.asarray, acc.init(params))
        # Outside of the mapped function the axis is not bound, and there is nothing to mark.
        with contextlib.suppress(GradCombineError):
            window = _own(over, window)
        return AccumulateUpdatesState(window, wrapped.init(params), jnp.asarray(False))

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        weight: Any = 1.0,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateUpdatesState]:
        if not isinstance(state, AccumulateUpdatesState):
            raise GradCombineError("accumulate", "an AccumulateUpdatesState", type(state).__name__)
        contribution, given = _widen(reduction, updates, jax.eval_shape(acc.value, state.window), over)
        window = _own(over, acc.update(contribution, state.window, weight))
        # A flushed window counts as full: the next update begins another.
        length = jnp.asarray(length_at(window.index), window.step.dtype)
        step = jnp.where(_agreed(flush, over), jnp.maximum(window.step, length), window.step)
        window = window._replace(step=step)
        applied = acc.ready(window)

        # The window is only read in the conditional: a buffer that passes through one is copied.
        def apply() -> tuple[optax.Updates, Any]:
            merged = gc.merge_replicas(reduction, whole(reduction, window), over=over, order=order)
            return wrapped.update(_cast(reduction.finalize(merged), given), state.inner, params, **extra_args)

        def wait() -> tuple[optax.Updates, Any]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0]), state.inner

        if isinstance(applied, Tracer):
            result, inner_state = jax.lax.cond(applied, apply, wait)
        else:
            result, inner_state = apply() if applied else wait()
        return result, AccumulateUpdatesState(window, inner_state, jnp.asarray(applied))

    return optax.GradientTransformationExtraArgs(init, update)


def _own(over: Collective, window: AccumulateState) -> AccumulateState:
    """The window, typed as this replica's own from the start, so that a scan may carry it under check_vma."""
    arrays, structure = jax.tree.flatten(window.levels)
    return window._replace(levels=jax.tree.unflatten(structure, over.vary(arrays)))


def _widen(reduction: Reduction, updates: Tree, made_for: Tree, over: Collective) -> tuple[Tree, Tree]:
    """The updates in the dtypes that the window was made for, and specs of what the reduction gives to the updates."""
    specs, structure = tree.flatten("accumulate", made_for)
    leaves = tree.flatten_as("accumulate", structure, updates)
    own = [x for x in zip(structure.paths(), leaves, specs, strict=True) if x[1] is not None and x[2] is not None]
    over.require_own("accumulate", [path for path, _, _ in own], [leaf for _, leaf, _ in own])
    given = jax.eval_shape(lambda: reduction.finalize(reduction.init(updates)))
    outputs = tree.flatten_as("accumulate", structure, given)

    def widen(leaf: Any, output: Any, spec: Any) -> Any:
        if leaf is None or spec is None or output.dtype == spec.dtype:
            return leaf
        wider = dtypes.kind(leaf.dtype) == dtypes.kind(spec.dtype) and np.can_cast(leaf.dtype, spec.dtype)
        return leaf.astype(spec.dtype) if wider else leaf

    return tree.unflatten(structure, map(widen, leaves, outputs, specs)), given


def _cast(values: Tree, given: Tree) -> Tree:
    """The values in the given dtypes; a leaf without one keeps its own."""
    leaves, structure = tree.flatten("accumulate", values)
    specs = tree.flatten_as("accumulate", structure, given)
    pairs = zip(leaves, specs, strict=True)
    cast = (x if x is None or spec is None else x.astype(spec.dtype) for x, spec in pairs)
    return tree.unflatten(structure, cast)


def _agreed(flush: Any, over: Collective) -> Any:
    """Whether any replica flushes: were the replicas to differ, some would wait in a collective for ever."""
    if isinstance(flush, (bool, np.bool_)):
        return flush
    if not isinstance(flush, (np.ndarray, jax.Array)) or flush.dtype != np.bool_ or flush.shape != ():
        raise GradCombineError("accumulate", "flush as a boolean scalar", repr(flush))
    if not isinstance(flush, Tracer):
        return bool(flush)
    return over.all_sum([flush.astype(np.int32)])[0] > 0
