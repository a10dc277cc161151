"""Correctly rounded division of float32 from an approximate one, as that of XLA on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array

_INT, _FLOAT = np.dtype(np.int32), np.dtype(np.float32)
_SIGN, _INFINITY, _IMPLICIT = np.iinfo(np.int32).min, 0xFF << 23, 1 << 23


def rounded_quotient(
    backend: Backend, array: Array, divisor: Array, divide: Callable[[Array, Array], Array] = lambda x, y: x / y
) -> Array:
    """``array / divisor``, correctly rounded although the machine's quotients may be off by 50 units in the last place.

    ``divide`` is applied to the 24-bit significands. The remainder, which integers modulo 2**32 represent exactly,
    shows how far the quotient is off. If an operand is zero, infinite or NaN, the result is that of ``divide``.

    Args:
      array: float32.
      divisor: float32, of the same shape or a scalar.
      divide: the machine's division.
    """
    bits, divisor_bits = backend.bitcast(array, _INT), backend.bitcast(divisor, _INT)
    exponent, x = _split(backend, bits & ~_SIGN)
    divisor_exponent, y = _split(backend, divisor_bits & ~_SIGN)
    # Invariant: rest == x * 2**digits - quotient * y. At the end, 0 <= rest < y, and the quotient has 24 bits.
    smaller = backend.cast(x < y, _INT)
    digits = smaller + 23
    power = backend.bitcast(backend.shift_left(digits + 127, 23), _FLOAT)
    of_floats = divide(backend.cast(x, _FLOAT), backend.cast(y, _FLOAT))
    quotient = backend.cast(of_floats * power, _INT)
    rest = backend.shift_left(x, digits) - quotient * y
    error = backend.cast(divide(backend.cast(rest, _FLOAT), backend.cast(y, _FLOAT)), _INT)
    quotient, rest = quotient + error, rest - error * y
    under = backend.cast(rest < 0, _INT)
    quotient, rest = quotient - under, rest + under * y
    over = backend.cast(rest >= y, _INT)
    quotient, rest = quotient + over, rest - over * y
    # Two more bits: whether the rest is at least half a unit, and whether more bits would follow.
    half, inexact = rest + rest >= y, (rest != 0) & (rest + rest != y)
    quotient = quotient * 4 + backend.cast(half, _INT) * 2 + backend.cast(inexact, _INT)
    exponent = exponent - divisor_exponent + 127 - smaller
    # The result is subnormal if the exponent is not positive, and then has fewer bits.
    fewer = backend.where(exponent > 0, 0, backend.where(exponent < -25, 26, 1 - exponent))
    kept = backend.shift_right(quotient, fewer)
    kept = kept | backend.cast(backend.shift_left(kept, fewer) != quotient, _INT)
    up = backend.cast((kept & 3) + (backend.shift_right(kept, 2) & 1) > 2, _INT)
    result = backend.shift_right(kept, 2) + up
    result = result + backend.shift_left(backend.where(exponent > 1, exponent - 1, 0), 23)
    result = backend.where(exponent > 254, _INFINITY, result) | ((bits ^ divisor_bits) & _SIGN)
    ordinary = _ordinary(bits) & _ordinary(divisor_bits)
    quotient = backend.where(ordinary, backend.bitcast(result, _FLOAT), divide(array, divisor))
    return backend.where(divisor == 1, array, quotient)  # a compiler drops all of it for a divisor that it knows is 1


def _split(backend: Backend, magnitude: Array) -> tuple[Array, Array]:
    """Exponent field and 24-bit significand of the bits of a positive number; of a subnormal one, a field of 0 or less.

    The bits of a subnormal number are an integer multiple of 2**-149, and conversion to float normalizes the integer.
    """
    normalized = backend.bitcast(backend.cast(magnitude, _FLOAT), _INT) - (149 << 23)
    bits = backend.where(magnitude < _IMPLICIT, normalized, magnitude)
    return backend.shift_right(bits, 23), bits & (_IMPLICIT - 1) | _IMPLICIT


def _ordinary(bits: Array) -> Array:
    """Whether the bits are those of a finite number that is not zero."""
    return (bits & _INFINITY != _INFINITY) & (bits & ~_SIGN != 0)
