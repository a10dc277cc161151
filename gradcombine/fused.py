"""Multiplies and adds with one rounding, by operations that every backend rounds alike."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.adding import two_sum
from gradcombine.types import Array

_SPLITTER = np.float32(2**12 + 1)


def multiply_add(backend: Backend, x: Array, factor: np.float32, y: Array) -> Array:
    """``x * factor + y``, rounded once.

    The product is split into two floats without error (Dekker, 1971), and its sum with y into three, of which the last
    decides only where the first two are a tie.
    """
    product = times(backend, x, factor)
    x_high = _high(backend, x)
    x_low = subtract(backend, x, x_high)
    factor_high = np.float32(factor * _SPLITTER - (factor * _SPLITTER - factor))
    error = subtract(backend, times(backend, x_high, factor_high), product)
    for part, scalar in ((x_high, factor - factor_high), (x_low, factor_high), (x_low, factor - factor_high)):
        error = backend.add(error, times(backend, part, scalar))
    partial_sum, low = two_sum(backend, y, error)
    high, middle = two_sum(backend, product, partial_sum)
    middle, low = two_sum(backend, low, middle)
    rounded = backend.add(high, middle)
    left = backend.add(subtract(backend, high, rounded), middle)
    neighbour = backend.add(rounded, backend.add(left, left))
    tie = (left != 0) & (subtract(backend, neighbour, rounded) == backend.add(left, left))
    beyond = tie & (low != 0) & ((low > 0) == (left > 0))
    rounded = backend.where(beyond, neighbour, rounded)
    # Infinities split into NaN.
    return backend.where(rounded == rounded, rounded, backend.add(product, y))


def _high(backend: Backend, x: Array) -> Array:
    """The upper half of a float's digits (Veltkamp)."""
    wide = times(backend, x, _SPLITTER)
    return subtract(backend, wide, subtract(backend, wide, x))


def times(backend: Backend, x: Array, factor: np.float32) -> Array:
    return backend.scale(x, backend.asarray(factor))


def subtract(backend: Backend, a: Array, b: Array) -> Array:
    return backend.add(a, -b)
