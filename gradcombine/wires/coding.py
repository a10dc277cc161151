"""Encodes float32 in few bits and decodes it, with integer arithmetic on the bits: identical in every framework."""

from __future__ import annotations

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array
from gradcombine.wires.wire import Wire

FLOAT32, INT32, WORD = np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.uint32)
_BYTE = np.dtype(np.uint8)

_BIAS = 127
_INFINITY, _NAN = 0x7F800000, 0x7FC00000
_HIDDEN = 0x800000
"""The implicit leading bit of a float32 significand."""

_NO_SALT = np.int32(0)
_NOT_FINITE = 255
"""Scale of a block of integers with non-finite elements: 1 encodes infinity, -0 NaN, and 0 any finite element."""

_MULTIPLIERS = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
"""Odd multipliers of the hash in `_random`."""


def encode(backend: Backend, wire: Wire, x: Array, salt: Array = _NO_SALT) -> tuple[Array, ...]:
    """Encodes float32 elements.

    Args:
      wire: the encoding.
      x: float32 of shape (rows, columns), where columns is a multiple of the wire's block.
      salt: int32 scalar that stochastic rounding hashes with the seed.

    Returns:
      Codes: uint16 or uint8 of shape (rows, columns), or two 4-bit codes per byte. For a wire with scales, also these:
      uint8 of shape (rows, blocks).
    """
    rows, columns = backend.shape(x)
    size = wire.size or columns
    shape = (rows, columns // size, size)
    bits = backend.reshape(backend.bitcast(x, INT32), shape)
    sign, magnitude = backend.shift_right(bits, 31) & 1, bits & 0x7FFFFFFF
    is_finite = magnitude < _INFINITY
    finite = backend.where(is_finite, magnitude, 0)
    exponent = backend.shift_right(finite, 23)
    # Subnormal numbers, which frameworks may flush to zero anyway, become zeros.
    digits = backend.where(exponent > 0, finite & (_HIDDEN - 1) | _HIDDEN, 0)
    scale = _scale(backend, wire, finite) if wire.size else 0
    biased = exponent + (_bias(wire) - _BIAS) - scale
    effective = backend.maximum(biased, 1) if wire.exponent else 1
    random = _random(backend, wire, bits, salt) if wire.rounding == "stochastic" else None
    code = _rounded(backend, digits, effective - biased + (23 - wire.significand), random)
    if wire.exponent:
        code = code + backend.shift_left(effective - 1, wire.significand)
        infinity = ((1 << wire.exponent) - 1) << wire.significand
        code = backend.where(is_finite, code, backend.where(magnitude > _INFINITY, infinity + (code * 0 + 1), infinity))
    else:
        has_special = backend.largest(backend.cast(~is_finite, INT32)) > 0
        scale = backend.where(has_special, _NOT_FINITE - _BIAS, scale)
        code = backend.where(has_special, backend.cast(magnitude == _INFINITY, INT32), code)
        sign = backend.where(has_special & is_finite, 0, backend.where(magnitude > _INFINITY, 1, sign))
    code = code | backend.shift_left(sign, wire.bits - 1)
    if wire.bits == 4:  # pack the first half of a block into the low bits, the second into the high bits
        code = code[..., : size // 2] | backend.shift_left(code[..., size // 2 :], 4)
    codes = backend.reshape(backend.cast(code, np.dtype(np.uint16) if wire.bits == 16 else _BYTE), (rows, -1))
    return (codes, backend.cast(backend.asarray(scale + _BIAS)[..., 0], _BYTE)) if wire.size else (codes,)


def decode(backend: Backend, wire: Wire, codes: Array, scales: Array | None = None) -> Array:
    """Decodes the output of `encode` to float32 elements of shape (rows, columns)."""
    rows, width = backend.shape(codes)
    columns = width * 2 if wire.bits == 4 else width
    size = wire.size or columns
    code = backend.cast(codes, INT32)
    if wire.bits == 4:
        code = backend.reshape(code, (rows, columns // size, size // 2))
        code = backend.concat([code & 15, backend.shift_right(code, 4)], axis=2)
    code = backend.reshape(code, (rows, columns // size, size))
    sign = backend.shift_right(code, wire.bits - 1) & 1
    magnitude, significand = code & ((1 << (wire.bits - 1)) - 1), wire.significand
    scale = 0 if scales is None else backend.cast(scales, INT32)[..., None] - _BIAS
    exponent, digits = backend.shift_right(magnitude, significand), magnitude & ((1 << significand) - 1)
    if wire.exponent:
        shifted = backend.shift_left(digits, 23 - significand)
        value = backend.shift_left(exponent + (_BIAS - _bias(wire)) + scale, 23) | shifted
        if wire.size:
            value = backend.where(exponent > 0, value, _times_power(backend, digits, scale + _lowest(wire)))
        value = backend.where(exponent == (1 << wire.exponent) - 1, shifted | _INFINITY, value)
    else:
        special = backend.where(
            (magnitude == 0) & (sign == 1), _NAN, backend.where(magnitude == 1, _INFINITY, magnitude)
        )
        value = backend.where(scale == _NOT_FINITE - _BIAS, special, _times_power(backend, digits, scale))
    value = value | backend.shift_left(sign, 31)
    return backend.reshape(backend.bitcast(value, FLOAT32), (rows, columns))


def _bias(wire: Wire) -> int:
    """The exponent bias; for integers, the one that makes an element of scale 1 an integer."""
    return (1 << (wire.exponent - 1)) - 1 if wire.exponent else 1 - wire.significand


def _lowest(wire: Wire) -> int:
    """The exponent of the smallest positive number of scale 1."""
    return 1 - _bias(wire) - wire.significand


def _scale(backend: Backend, wire: Wire, finite: Array) -> Array:
    """The exponent of each block's scale, the power of two that its elements are divided by."""
    top = backend.largest(finite)
    # Floats stay one power of two below the largest exponent, so that rounding up cannot reach infinity.
    highest = _bias(wire) - 1 if wire.exponent else wire.significand - 1
    scale = backend.shift_right(top, 23) - (_BIAS + highest)
    if not wire.exponent:
        # The largest integer, aligned to the significand of float32: a larger one needs the next scale.
        limit = ((1 << wire.significand) - 1) << (24 - wire.significand)
        scale = scale + backend.cast((top & (_HIDDEN - 1) | _HIDDEN) > limit, INT32)
    # With smaller scales some decoded elements would be subnormal in float32.
    return backend.maximum(scale, 1 - _BIAS - _lowest(wire))


def _rounded(backend: Backend, digits: Array, shift: Array, random: Array | None) -> Array:
    """Rounds ``digits / 2**shift`` to an integer, for digits below 2**24 and shifts of at least 13.

    Stochastically with ``random`` bits, or to nearest even with None.
    """
    # The sums below must not overflow int32: shift by what exceeds 30 first, which changes the quotient by less than
    # 2**-30.
    excess = backend.maximum(shift - 30, 0)
    digits = backend.shift_right(digits, 24 - backend.maximum(24 - excess, 0))
    shift = shift - excess
    if random is not None:
        return backend.shift_right(digits + (random & (backend.shift_left(shift * 0 + 1, shift) - 1)), shift)
    odd = backend.shift_right(digits, shift) & 1
    return backend.shift_right(digits + backend.shift_left(shift * 0 + 1, shift - 1) - 1 + odd, shift)


def _times_power(backend: Backend, digits: Array, exponent: Array) -> Array:
    """The float32 bits of ``digits * 2**exponent``, which is exact."""
    power = backend.bitcast(backend.shift_left(exponent + _BIAS, 23), FLOAT32)
    return backend.bitcast(backend.product(backend.cast(digits, FLOAT32), power), INT32)


def _random(backend: Backend, wire: Wire, bits: Array, salt: Array) -> Array:
    """Pseudorandom int32: a hash of each element's bits and index, the seed and the salt."""
    indices = backend.reshape(backend.row_numbers(backend.reshape(bits, (-1, 1))), backend.shape(bits))
    words = backend.product(backend.cast(indices, WORD), _MULTIPLIERS[0]) ^ backend.bitcast(bits ^ wire.seed, WORD)
    words = words ^ backend.product(backend.cast(salt, WORD), _MULTIPLIERS[1])
    for multiplier in _MULTIPLIERS:
        words = backend.product(words ^ backend.shift_right(words, 16), multiplier)
    return backend.bitcast(words ^ backend.shift_right(words, 13), INT32)
