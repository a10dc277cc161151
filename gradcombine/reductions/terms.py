"""Weighted contributions as floats whose exact sum they are, for exact sums.

A weight of an integer type multiplies exactly: value and weight are split into parts whose products the float format
holds (float32: 12 bits each). Another weight multiplies with one rounding. Subnormal parts and products are 0 in every
framework.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.grid import FLOAT32, Grid
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


def weight_parts(backend: Backend, grid: Grid, weight: Weight) -> list[Array]:
    """Float scalars of half the precision whose exact sum is a whole weight; another weight as it is."""
    if not weight.whole:
        return [weight.cast(backend, grid.value)]
    part = grid.precision // 2
    low = (1 << part) - 1
    if weight.known is not None:
        whole = int(weight.known)
        pieces = (whole & (low << shift) for shift in range(0, whole.bit_length(), part))
        return [backend.full((), piece, grid.value) for piece in pieces if piece] or [backend.full((), 0, grid.value)]
    wide = backend.dtype(weight.array).itemsize == 8
    whole = weight.cast(backend, INT64 if wide else INT32)

    def piece(shift: int) -> Array:
        return backend.cast(backend.shift_right(whole, shift) & low, grid.value)

    def scale(shift: int) -> Array:
        return backend.full((), 2**shift, grid.value)

    shifts = range(0, 64 if wide else 32, part)
    return [piece(0), *(backend.product(piece(shift), scale(shift)) for shift in shifts[1:])]


def deposits(backend: Backend, weight: Weight) -> int:
    """How many terms a contribution of this weight has on the grid of float32; on a finer one it has no more."""
    return 1 if weight.is_one or not weight.whole else 2 * len(weight_parts(backend, FLOAT32, weight))


def weighted(
    backend: Backend, grid: Grid, x: Array, parts: Sequence[Array], whole: bool, one: Array | None
) -> list[Array]:
    """Floats whose exact sum is the weighted x; for a weight of a floating type, its rounded value.

    Args:
      backend: of the arrays.
      grid: of the digits.
      x: the contribution, in the grid's float.
      parts: of the weight, by `weight_parts`; none for a weight that is known to be 1.
      whole: whether the type of the weight is an integer one.
      one: where the weight is traced, whether it is 1: then nothing is multiplied, and subnormal numbers stay.
    """
    if not parts:
        return [x]
    products = _products(backend, grid, x, parts) if whole else [_rounded(backend, grid, x, parts[0])]
    if one is None:
        return products
    zero = backend.full((), 0, grid.value)
    kept = [x, *[zero] * (len(products) - 1)]
    return [backend.where(one, a, b) for a, b in zip(kept, products, strict=True)]


def _rounded(backend: Backend, grid: Grid, x: Array, weight: Array) -> Array:
    scaled = backend.scale(_flushed(backend, grid, x, grid.hidden - 1), weight)
    return _flushed(backend, grid, scaled, grid.hidden)


def _products(backend: Backend, grid: Grid, x: Array, parts: Sequence[Array]) -> list[Array]:
    bits = backend.bitcast(x, grid.word)
    high = backend.bitcast(bits & -(1 << (grid.precision + 1) // 2), grid.value)
    # The difference of an infinity and itself is NaN; its high part alone stands for it.
    infinite = (bits & grid.infinity) == grid.infinity
    low = backend.where(infinite, backend.full((), 0, grid.value), backend.add(x, -high))
    halves = [_flushed(backend, grid, half, grid.hidden - 1) for half in (high, low)]
    products = (backend.product(half, part) for part in parts for half in halves)
    return [_flushed(backend, grid, product, grid.hidden) for product in products]


def _flushed(backend: Backend, grid: Grid, x: Array, most: int) -> Array:
    """0 where the magnitude's bits are ``most`` or less: what XLA and TensorFlow do to subnormal operands and results.

    A result counts up to the smallest normal number, since hardware looks for underflow after rounding.
    """
    tiny = (backend.bitcast(x, grid.word) & grid.most) <= most
    return backend.where(tiny, backend.full((), 0, grid.value), x)
