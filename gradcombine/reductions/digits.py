"""Sums of float32 values in fixed-point digits, whose bits depend on the multiset of the values alone.

**The grid.** Bin ``i`` covers 16 binary positions of the float32 range. The window of an element is the bin of the
largest value that it has seen, and the two below: of every value the sum keeps its digits in the window, truncated
toward zero. What falls below the window falls there in any order, since the window never moves down.

**The slots.** Three int32 words hold the three bins of the window: slot ``s`` holds the one with ``i % 3 == s``. Its
bin is a monotone function of the window's, so each slot follows it by a maximum of its own, and no slot needs another:
the update of a slot is one loop over memory, in place. The low 3 bits of a word tell the bin (``i // 3``, the *tag*),
the others are the signed sum of 16-bit digits. 2**28 / 2**16 = 4096 deposits fit.

**Values that are not finite** have the largest exponent, the only one that brings slot 0 to tag 6: there it counts
+inf, -inf and NaN in place of digits.

The sum of n values is off by at most ``n * 2**-32 * max |x|`` before the one rounding at the end: the window reaches 32
positions or more below the leading bit of the largest value.

References: J. Demmel and H. D. Nguyen, `Fast reproducible floating-point summation
<https://doi.org/10.1109/ARITH.2013.9>`_, 2013; P. Ahrens, J. Demmel and H. D. Nguyen, `Algorithms for efficient
reproducible floating point summation <https://doi.org/10.1145/3389360>`_, 2020, where the bins of a fixed grid come
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array

FLOAT32, INT32 = np.dtype(np.float32), np.dtype(np.int32)

CAPACITY = 4096
"""The deposits that a slot can hold: 2**12 digits below 2**16 fit into the 28 bits and a sign above the tag."""

_TAG_BITS, _DIGIT = 3, 0xFFFF
_TAG, _SPECIAL = 7, 6
_INFINITY = 0x7F800000
_NEGATIVE = 1 << 14
"""Where slot 0 counts -inf, above the count of +inf; a NaN counts as one of each."""


_WRAPPING = np.errstate(all="ignore")
"""Words wrap around, as meant: NumPy would warn of it where an element is a scalar."""


class Digits(NamedTuple):
    """The three slots of every element, int32. All 0: no value, or only zeros."""

    slot0: Array
    slot1: Array
    slot2: Array


class _Decoded(NamedTuple):
    """A float32 value: ``significand * 2**(exponent - 149)``, and its sign as 0 or -1."""

    bits: Array
    magnitude: Array
    exponent: Array
    significand: Array
    sign: Array


@_WRAPPING
def deposit(backend: Backend, digits: Digits, values: Sequence[Array]) -> Digits:
    """Adds float32 values, all in one pass over the digits."""
    decoded = [_decode(backend, x) for x in values]
    return Digits(*(_deposit(backend, word, decoded, s) for s, word in enumerate(digits)))


@_WRAPPING
def merge(backend: Backend, a: Digits, b: Digits) -> Digits:
    """Adds two sums: in each slot the higher bin stays, and two equal ones are added."""

    def slot(x: Array, y: Array) -> Array:
        left, right = x & _TAG, y & _TAG
        return backend.where(left < right, y, backend.where(right < left, x, x + y - right))

    return Digits(*(slot(x, y) for x, y in zip(a, b, strict=True)))


def _decode(backend: Backend, x: Array) -> _Decoded:
    bits = backend.bitcast(x, INT32)
    magnitude = bits & 0x7FFFFFFF
    # Subnormal numbers share the exponent of the smallest normal ones, and have no hidden bit.
    field = backend.maximum((magnitude & _INFINITY) - 0x00800000, backend.full((), 0, INT32))
    exponent = backend.shift_right(field, 23)
    return _Decoded(bits, magnitude, exponent, magnitude - field, backend.shift_right(bits, 31))


def _deposit(backend: Backend, word: Array, values: Sequence[_Decoded], s: int) -> Array:
    largest = values[0].exponent
    for value in values[1:]:
        largest = backend.maximum(largest, value.exponent)
    # (exponent + 34 - 16 s) // 48 without a division: exact for every exponent.
    tag = backend.shift_right(largest * 1366 + (34 - 16 * s) * 1366, 16)
    kept = word & _TAG
    position = backend.maximum(kept, tag) * 48 + (16 * s - 11 - _TAG_BITS)
    total = backend.where(kept < tag, tag, word)
    for value in values:
        digit = _digit(backend, value, position)
        total = total + (_counted(backend, value, digit) if s == 0 else digit)
    return total


def _digit(backend: Backend, value: _Decoded, position: Array) -> Array:
    """The value's signed digit in the bin at a position, above the tag; 0 where the bin is above the value."""
    zero, most = backend.full((), 0, INT32), backend.full((), 31, INT32)
    down = position - value.exponent
    up = backend.maximum(-down, zero)
    down = -backend.maximum(-backend.maximum(down, zero), -most)
    digit = backend.shift_right(backend.shift_left(value.significand, up), down) & (_DIGIT << _TAG_BITS)
    return (digit ^ value.sign) - value.sign


