"""Fused multiply-add, emulated by operations that round alike on every backend."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.adding import two_sum
from gradcombine.types import Array

_SPLITTER = np.float32(2**12 + 1)


def multiply_add(backend: Backend, x: Array, factor: np.float32, y: Array) -> Array:
    """``x * factor + y``, rounded once.

    Splits each factor into the halves of its significand (Veltkamp), the product exactly into two floats (Dekker,
    1971), and its sum with y into three. The third one only matters if the sum of the first two is a tie.
    """
    product = times(backend, x, factor)
    scaled = times(backend, x, _SPLITTER)
    x_high = subtract(backend, scaled, subtract(backend, scaled, x))
    x_low = subtract(backend, x, x_high)
    factor_high = np.float32(factor * _SPLITTER - (factor * _SPLITTER - factor))
    error = subtract(backend, times(backend, x_high, factor_high), product)
    for part, scalar in ((x_high, factor - factor_high), (x_low, factor_high), (x_low, factor - factor_high)):
        error = backend.add(error, times(backend, part, scalar))
    partial_sum, low = two_sum(backend, y, error)
    high, middle = two_sum(backend, product, partial_sum)
    middle, low = two_sum(backend, low, middle)
    rounded = backend.add(high, middle)
    remainder = backend.add(subtract(backend, high, rounded), middle)
    twice = backend.add(remainder, remainder)
    neighbour = backend.add(rounded, twice)
    tie = (remainder != 0) & (subtract(backend, neighbour, rounded) == twice)
    beyond_tie = tie & (low != 0) & ((low > 0) == (remainder > 0))
    rounded = backend.where(beyond_tie, neighbour, rounded)
    # Splitting an infinity gives NaN.
    return backend.where(rounded == rounded, rounded, backend.add(product, y))


def times(backend: Backend, x: Array, factor: np.float32) -> Array:
    return backend.scale(x, backend.asarray(factor))


def subtract(backend: Backend, a: Array, b: Array) -> Array:
    return backend.add(a, -b)
