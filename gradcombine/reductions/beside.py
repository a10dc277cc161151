"""Wrappers that run another reduction beside the wrapped one: `differentiable` and `measured`."""

from __future__ import annotations

from typing import NamedTuple

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import resolve
from gradcombine.errors import operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction, Weighed, Wrapper, derived
from gradcombine.reductions.moments import moments
from gradcombine.reductions.numbered import Numbered, without_numbers
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.plain import max as maximum
from gradcombine.reductions.sums import sum as sum_
from gradcombine.reductions.wrappers import global_norm, norm_dtype
from gradcombine.settings import check
from gradcombine.types import Array, Order, Scalar, State, Tree


class Beside(Wrapper):
    """A wrapper that runs another reduction beside the wrapped one; each state is a pair of theirs."""

    def __init__(self, of: Reduction, other: Reduction) -> None:
        super().__init__(of)
        self.other = other

    def merge(self, a: State, b: State) -> State:
        (x, x_other), (y, y_other) = self.require(a), self.require(b)
        return self.state(self.of.merge(x, y), self.other.merge(x_other, y_other))

    def clear(self, state: State) -> State:
        x, other = self.require(state)
        return self.state(self.of.clear(x), self.other.clear(other))

    def all_merge(self, state: State, collective: Collective, order: Order) -> State:
        x, other = self.require(state)
        return self.state(self.of.all_merge(x, collective, order), self.other.all_merge(other, collective, order))


class DifferentiableState(NamedTuple):
    """The state of a reduction, and the state of the reduction for its derivative."""

    value: State
    derivative: State


@operation("differentiable")
def differentiable(reduction: Reduction) -> Reduction:
    """Makes a reduction differentiable over time, too.

    In a list and over replicas, precision ``"exact"`` has the derivatives of the sum and the mean. But its states are
    integers: differentiating through `accumulate`, `update` or `merge` raises. The states of this wrapper also have a
    running value of precision ``"fast"``, which is differentiated instead.

    Args:
      reduction: any reduction. Returned unchanged if its states are differentiable.

    Returns:
      A reduction with the same bits. Its states take 4 more bytes per float32 element.

    >>> import jax, jax.numpy as jnp, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.differentiable(gc.reductions.mean("exact")), every=2)
    >>> def loss(x):
    ...     state = acc.update(x * x, acc.init(x))
    ...     return acc.value(acc.update(x, state)).sum()
    >>> jax.grad(loss)(jnp.float32([1, 2]))
    Array([1.5, 2.5], dtype=float32)
    """
    check(reduction=reduction)
    return reduction if reduction.derivative is None else Differentiable(reduction)


class Differentiable(Beside):
    """See `differentiable`."""

    state = DifferentiableState

    def __init__(self, of: Reduction) -> None:
        assert of.derivative is not None
        super().__init__(of, of.derivative)

    @property
    def derivative(self) -> Reduction | None:
        return self.of.derivative

    def init(self, like: Tree) -> DifferentiableState:
        return DifferentiableState(self.of.init(like), self.other.init(like))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> DifferentiableState:
        a, b = self.require(state)
        return DifferentiableState(self.of.update(a, value, weight), self.other.update(b, value, weight))

    def finalize(self, state: State) -> Tree:
        def run(reduction: Reduction, state: DifferentiableState) -> Tree:
            return reduction.finalize(state.value if reduction is self.of else state.derivative)

        return derived(self.of, run, self.require(state))


class Metrics(NamedTuple):
    """Statistics of the contributions of nonzero weight; scalars, all 0 if there are none.

    Attributes:
      norm_mean: the weighted mean of the global norms of the contributions.
      norm_variance: the weighted variance of the norms.
      norm_max: the largest norm.
      count: int32, the number of contributions.
      weight: the sum of the weights.
    """

    norm_mean: Array
    norm_variance: Array
    norm_max: Array
    count: Array
    weight: Array


