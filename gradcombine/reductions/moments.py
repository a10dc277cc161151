"""The weighted mean and variance in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.adding import finished, neutral
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Cell, Totals
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.reductions.weights import Weight, weighted
from gradcombine.types import Array, DType, Leaf


class MomentsState(TreewiseState):
    """Sums of ``w * g``, and weighted sums of squared deviations."""


class Moments(NamedTuple):
    """The weighted mean and variance of the contributions to a leaf."""

    mean: Array
    variance: Array


@operation("moments")
def moments(dtype: DType = None, *, output_dtype: DType = None) -> Reduction:
    """The weighted mean ``m = sum(w * g) / sum(w)`` and variance ``sum(w * (g - m)**2) / sum(w)``, elementwise.

    This is the population variance, with weights as frequencies (no Bessel correction). For n contributions of equal
    weight, ``n / (n - 1)`` times it is the unbiased sample variance; for weights that are numbers of examples, see
    `gradcombine.noise`.

    Does not compute ``E[g**2] - E[g]**2``, which loses all digits for large means. Two partial results a, b with sums
    T, weights W and sums of squared deviations M merge to ::

        M = M_a + M_b + (T_a / W_a - T_b / W_b)**2 * (W_a * W_b / (W_a + W_b))

    and a contribution is merged as a partial result of one element.

    Args:
      dtype: the dtype of the accumulators, two per leaf. None: that of the contributions, but at least float32.
      output_dtype: the dtype of mean and variance. None: that of the contributions. The variance of small float16
        gradients may underflow.

    Returns:
      A reduction of float leaves, whose result has a ``Moments(mean, variance)`` in place of each leaf. Without
      contributions both are 0; the variance of one contribution is 0; it is NaN if a contribution is not finite. A leaf
      that is None in a contribution counts as 0, as in a mean.

    Bits: the mean has the bits of `gradcombine.reductions.mean`. The variance is determined by the contributions and
    their order, in every mode in which division is correctly rounded. Replicas are always merged in the canonical tree
    over their ranks. To first order, the relative error of the variance of n contributions in any order is at most
    ``n u (8 + 2 sqrt(log2(n) * max(g**2) / variance))``, with u = 2**-24 in float32.

    References: D. H. D. West, `Updating mean and variance estimates: an improved method
    <https://doi.org/10.1145/359146.359153>`_, 1979; T. F. Chan, G. H. Golub and R. J. LeVeque, `Algorithms for
    computing the sample variance: analysis and recommendations <https://doi.org/10.1080/00031305.1983.10483115>`_,
    1983.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.moments(), [np.float32([1, 2]), np.float32([5, 2])], weights=[3, 1])
    Moments(mean=array([2., 2.], dtype=float32), variance=array([3., 0.], dtype=float32))
    """
    cell = _MomentsCell(dtypes.Settings(dtype, output_dtype))
    return Treewise(cell, MomentsState, scales_by_weight=True)


class Spread(NamedTuple):
    """The accumulator of a leaf.

    Attributes:
      total: the sum of ``w * g``.
      squares: the sum of ``w * (g - mean)**2``.
      weight: scalar, the sum of weights of the contributions with a gradient for this leaf.
      count: int32 scalar, the number of these contributions.
    """

    total: Array
    squares: Array
    weight: Array
    count: Array


@dataclass(frozen=True)
class _MomentsCell(Cell):
    settings: dtypes.Settings
    name: str = "moments"
    kinds: tuple[str, ...] = ("float",)

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Spread:
        return Spread(
            backend.full(shape, neutral(running), running, [like]),
            backend.full(shape, 0, running, [like]),
            backend.full((), 0, dtypes.working(running), [like]),
            backend.full((), 0, dtypes.INT32, [like]),
        )

    def update(self, backend: Backend, a: Spread, x: Array, weight: Weight, totals: Totals) -> Spread:
        running, working = backend.dtype(a.total), backend.dtype(a.weight)
        total = backend.cast(weighted(backend, x, weight, running), running)
        # t - t is 0 for finite t, and NaN for NaN and infinities.
        squares = backend.add(total, -total)
        # Added to a zero like x, so that shard_map types the weight as varying over the axes of the leaf.
        zero, count = backend.full((), 0, working, [x]), backend.full((), 1, dtypes.INT32, [x])
        return _merged(backend, a, Spread(total, squares, backend.add(zero, weight.cast(backend, working)), count))

    def merge(self, backend: Backend, a: Spread, b: Spread, a_totals: Totals, b_totals: Totals) -> Spread:
        return _merged(backend, a, b)

    def finish(self, backend: Backend, a: Spread, totals: Totals, output: np.dtype) -> Moments:
        # Merges the contributions without a gradient for this leaf, as zeros.
        weight = backend.add(backend.cast(totals.weight, backend.dtype(a.weight)), -a.weight)
        zeros = backend.full(backend.shape(a.total), 0, backend.dtype(a.total))
        absent = Spread(zeros, zeros, weight, totals.count - a.count)
        squares = _merged(backend, a, absent).squares
        return Moments(*(backend.cast(finished(backend, x, totals, True), output) for x in (a.total, squares)))


def _merged(backend: Backend, a: Spread, b: Spread) -> Spread:
    """Merges two partial results; the bits do not depend on their order."""
    running, working = backend.dtype(a.total), backend.dtype(a.weight)
    one = backend.full((), 1, working)

    def divisor(weight: Array, count: Array) -> Array:
        # Avoids dividing by a traced weight of 0; the result is masked later.
        return backend.where((count == 0) | (weight == backend.full((), 0, working)), one, weight)

    def center(part: Spread) -> Array:
        return backend.divide(backend.cast(part.total, working), divisor(part.weight, part.count))

    weight, count = backend.add(a.weight, b.weight), a.count + b.count
    difference = backend.add(center(a), -center(b))
    share = backend.divide(backend.product(a.weight, b.weight), divisor(weight, count))
    # `product` is only fused with an addition, which does not follow here; `scale` is never fused.
    between = backend.scale(backend.product(difference, difference), share)
    within = backend.add(backend.cast(a.squares, working), backend.cast(b.squares, working))
    squares = backend.cast(backend.add(within, between), running)
    # The share of an empty side is 0, but 0 times an overflowed difference is NaN.
    squares = backend.where(a.count == 0, b.squares, backend.where(b.count == 0, a.squares, squares))
    return Spread(backend.add(a.total, b.total), squares, weight, count)
