"""Weighted mean and variance in one pass."""

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
    """Sums of ``w * g``, and of their weighted squared deviations."""


class Moments(NamedTuple):
    """The weighted mean of a leaf's contributions, and their weighted variance around it."""

    mean: Array
    variance: Array


@operation("moments")
def moments(dtype: DType = None, *, output_dtype: DType = None) -> Reduction:
    """The weighted mean ``m = sum(w * g) / sum(w)`` and variance ``sum(w * (g - m)**2) / sum(w)``, elementwise.

    The variance is that of the contributions at hand, each as frequent as its weight says: no degree of freedom is
    taken off. Of n contributions of equal weight, ``n / (n - 1)`` times it estimates the variance of whatever they were
    drawn from; `gradcombine.noise` says what to do where the weights are numbers of examples.

    Deviations are never formed as ``E[g**2] - E[g]**2``, which loses all digits where the mean is large. Two partial
    results a, b with sums T, weights W and squared deviations M become ::

        M = M_a + M_b + (T_a / W_a - T_b / W_b)**2 * (W_a * W_b / (W_a + W_b))

    and a contribution enters as a partial result of its own.

    Args:
      dtype: of the accumulators, two of the leaf's shape. None: the contributions' own, float32 for narrower floats.
      output_dtype: of mean and variance. None: the contributions' own. The variance of small float16 gradients is
        likely to underflow there.

    Returns:
      A reduction of float leaves. The result has a ``Moments(mean, variance)`` in the place of each leaf. No
      contribution: zeros. One contribution: variance 0. NaN in the variance where a contribution is not finite. A leaf
      that is None in some contributions was 0 there, as in a mean.

    Bits: the mean has those of `gradcombine.reductions.mean`; the variance has the same ones for the same contributions
    in the same order, in every mode in which division is correctly rounded. Replicas are always merged in the canonical
    tree over their ranks. The variance of n contributions, in any order, is to first order off by at most a relative
    ``n u (8 + 2 sqrt(log2(n) * max(g**2) / variance))``, with u = 2**-24 in float32.

    References: D. H. D. West, `Updating mean and variance estimates: an improved method
    <https://doi.org/10.1145/359146.359153>`_, 1979; T. F. Chan, G. H. Golub and R. J. LeVeque, `Algorithms for
    computing the sample variance: analysis and recommendations <https://doi.org/10.1080/00031305.1983.10483115>`_,
    1983.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.moments(), [np.float32([1, 2]), np.float32([5, 2])], weights=[3, 1])
    Moments(mean=array([2., 2.], dtype=float32), variance=array([3., 0.], dtype=float32))
    """
    cell = _Spreading(dtypes.Settings(dtype, output_dtype))
    return Treewise(cell, MomentsState, scales_by_weight=True)


class Spread(NamedTuple):
    """An accumulator: what a leaf has had.

    Attributes:
      total: the sum of ``w * g``.
      squares: the sum of ``w * (g - mean)**2``.
      weight: scalar, the sum of weights of the contributions that had a gradient for this leaf.
      count: int32 scalar, their number.
    """

    total: Array
    squares: Array
    weight: Array
    count: Array


@dataclass(frozen=True)
class _Spreading(Cell):
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
        # t - t is 0 for every finite t, and NaN for NaN and the infinities.
        squares = backend.add(total, -total)
        # Weight and count belong to the leaf: they vary over the replicas as it does.
        none, count = backend.full((), 0, working, [x]), backend.full((), 1, dtypes.INT32, [x])
        return _joined(backend, a, Spread(total, squares, backend.add(none, weight.cast(backend, working)), count))

    def merge(self, backend: Backend, a: Spread, b: Spread, a_totals: Totals, b_totals: Totals) -> Spread:
        return _joined(backend, a, b)

    def finish(self, backend: Backend, a: Spread, totals: Totals, output: np.dtype) -> Moments:
        weight = backend.add(backend.cast(totals.weight, backend.dtype(a.weight)), -a.weight)
        zeros = backend.full(backend.shape(a.total), 0, backend.dtype(a.total))
        without = Spread(zeros, zeros, weight, totals.count - a.count)
        squares = _joined(backend, a, without).squares
        return Moments(*(backend.cast(finished(backend, x, totals, True), output) for x in (a.total, squares)))


def _joined(backend: Backend, a: Spread, b: Spread) -> Spread:
    """Two partial results become one, in the same bits for either order of the two."""
    running, working = backend.dtype(a.total), backend.dtype(a.weight)
    one = backend.full((), 1, working)

    def divisor(weight: Array, count: Array) -> Array:
        # A weight that turns out to be 0 is masked later: until then nothing is divided by it.
        return backend.where((count == 0) | (weight == backend.full((), 0, working)), one, weight)

    def center(part: Spread) -> Array:
        return backend.divide(backend.cast(part.total, working), divisor(part.weight, part.count))

    weight, count = backend.add(a.weight, b.weight), a.count + b.count
    apart = backend.add(center(a), -center(b))
    share = backend.divide(backend.product(a.weight, b.weight), divisor(weight, count))
    # A product with nothing but another product after it has its own rounding; `scale` gives the last one its own.
    between = backend.scale(backend.product(apart, apart), share)
    within = backend.add(backend.cast(a.squares, working), backend.cast(b.squares, working))
    squares = backend.cast(backend.add(within, between), running)
    # An empty side is masked: its share is 0, but 0 times what has overflowed is NaN.
    squares = backend.where(a.count == 0, b.squares, backend.where(b.count == 0, a.squares, squares))
    return Spread(backend.add(a.total, b.total), squares, weight, count)