class Measured(NamedTuple):
    """The result of a reduction, and metrics of the contributions."""

    value: Tree
    metrics: Metrics


class MeasuredState(NamedTuple):
    """The state of the wrapped reduction, and the state of the metrics."""

    value: State
    metrics: State


class _Entry(NamedTuple):
    """A contribution to the metrics: the norm for its moments and its maximum, and 1 for the count and the weight."""

    norm: Array
    largest: Array
    count: Array
    weight: Scalar


_METRICS = per_leaf(_Entry(moments(), maximum(), sum_(), Weighed(sum_())))


@operation("measured")
def measured(reduction: Reduction) -> Reduction:
    """Adds metrics of the contributions to the result of a reduction.

    For dashboards, for the noise scale, and for the effect of `clipped` and `zeroed`: ``measured(zeroed(r))`` measures
    all contributions, ``zeroed(measured(r))`` those that are not skipped. Norms are global norms of single
    contributions: of a tree of a list, or the tree of a replica. Contributions of weight 0 are not measured.

    Args:
      reduction: any reduction of dense float leaves.

    Returns:
      A reduction whose result is ``Measured(value, Metrics(norm_mean, norm_variance, norm_max, count, weight))``.

    Raises:
      GradCombineError: in ``init`` and ``update`` for leaves that are not floats.

    Bits: those of the reduction. Norms are rounded as in `clipped`, the other metrics as in `moments`, `max` and `sum`.

    >>> import numpy as np, gradcombine as gc
    >>> grads = [np.float32([3, 4]), np.float32([0, 1])]
    >>> value, metrics = gc.combine(gc.reductions.measured(gc.reductions.mean()), grads, weights=[1, 3])
    >>> value, [float(x) for x in metrics]
    (array([0.75, 1.75], dtype=float32), [2.0, 3.0, 5.0, 2.0, 4.0])
    """
    return MeasuredReduction(reduction)


class MeasuredReduction(Beside):
    """See `measured`."""

    call, state = "measured", MeasuredState

    def __init__(self, of: Reduction) -> None:
        super().__init__(of, _METRICS)
        self.name = f"measured({of.name})"

    def init(self, like: Tree) -> MeasuredState:
        state = self.of.init(like)
        gradients = self._like(like)
        dtype, present = norm_dtype(gradients), [leaf for _, leaf in tree.present(gradients)]
        backend = resolve(tree.flatten(gradients)[0])
        entry = (backend.full((), 0, x, present) for x in (dtype, dtype, dtypes.INT32, dtype))
        return MeasuredState(state, _METRICS.init(_Entry(*entry)))

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> MeasuredState:
        state = self.require(state)
        updated = self.of.update(state.value, value, weight)
        gradients = self.of.gradients(value)[0]
        backend = resolve([*tree.flatten(gradients)[0], weight])
        wide = state.metrics.parts[0].dtypes.dtype
        norm = backend.cast(global_norm(backend, gradients), wide)
        one = backend.full((), 1, dtypes.INT32), backend.full((), 1, wide)
        return MeasuredState(updated, _METRICS.update(state.metrics, _Entry(norm, norm, *one), weight))

    def finalize(self, state: State) -> Measured:
        state = self.require(state)
        entry = _METRICS.finalize(state.metrics)
        backend = resolve([entry.count])
        largest = backend.where(entry.count == 0, backend.full((), 0, backend.dtype(entry.largest)), entry.largest)
        metrics = Metrics(entry.norm.mean, entry.norm.variance, largest, entry.count, entry.weight)
        return Measured(self.of.finalize(state.value), metrics)

    def _like(self, like: Tree) -> Tree:
        """The gradients of the argument of ``init``, which need not be `Numbered` for a numbered reduction."""
        if self.of.microbatches is not None and not isinstance(like, Numbered):
            return without_numbers(self.of).gradients(like)[0]
        return self.of.gradients(like)[0]
