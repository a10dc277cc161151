"""Adasum: a sum that does not count twice what two gradients have in common."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import invalid, operation
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.plain import Plain
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.types import Array, DType
from gradcombine.wires.wire import Wire

_EXPONENT = {4: (np.dtype(np.int32), 0x7F800000), 8: (np.dtype(np.int64), 0x7FF0000000000000)}
"""By the size of a float: the integer that holds its bits, and where its exponent stands there."""


class AdasumState(TreewiseState):
    """Adaptive sums."""


@operation("adasum")
def adasum(dtype: DType = None, *, output_dtype: DType = None, wire: Wire | None = None) -> Reduction:
    """The adaptive sum: of two gradients, each leaf without half of its projection on the other's ::

        adasum(a, b) = (1 - a.b / (2 |a|**2)) a + (1 - a.b / (2 |b|**2)) b

    Orthogonal gradients are added, parallel ones averaged. Dot products and norms are those of a whole leaf; leaves do
    not see each other. The rule is commutative, but not associative: what it gives for more than two depends on the
    order in more than rounding. Order ``"sequential"`` is a left chain. Order ``"tree"`` is the canonical tree over the
    contributions' numbers, for a power of two of them the tree of the paper. Over replicas it is always the canonical
    tree over the ranks, so any number of them will do.

    Args:
      dtype, output_dtype, wire: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float leaves. A weight only says whether the contribution is present. No contribution: zeros. Where
      one of the two is a leaf of zeros (or the sum of its absolute values is below the smallest normal number, or it is
      None in all contributions so far), the result is the other. Otherwise a NaN or an infinity anywhere in the leaf,
      or a sum of absolute values that overflows, makes all of the leaf NaN. Norms neither overflow nor underflow beside
      that: each leaf is divided by a power of two first.

    Bits: dot products are added in the order that the framework chooses, in the accumulator's dtype; all else is
    rounded as written, the same on every backend. So the bits agree over backends and modes where the dot products are
    exact, as of small integers, and for leaves of one element. Otherwise one step on leaves of n elements is off by at
    most ``((1 + e) (1 + u)**3 - 1) (|a_i| + |b_i| + (|a_i| |b| / |a| + |b_i| |a| / |b|) / 2)`` in element i, with
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
        raise invalid("an accumulator that is a float of at most 64 bits", dtype)
    cell = Plain("adasum", ("float",), _zero, _adaptive, settings=settings)
    return Treewise(cell, AdasumState, wire=wire)


def _zero(dtype: np.dtype) -> int:
    if dtype.itemsize > 8:
        raise invalid("a dtype that is float of at most 64 bits", dtype)
    return 0


def _adaptive(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    """An empty accumulator needs no case of its own: it holds zeros."""
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

    kept = backend.add(without_projection(x, x_scaled, x_zero, y_unit), without_projection(y, y_scaled, y_zero, x_unit))
    return backend.where(x_zero, b, backend.where(y_zero, a, backend.cast(kept, running)))


def _power_of_two(backend: Backend, x: Array) -> Array:
    """The power of two next below the sum of absolute values: 0 for a subnormal sum, infinite if it is not finite.

    Another order of the sum may give the next power; what is divided by it and multiplied again stays the same.
    """
    zero = backend.full((), 0, backend.dtype(x))
    size = backend.total(backend.where(x < zero, -x, x))
    integer, exponent = _EXPONENT[backend.dtype(x).itemsize]
    bits = backend.bitcast(size, integer) & backend.full((), exponent, integer)
    return backend.bitcast(bits, backend.dtype(x))