def _counted(backend: Backend, value: _Decoded, digit: Array) -> Array:
    """In slot 0: a value that is not finite counts in place of its digit."""
    one, many, both = (backend.full((), n << _TAG_BITS, INT32) for n in (1, _NEGATIVE, 1 + _NEGATIVE))
    infinite = backend.where(value.bits < 0, many, one)
    special = backend.where(value.magnitude > _INFINITY, both, infinite)
    return backend.where(value.magnitude >= _INFINITY, special, digit)


class Wide(NamedTuple):
    """A finite magnitude: ``(high * 2**32 + low) * 2**(exponent - 180)``, with the leading bit of ``high`` set.

    ``high`` and ``low`` are the bits of unsigned words. Any bit of ``low`` stands for all that is below as well.
    """

    high: Array
    low: Array
    exponent: Array
    negative: Array
    zero: Array


@_WRAPPING
def carry(backend: Backend, digits: Digits) -> Wide:
    """The finite sum in one number: slots put in order, carries propagated, normalised."""
    tags = [word & _TAG for word in digits]
    sums = [backend.shift_right(word, _TAG_BITS) for word in digits]
    slot2_is_top, slot1_is_top = tags[2] == tags[0], tags[1] == tags[0]

    def pick(two: Any, one: Any, none: Any) -> Array:
        return backend.where(slot2_is_top, two, backend.where(slot1_is_top, one, none))

    top, middle, lowest = (pick(sums[2 - i], sums[(1 - i) % 3], sums[-i % 3]) for i in range(3))
    two, one, none = (backend.full((), i, INT32) for i in (2, 1, 0))
    window = tags[0] * 3 + pick(two, one, none)

    middle = middle + backend.shift_right(lowest, 16)
    top = top + backend.shift_right(middle, 16)
    low = backend.shift_left(middle & _DIGIT, 16) | (lowest & _DIGIT)
    negative = top < 0
    borrow = backend.where(low == 0, one, none)
    high = backend.where(negative, borrow - top - 1, top)
    low = backend.where(negative, -low, low)
    zero = (high | low) == 0

    shifted = backend.where(high == 0, backend.full((), 32, INT32), none)
    high, low = backend.where(high == 0, low, high), backend.where(high == 0, none, low)
    for step in (16, 8, 4, 2, 1):
        empty = _logical_right(backend, high, 32 - step) == 0
        moved = backend.shift_left(high, step) | _logical_right(backend, low, 32 - step)
        high, low = backend.where(empty, moved, high), backend.where(empty, backend.shift_left(low, step), low)
        shifted = backend.where(empty, shifted + step, shifted)
    return Wide(high, low, window * 16 - 3 - shifted, negative, zero)


