"""Rounds a sum in integer words to the nearest float, independently of how a device rounds or divides floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.exact import digits
from gradcombine.reductions.exact.digits import FLOAT32, FLOAT64, Grid
from gradcombine.types import Array


class Divisor(NamedTuple):
    """A positive number ``significand * 2**(exponent - precision + 1)``, as integer scalars.

    The leading bit of the significand is set. The significand 0 stands for an invalid divisor.
    """

    significand: Array
    exponent: Array


class Wide(NamedTuple):
    """A finite number in two words, normalized so that the leading bit of ``high`` is set.

    ``high`` and ``low`` are the bits of unsigned words; the lowest bit of ``low`` is sticky: it is set if any bit below
    it was. ``exponent + 1`` is the exponent field of the number as a normal float.
    """

    high: Array
    low: Array
    exponent: Array
    negative: Array
    zero: Array


def carry(backend: Backend, grid: Grid, a: digits.Digits) -> Wide:
    """Propagates the carries between the slots, and normalizes the sum."""
    tags = [word & grid.tag for word in a.slots]
    sums = [backend.shift_right(word, grid.tag_bits) for word in a.slots]
    spilled = digits.spilled(backend, grid, a)
    slot2_is_top, slot1_is_top = tags[2] == tags[0], tags[1] == tags[0]

    def pick(two: Array, one: Array, none: Array) -> Array:
        return backend.where(slot2_is_top, two, backend.where(slot1_is_top, one, none))

    def in_order(slots: Sequence[Array]) -> list[Array]:
        """The slots from the lowest bin to the highest."""
        return [pick(slots[i], slots[(2 + i) % 3], slots[(1 + i) % 3]) for i in range(3)]

    columns = in_order(sums)
    if spilled:
        # The unit of a spill word is that of the bin above.
        columns = [columns[0], *(a + b for a, b in zip(columns[1:], in_order(spilled)[:2], strict=True))]
        columns.append(in_order(spilled)[2])
    for i in range(1, len(columns)):
        columns[i] = columns[i] + backend.shift_right(columns[i - 1], grid.width)
    *inner, top = columns
    words = [_pack(backend, grid, inner[1], inner[0])]
    if spilled:
        words.append(_pack(backend, grid, top, inner[2]))
        top = backend.shift_right(top, grid.width)
    two, one, zero = (backend.full((), i, grid.word) for i in (2, 1, 0))
    top_bin = tags[0] * 3 + pick(two, one, zero)
    return normalized(backend, grid, [*words, top], (top_bin - 2) * grid.width + grid.lowest(0))


def _pack(backend: Backend, grid: Grid, high: Array, low: Array) -> Array:
    """Two digits in one word."""
    return backend.shift_left(high & grid.digit, grid.width) | (low & grid.digit)


def normalized(backend: Backend, grid: Grid, words: Sequence[Array], bottom: Array) -> Wide:
    """Normalizes a number of two or three words, lowest first, the last one signed; bit 0 has position ``bottom``."""
    one, zero = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    negative, borrow = words[-1] < 0, one
    magnitudes: list[Array] = []
    for word in words:
        magnitudes.append(backend.where(negative, borrow - word - 1, word))
        borrow = backend.where(word == 0, borrow, zero)
    rest, low, high = (zero, *magnitudes) if len(words) == 2 else magnitudes
    exponent = bottom + (len(words) * grid.bits - grid.precision)
    for _ in words[1:]:
        empty = high == 0
        high, low, rest = (
            backend.where(empty, low, high),
            backend.where(empty, rest, low),
            backend.where(empty, zero, rest),
        )
        exponent = backend.where(empty, exponent - grid.bits, exponent)
    # The position of the leading bit, from a conversion to float: without the bit below it, it cannot be rounded up.
    # Words that are 0 or whose leading bit is set need no shift.
    as_float = backend.cast(high & ~logical_right(backend, grid, high, 1), grid.value)
    field = backend.shift_right(backend.bitcast(as_float, grid.word), grid.precision - 1)
    up = backend.where(high > 0, grid.top // 2 + grid.bits - 1 - field, zero)
    high, low, below = (
        backend.shift_left(high, up) | _shifted_out(backend, grid, low, up),
        backend.shift_left(low, up) | _shifted_out(backend, grid, rest, up),
        backend.shift_left(rest, up),
    )
    low = low if len(words) == 2 else backend.where(below == 0, low, low | one)
    return Wide(high, low, exponent - up, negative, high == 0)


def _shifted_out(backend: Backend, grid: Grid, word: Array, up: Array) -> Array:
    """The bits that a shift to the left by ``up`` drops from a word, moved to bit 0."""
    return backend.shift_right(logical_right(backend, grid, word, 1), (grid.bits - 1) - up)


def divide(backend: Backend, grid: Grid, wide: Wide, divisor: Divisor) -> Wide:
    """``wide / divisor`` by long division; ``low`` of the quotient is 1 if there is a remainder, else 0."""
    (significand, exponent), precision = divisor, grid.precision
    one, zero = backend.full((), 1, grid.word), backend.full((), 0, grid.word)

    remainder = logical_right(backend, grid, wide.high, grid.bits - precision)
    fits = remainder >= significand
    remainder = backend.where(fits, remainder - significand, remainder)
    quotient = backend.where(fits, one, zero)
    # Two more digits of the quotient, for the low bits of `high` and the top bits of `low`.
    head, first, second = grid.bits - precision, (precision + 3) // 2, precision + 2 - (precision + 3) // 2
    taken = first - head
    upper = backend.shift_left(wide.high & ((1 << head) - 1), taken)
    upper = upper | logical_right(backend, grid, wide.low, grid.bits - taken)
    lower = backend.shift_right(wide.low, grid.bits - taken - second) & ((1 << second) - 1)
    for length, next_bits in ((first, upper), (second, lower)):
        # A float quotient is off by at most 1, however it is rounded. The remainder shows it: integers that wrap around
        # represent it exactly.
        factor = backend.divide(backend.full((), 1 << length, grid.value), backend.cast(significand, grid.value))
        digit = backend.cast(backend.product(backend.cast(remainder, grid.value), factor), grid.word)
        remainder = (backend.shift_left(remainder, length) | next_bits) - backend.product(digit, significand)
        over, under = remainder >= significand, remainder < 0
        digit = backend.where(over, digit + 1, backend.where(under, digit - 1, digit))
        remainder = backend.where(
            over, remainder - significand, backend.where(under, remainder + significand, remainder)
        )
        quotient = backend.shift_left(quotient, length) + digit
    rest = remainder | (wide.low & ((1 << (2 * (grid.bits - precision) - 2)) - 1))
    long = quotient >= 1 << (precision + 2)
    up = grid.bits - precision - 3
    high = backend.where(long, backend.shift_left(quotient, up), backend.shift_left(quotient, up + 1))
    low = backend.where(rest == 0, zero, one)
    shorter = backend.where(long, zero, one)
    return Wide(high, low, wide.exponent - exponent - shorter, wide.negative, wide.zero)


def finished(
    backend: Backend, grid: Grid, wide: Wide, slot0: Array, divisor: Sequence[Array], output: np.dtype
) -> Array:
    """The result of a sum, or of a mean if there is a divisor.

    Args:
      wide: the sum of finite values.
      slot0: the first slot, whose tag shows values that are not finite.
      divisor: the arrays of a `Divisor`, or none.
      output: the dtype of the result.
    """
    by = Divisor(*divisor) if divisor else None
    finite = to_float(backend, grid, wide if by is None else divide(backend, grid, wide, by), output)
    if by is not None:
        finite = backend.where(by.significand == 0, backend.full((), np.nan, backend.dtype(finite)), finite)
    return cast(backend, special(backend, grid, slot0, finite), output)


def nearest(backend: Backend, grid: Grid, wide: Wide, target: Grid) -> tuple[Array, Array]:
    """Rounds the significand to the precision of a float, ties to even.

    Returns:
      The significand, and the carry into the exponent: 1 if it was rounded up to a power of two, else 0.
    """
    dropped = grid.bits - target.precision
    one, zero = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    rounded = _round(backend, grid, wide.high, wide.low != 0, dropped)
    carried = backend.where(rounded == 2 * target.hidden, one, zero)
    return backend.shift_right(rounded, carried), carried


def _round(backend: Backend, grid: Grid, high: Array, below: Array, dropped: int) -> Array:
    """Drops bits of ``high``, rounding to nearest, ties to even; ``below``: whether there are bits below ``high``."""
    one, zero = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    kept, rest, half = logical_right(backend, grid, high, dropped), high & ((1 << dropped) - 1), 1 << (dropped - 1)
    tie = backend.where(below, one, kept & 1)
    return kept + backend.where(rest > half, one, backend.where(rest == half, tie, zero))


def to_float(backend: Backend, grid: Grid, wide: Wide, output: np.dtype) -> Array:
    """The nearest float, ties to even; infinite on overflow, and +0 for a sum of 0.

    Returns:
      A float64 if both the grid and the output have 64 bits, else a float32. For a narrower output it is rounded to
      odd, that is, toward zero with the lowest bit set if inexact, so that rounding it to the output is correct.
    """
    target = FLOAT64 if grid is FLOAT64 and output.itemsize >= 8 else FLOAT32
    one, zero = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    dropped = grid.bits - target.precision
    exponent = wide.exponent + (target.top // 2 - grid.top // 2)
    # A subnormal result keeps fewer bits: shifts the others out of `high`, into the sticky `below`.
    shift = backend.maximum(-exponent, zero)
    shift = -backend.maximum(-shift, backend.full((), 1 - grid.bits, grid.word))
    shifted_out = wide.high & ~backend.shift_left(backend.full((), -1, grid.word), shift)
    high = backend.shift_right(logical_right(backend, grid, wide.high, 1), backend.maximum(shift - 1, zero))
    high = backend.where(shift == 0, wide.high, high)
    below = (wide.low | shifted_out) != 0

    if output.itemsize < target.value.itemsize:
        inexact = ((high & ((1 << dropped) - 1)) != 0) | below
        rounded = logical_right(backend, grid, high, dropped) | backend.where(inexact, one, zero)
        over = backend.full((), target.infinity - 1, grid.word)
    else:
        rounded = _round(backend, grid, high, below, dropped)
        over = backend.full((), target.infinity, grid.word)
    field = backend.maximum(exponent, zero)
    most = backend.full((), 1 - target.top, grid.word)
    # An addition, so that the hidden bit and a carry of the rounding go into the exponent field.
    bits = backend.shift_left(-backend.maximum(-field, most), target.precision - 1) + rounded
    bits = backend.where(exponent > target.top - 1, over, bits)
    bits = backend.where(wide.negative, bits | (-1 << (target.bits - 1)), bits)
    return backend.bitcast(backend.cast(backend.where(wide.zero, zero, bits), target.word), target.value)


def cast(backend: Backend, x: Array, output: np.dtype) -> Array:
    """Casts a float32 or float64; keeps subnormal float32 numbers, which frameworks flush when casting to float64."""
    dtype = backend.dtype(x)
    converted = backend.cast(x, output)
    if output.itemsize <= dtype.itemsize or dtype != FLOAT32.value:
        return converted
    bits = backend.bitcast(x, FLOAT32.word)
    units = backend.cast(backend.where(bits < 0, -(bits & FLOAT32.most), bits), output)
    subnormal = (bits & FLOAT32.most) < FLOAT32.hidden
    return backend.where(subnormal, units * backend.full((), 2.0**-FLOAT32.unit, output), converted)


def special(backend: Backend, grid: Grid, slot0: Array, finite: Array) -> Array:
    """``finite`` if all values were finite, else their sum: an infinity, or NaN for both signs and for a NaN."""
    counts = backend.shift_right(slot0, grid.tag_bits)
    positive, negative = counts & (grid.negative - 1), counts >= grid.negative
    infinity, minus, nan = (backend.full((), value, backend.dtype(finite)) for value in (np.inf, -np.inf, np.nan))
    result = backend.where(positive == 0, minus, backend.where(negative, nan, infinity))
    return backend.where((slot0 & grid.tag) == grid.special, result, finite)


def logical_right(backend: Backend, grid: Grid, a: Array, amount: int) -> Array:
    return backend.shift_right(a, amount) & ((1 << (grid.bits - amount)) - 1)
