"""Adasum, a sum that does not count the common component of two gradients twice."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.exact.digits import grid_for
from gradcombine.reductions.plain import Plain
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.types import Array, DType
from gradcombine.wires.wire import Wire


class AdasumState(TreewiseState):
    """Adaptive sums."""


@operation("adasum")
def adasum(dtype: DType = None, *, output_dtype: DType = None, wire: Wire | None = None) -> Reduction:
    """The adaptive sum, which subtracts from each of two leaves half of its projection onto the other one ::

        adasum(a, b) = (1 - a.b / (2 |a|**2)) a + (1 - a.b / (2 |b|**2)) b

    Adds orthogonal gradients and averages parallel ones. Dot products and norms are those of a leaf, independently of
    the other leaves. The sum is commutative, but not associative: for more than two gradients the result depends on the
    order beyond rounding. Order ``"sequential"`` is left to right. Order ``"tree"`` is the canonical tree over the
    indices of the contributions, which for a power of two of them is the tree of the paper. Replicas are always
    combined in the canonical tree over the ranks, for any number of replicas.

    Args:
      dtype, output_dtype, wire: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float leaves, in which all nonzero weights count as 1. Without contributions the result is 0. If a
      leaf of one of the two gradients is 0 (or the sum of its absolute values is subnormal, or it was None in all
      contributions), the result is the other one. Otherwise a NaN or infinity in the leaf, or an overflow of the sum of
      its absolute values, makes all its elements NaN. Norms do not overflow or underflow in any other case, as leaves
      are first divided by a power of two.

    Bits: dot products are added in an order that the framework chooses, in the accumulator dtype; all else is rounded
    as in the formula, on every backend. So the bits agree over backends and modes if the dot products are exact, as for
    small integers, and for leaves of one element. Otherwise the error of one sum of leaves of n elements is at most
    ``((1 + e) (1 + u)**3 - 1) (|a_i| + |b_i| + (|a_i| |b| / |a| + |b_i| |a| / |b|) / 2)`` in element i, with
    u = 2**-24 in float32, ``e = (1 + g) (1 + u) / (1 - g) - 1`` and ``g = n u / (1 - n u)``.

    References: S. Maleki et al., `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_, 2020; N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2002,
    3.1.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.adasum(), [np.float32([2, 0]), np.float32([0, 2])])
    array([2., 2.], dtype=float32)
    >>> gc.combine(gc.reductions.adasum(), [np.float32([2, 0]), np.float32([4, 0])])
    array([3., 0.], dtype=float32)
    """
    settings = dtypes.Settings(dtype, output_dtype)
    if settings.running(dtypes.FLOAT32).itemsize > 8:
        raise invalid("a float accumulator of at most 64 bits", dtype)
    cell = Plain("adasum", ("float",), _zero, _adaptive, settings=settings)
    return Treewise(cell, AdasumState, wire=wire)


def _zero(dtype: np.dtype) -> int:
    if dtype.itemsize > 8:
        raise invalid("a float dtype of at most 64 bits", dtype)
    return 0


def _adaptive(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    # Empty accumulators are 0, and need no special case.
    running = backend.dtype(a)
    x, y = (backend.cast(leaf, dtypes.working(running)) for leaf in (a, b))
    x_unit, y_unit = _power_of_two(backend, x), _power_of_two(backend, y)
    zero = backend.full((), 0, backend.dtype(x))
    x_zero, y_zero = x_unit == zero, y_unit == zero
    one = backend.full((), 1, backend.dtype(x))
    x_scaled = backend.divide(x, backend.where(x_zero, one, x_unit))
    y_scaled = backend.divide(y, backend.where(y_zero, one, y_unit))
    dot = backend.total(backend.product(x_scaled, y_scaled))

    def without_projection(unscaled: Array, scaled: Array, of_zero: Array, other_unit: Array) -> Array:
        norm = backend.where(of_zero, one, backend.total(backend.product(scaled, scaled)))
        half = backend.full((), 0.5, backend.dtype(x))
        share = backend.scale(backend.divide(dot, norm), backend.scale(other_unit, half))
        return backend.add(unscaled, -backend.scale(scaled, share))

    total = backend.add(
        without_projection(x, x_scaled, x_zero, y_unit), without_projection(y, y_scaled, y_zero, x_unit)
    )
    return backend.where(x_zero, b, backend.where(y_zero, a, backend.cast(total, running)))


def _power_of_two(backend: Backend, x: Array) -> Array:
    """The largest power of two up to the sum of absolute values: 0 for a subnormal sum, infinity if it is not finite.

    Another order of the sum may give an adjacent power of two, which does not change the result.
    """
    zero = backend.full((), 0, backend.dtype(x))
    size = backend.total(backend.where(x < zero, -x, x))
    grid = grid_for(backend.dtype(x))
    exponent = backend.bitcast(size, grid.word) & backend.full((), grid.infinity, grid.word)
    return backend.bitcast(exponent, backend.dtype(x))