@_WRAPPING
def divide(backend: Backend, wide: Wide, divisor: Array) -> Wide:
    """``wide / divisor`` for a positive, normal float32 scalar, by long division; what remains goes into ``low``."""
    bits = backend.bitcast(divisor, INT32)
    significand = (bits & 0x007FFFFF) | 0x00800000
    exponent = backend.shift_right(bits, 23) - 127
    one, none = backend.full((), 1, INT32), backend.full((), 0, INT32)

    remainder = _logical_right(backend, wide.high, 8)
    fits = remainder >= significand
    remainder = backend.where(fits, remainder - significand, remainder)
    quotient = backend.where(fits, one, none)
    for i in range(26):
        source, at = (wide.high, 7 - i) if i < 8 else (wide.low, 39 - i)
        remainder = backend.shift_left(remainder, 1) | (backend.shift_right(source, at) & 1)
        fits = remainder >= significand
        remainder = backend.where(fits, remainder - significand, remainder)
        quotient = backend.shift_left(quotient, 1) | backend.where(fits, one, none)
    rest = remainder | (wide.low & 0x3FFF)
    long = quotient >= 1 << 26
    high = backend.where(long, backend.shift_left(quotient, 5), backend.shift_left(quotient, 6))
    low = backend.where(rest == 0, none, one)
    shorter = backend.where(long, none, one)
    return Wide(high, low, wide.exponent - exponent - shorter, wide.negative, wide.zero)


@_WRAPPING
def to_float32(backend: Backend, wide: Wide, to_odd: bool) -> Array:
    """The nearest float32, ties to even; overflow is infinite, and a zero sum +0.

    Args:
      to_odd: rounds toward zero instead, and sets the lowest bit of an inexact result: rounded once more to a float of
        at most 22 bits, that is the correctly rounded one.
    """
    one, none = backend.full((), 1, INT32), backend.full((), 0, INT32)
    # A result below the normal range keeps fewer bits: what it loses joins those below.
    lost = -backend.maximum(-backend.maximum(-wide.exponent, none), backend.full((), -31, INT32))
    fallen = wide.high & ~backend.shift_left(backend.full((), -1, INT32), lost)
    high = backend.shift_right(_logical_right(backend, wide.high, 1), backend.maximum(lost - 1, none))
    high = backend.where(lost == 0, wide.high, high)
    below = (wide.low | fallen) != 0

    kept, rest = _logical_right(backend, high, 8), high & 0xFF
    inexact = (rest != 0) | below
    if to_odd:
        rounded = kept | backend.where(inexact, one, none)
        over = backend.full((), 0x7F7FFFFF, INT32)
    else:
        tie = backend.where(below, one, kept & 1)
        up = backend.where(rest > 128, one, backend.where(rest == 128, tie, none))
        rounded, over = kept + up, backend.full((), _INFINITY, INT32)
    field = backend.maximum(wide.exponent, none)
    bits = backend.shift_left(-backend.maximum(-field, backend.full((), -253, INT32)), 23) + rounded
    bits = backend.where(wide.exponent > 253, over, bits)
    bits = backend.where(wide.negative, bits | -0x80000000, bits)
    return backend.bitcast(backend.where(wide.zero, none, bits), FLOAT32)


def special(backend: Backend, digits: Digits, finite: Array) -> Array:
    """``finite``, or where a value was not: the infinity of one sign, NaN where there were both or a NaN."""
    counts = backend.shift_right(digits.slot0, _TAG_BITS)
    positive, negative = counts & (_NEGATIVE - 1), backend.shift_right(counts, 14)
    infinity, minus, nan = (backend.full((), value, FLOAT32) for value in (np.inf, -np.inf, np.nan))
    sign = backend.where(negative == 0, infinity, nan)
    result = backend.where(positive == 0, minus, sign)
    return backend.where((digits.slot0 & _TAG) == _SPECIAL, result, finite)


def _logical_right(backend: Backend, a: Array, amount: int) -> Array:
    return backend.shift_right(a, amount) & ((1 << (32 - amount)) - 1)
