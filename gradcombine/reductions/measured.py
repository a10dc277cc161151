"""Reductions that measure what they combine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Shortcuts, require_reduction
from gradcombine.reductions.contributions import global_norm, norm_dtype
from gradcombine.reductions.moments import moments
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.plain import max as maximum
from gradcombine.reductions.sums import sum as sum_
from gradcombine.types import Array, Order, State, Tree, no_autograph


class Metrics(NamedTuple):
    """What contributions were like; scalars, all zeros where there was none.

    Attributes:
      norm_mean: the weighted mean of their norms, each over all leaves of a contribution.
      norm_variance: the weighted variance around it.
      norm_max: the largest norm.
      count: int32, their number.
      weight: the sum of their weights.
    """

    norm_mean: Array
    norm_variance: Array
    norm_max: Array
    count: Array
    weight: Array


class Measured(NamedTuple):
    """The value of a reduction, and metrics of what was combined."""

    value: Tree
    metrics: Metrics


class MeasuredState(NamedTuple):
    """A partial result, and that of the metrics."""

    value: State
    metrics: State


class _Entry(NamedTuple):
    """What the metrics are made of: a contribution's norm twice, and 1 twice."""

    norm: Any
    largest: Any
    count: Any
    weight: Any


_METRICS = per_leaf(_Entry(moments(), maximum(), sum_(), replace(sum_(), scales_by_weight=True)))


@no_autograph
def measured(reduction: Reduction) -> Reduction:
    """The same reduction, whose value comes with metrics of the contributions that it was made of.

    For a dashboard, for the noise scale, and to see what `clipped` and `zeroed` take away: ``measured(zeroed(r))``
    measures everything, ``zeroed(measured(r))`` what is left. The norms are those over all leaves of one contribution:
    in a list of one tree, over replicas of that of each replica. Contributions of weight 0 are not measured.

    Args:
      reduction: any reduction of float leaves.

    Returns:
      A reduction whose result is ``Measured(value, Metrics(norm_mean, norm_variance, norm_max, count, weight))``.

    Raises:
      GradCombineError: in ``init`` and ``update`` for leaves that are not floats.

    Bits: those of the reduction. Of the metrics the norms are rounded as in `clipped`, the rest as in `moments`, `max`
    and `sum`.

    >>> import numpy as np, gradcombine as gc
    >>> grads = [np.float32([3, 4]), np.float32([0, 1])]
    >>> value, metrics = gc.combine(gc.reductions.measured(gc.reductions.mean()), grads, weights=[1, 3])
    >>> value, [float(x) for x in metrics]
    (array([0.75, 1.75], dtype=float32), [2.0, 3.0, 5.0, 2.0, 4.0])
    """
    require_reduction("measured", reduction)

    def opened(state: State) -> MeasuredState:
        if not isinstance(state, MeasuredState):
            raise GradCombineError(reduction.name, "a MeasuredState", type(state).__name__)
        return state

    @no_autograph
    def init(like: Tree) -> MeasuredState:
        leaves, structure = tree.flatten("measured", like)
        dtype = norm_dtype("measured", leaves, structure)
        backend = resolve("measured", leaves)
        present = [leaf for leaf in leaves if not is_absent(leaf)]
        # The weight's width is that of the reductions' own sums of weights.
        entry = (backend.full((), 0, kind, present) for kind in (dtype, dtype, dtypes.INT32, dtype))
        return MeasuredState(reduction.init(like), _METRICS.init(_Entry(*entry)))

    @no_autograph
    def update(state: State, value: Tree, weight: Any = 1) -> MeasuredState:
        state = opened(state)
        updated = reduction.update(state.value, value, weight)
        leaves, structure = tree.flatten("measured", value)
        backend = resolve("measured", [*leaves, weight])
        norm = global_norm("measured", backend, leaves, structure)
        wide = state.metrics.parts[0].dtypes.dtype
        one = backend.full((), 1, dtypes.INT32), backend.full((), 1, wide)
        norm = backend.cast(norm, wide)
        return MeasuredState(updated, _METRICS.update(state.metrics, _Entry(norm, norm, *one), weight))

    @no_autograph
    def merge(a: State, b: State) -> MeasuredState:
        a, b = opened(a), opened(b)
        return MeasuredState(reduction.merge(a.value, b.value), _METRICS.merge(a.metrics, b.metrics))

    @no_autograph
    def finalize(state: State) -> Measured:
        state = opened(state)
        entry = _METRICS.finalize(state.metrics)
        backend = resolve("measured", [entry.count])
        largest = backend.where(entry.count == 0, backend.full((), 0, backend.dtype(entry.largest)), entry.largest)
        metrics = Metrics(entry.norm.mean, entry.norm.variance, largest, entry.count, entry.weight)
        return Measured(reduction.finalize(state.value), metrics)

    @no_autograph
    def clear(state: State) -> MeasuredState:
        state = opened(state)
        return MeasuredState(reduction.clear(state.value), _METRICS.clear(state.metrics))

    @no_autograph
    def all_merge(state: State, collective: Collective, order: Order) -> MeasuredState:
        state = opened(state)
        value = reduction.all_merge(state.value, collective, order)
        return MeasuredState(value, _METRICS.all_merge(state.metrics, collective, order))

    functions = init, update, merge, finalize
    derivative = None if reduction.derivative is None else measured(reduction.derivative)
    shortcuts = Shortcuts(functions, clear, all_merge, derivative=derivative)
    name = f"measured({reduction.name})"
    return Reduction(*functions, name=name, scales_by_weight=reduction.scales_by_weight, shortcuts=shortcuts)
