"""From a sum in integer words to the nearest float, in integer arithmetic alone: no step depends on how a device rounds
or divides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.exact import digits
from gradcombine.reductions.exact.digits import FLOAT32, FLOAT64, Grid
from gradcombine.types import Array


class Divisor(NamedTuple):
    """A positive number, ``significand * 2**(exponent - precision + 1)``: two integer scalars.

    The leading bit of the significand is set; 0 stands for what nothing can be divided by.
    """

    significand: Array
    exponent: Array


class Wide(NamedTuple):
    """A finite number whose leading bit is that of ``high``.

    ``high`` and ``low`` are the bits of unsigned words. Any bit of ``low`` stands for all that is below as well. As a
    normal float the number has the exponent field ``exponent + 1``.
    """

    high: Array
    low: Array
    exponent: Array
    negative: Array
    zero: Array


def carry(backend: Backend, grid: Grid, a: digits.Digits) -> Wide:
    """The finite sum in one number: slots put in order, carries propagated, normalised."""
    tags = [word & grid.tag for word in a.slots]
    sums = [backend.shift_right(word, grid.tag_bits) for word in a.slots]
    spilled = digits.spilled(backend, grid, a)
    slot2_is_top, slot1_is_top = tags[2] == tags[0], tags[1] == tags[0]

    def pick(two: Array, one: Array, none: Array) -> Array:
        return backend.where(slot2_is_top, two, backend.where(slot1_is_top, one, none))

    def in_order(slots: Sequence[Array]) -> list[Array]:
        """From the lowest bin to the top."""
        return [pick(slots[i], slots[(2 + i) % 3], slots[(1 + i) % 3]) for i in range(3)]

    columns = in_order(sums)
    if spilled:
        # What a bin has spilled counts units of the bin above.
        columns = [columns[0], *(a + b for a, b in zip(columns[1:], in_order(spilled)[:2], strict=True))]
        columns.append(in_order(spilled)[2])
    for i in range(1, len(columns)):
        columns[i] = columns[i] + backend.shift_right(columns[i - 1], grid.width)
    *inner, top = columns
    words = [_joined(backend, grid, inner[1], inner[0])]
    if spilled:
        words.append(_joined(backend, grid, top, inner[2]))
        top = backend.shift_right(top, grid.width)
    two, one, none = (backend.full((), i, grid.word) for i in (2, 1, 0))
    window = tags[0] * 3 + pick(two, one, none)
    return normalised(backend, grid, [*words, top], (window - 2) * grid.width + grid.lowest(0))


def _joined(backend: Backend, grid: Grid, high: Array, low: Array) -> Array:
    return backend.shift_left(high & grid.digit, grid.width) | (low & grid.digit)


def normalised(backend: Backend, grid: Grid, words: Sequence[Array], bottom: Array) -> Wide:
    """Two words or three, the lowest first and the last one signed, of which bit 0 is at the position ``bottom``."""
    one, none = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    negative, borrow = words[-1] < 0, one
    magnitudes: list[Array] = []
    for word in words:
        magnitudes.append(backend.where(negative, borrow - word - 1, word))
        borrow = backend.where(word == 0, borrow, none)
    rest, low, high = (none, *magnitudes) if len(words) == 2 else magnitudes
    shifted = bottom + (len(words) * grid.bits - grid.precision)
    for _ in words[1:]:
        empty = high == 0
        high, low, rest = (
            backend.where(empty, low, high),
            backend.where(empty, rest, low),
            backend.where(empty, none, rest),
        )
        shifted = backend.where(empty, shifted - grid.bits, shifted)
    # The exponent of a number whose second bit is cleared cannot be rounded up. Zero and a leading bit need no shift.
    as_float = backend.cast(high & ~logical_right(backend, grid, high, 1), grid.value)
    exponent = backend.shift_right(backend.bitcast(as_float, grid.word), grid.precision - 1)
    up = backend.where(high > 0, grid.top // 2 + grid.bits - 1 - exponent, none)
    high, low, below = (
        backend.shift_left(high, up) | _moved_out(backend, grid, low, up),
        backend.shift_left(low, up) | _moved_out(backend, grid, rest, up),
        backend.shift_left(rest, up),
    )
    low = low if len(words) == 2 else backend.where(below == 0, low, low | one)
    return Wide(high, low, shifted - up, negative, high == 0)


def _moved_out(backend: Backend, grid: Grid, word: Array, up: Array) -> Array:
    """The bits that leave a word at its top as it is shifted up, from bit 0."""
    return backend.shift_right(logical_right(backend, grid, word, 1), (grid.bits - 1) - up)


def divide(backend: Backend, grid: Grid, wide: Wide, divisor: Divisor) -> Wide:
    """``wide / divisor`` by long division; what remains goes into ``low``."""
    (significand, exponent), precision = divisor, grid.precision
    one, none = backend.full((), 1, grid.word), backend.full((), 0, grid.word)

    remainder = logical_right(backend, grid, wide.high, grid.bits - precision)
    fits = remainder >= significand
    remainder = backend.where(fits, remainder - significand, remainder)
    quotient = backend.where(fits, one, none)
    # Two long digits, of the low bits of `high` and the top bits of `low`.
    head, first, second = grid.bits - precision, (precision + 3) // 2, precision + 2 - (precision + 3) // 2
    taken = first - head
    entering = backend.shift_left(wide.high & ((1 << head) - 1), taken)
    entering = entering | logical_right(backend, grid, wide.low, grid.bits - taken)
    below = backend.shift_right(wide.low, grid.bits - taken - second) & ((1 << second) - 1)
    for length, bits_in in ((first, entering), (second, below)):
        # A float tells the digit to within 1, however it is rounded, and integers that wrap around what is wrong.
        factor = backend.divide(backend.full((), 1 << length, grid.value), backend.cast(significand, grid.value))
        digit = backend.cast(backend.product(backend.cast(remainder, grid.value), factor), grid.word)
        remainder = (backend.shift_left(remainder, length) | bits_in) - backend.product(digit, significand)
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
    low = backend.where(rest == 0, none, one)
    shorter = backend.where(long, none, one)
    return Wide(high, low, wide.exponent - exponent - shorter, wide.negative, wide.zero)


def finished(
    backend: Backend, grid: Grid, wide: Wide, slot0: Array, divisor: Sequence[Array], output: np.dtype
) -> Array:
    """The result of a sum or, where there is a divisor, of a mean.

    Args:
      backend: of the arrays.
      grid: of the digits.
      wide: the sum, if it is finite.
      slot0: the first slot, which tells if it is not.
      divisor: the arrays of a `Divisor`, or none.
      output: the dtype of the result.
    """
    by = Divisor(*divisor) if divisor else None
    finite = to_float(backend, grid, wide if by is None else divide(backend, grid, wide, by), output)
    if by is not None:
        finite = backend.where(by.significand == 0, backend.full((), np.nan, backend.dtype(finite)), finite)
    return widened(backend, special(backend, grid, slot0, finite), output)


def nearest(backend: Backend, grid: Grid, wide: Wide, target: Grid) -> tuple[Array, Array]:
    """The significand rounded to the precision of another float, ties to even, and 1 where that made a power of two."""
    dropped = grid.bits - target.precision
    one, none = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    rounded = _rounded(backend, grid, wide.high, wide.low != 0, dropped)
    carried = backend.where(rounded == 2 * target.hidden, one, none)
    return backend.shift_right(rounded, carried), carried


def _rounded(backend: Backend, grid: Grid, high: Array, below: Array, dropped: int) -> Array:
    one, none = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    kept, rest, half = logical_right(backend, grid, high, dropped), high & ((1 << dropped) - 1), 1 << (dropped - 1)
    tie = backend.where(below, one, kept & 1)
    return kept + backend.where(rest > half, one, backend.where(rest == half, tie, none))


def to_float(backend: Backend, grid: Grid, wide: Wide, output: np.dtype) -> Array:
    """The nearest float, ties to even; overflow is infinite, and a zero sum +0.

    It is a float64 where both the grid and the output are, else a float32. For a narrower output it is rounded to odd:
    toward zero, with the lowest bit set if inexact. Rounded once more, to the output, that is correctly rounded.
    """
    target = FLOAT64 if grid is FLOAT64 and output.itemsize >= 8 else FLOAT32
    one, none = backend.full((), 1, grid.word), backend.full((), 0, grid.word)
    dropped = grid.bits - target.precision
    exponent = wide.exponent + (target.top // 2 - grid.top // 2)
    # A result below the normal range keeps fewer bits: what it loses joins those below.
    lost = backend.maximum(-exponent, none)
    lost = -backend.maximum(-lost, backend.full((), 1 - grid.bits, grid.word))
    fallen = wide.high & ~backend.shift_left(backend.full((), -1, grid.word), lost)
    high = backend.shift_right(logical_right(backend, grid, wide.high, 1), backend.maximum(lost - 1, none))
    high = backend.where(lost == 0, wide.high, high)
    below = (wide.low | fallen) != 0

    if output.itemsize < target.value.itemsize:
        inexact = ((high & ((1 << dropped) - 1)) != 0) | below
        rounded = logical_right(backend, grid, high, dropped) | backend.where(inexact, one, none)
        over = backend.full((), target.infinity - 1, grid.word)
    else:
        rounded = _rounded(backend, grid, high, below, dropped)
        over = backend.full((), target.infinity, grid.word)
    field = backend.maximum(exponent, none)
    most = backend.full((), 1 - target.top, grid.word)
    bits = backend.shift_left(-backend.maximum(-field, most), target.precision - 1) + rounded
    bits = backend.where(exponent > target.top - 1, over, bits)
    bits = backend.where(wide.negative, bits | (-1 << (target.bits - 1)), bits)
    return backend.bitcast(backend.cast(backend.where(wide.zero, none, bits), target.word), target.value)


def widened(backend: Backend, x: Array, output: np.dtype) -> Array:
    """A float32 or float64 in the dtype of the result: frameworks flush subnormal float32 numbers that become wider."""
    dtype = backend.dtype(x)
    converted = backend.cast(x, output)
    if output.itemsize <= dtype.itemsize or dtype != FLOAT32.value:
        return converted
    bits = backend.bitcast(x, FLOAT32.word)
    units = backend.cast(backend.where(bits < 0, -(bits & FLOAT32.most), bits), output)
    tiny = (bits & FLOAT32.most) < FLOAT32.hidden
    return backend.where(tiny, units * backend.full((), 2.0**-FLOAT32.unit, output), converted)


def special(backend: Backend, grid: Grid, slot0: Array, finite: Array) -> Array:
    """``finite``, or where a value was not: the infinity of one sign, NaN where there were both or a NaN."""
    counts = backend.shift_right(slot0, grid.tag_bits)
    positive, negative = counts & (grid.negative - 1), counts >= grid.negative
    infinity, minus, nan = (backend.full((), value, backend.dtype(finite)) for value in (np.inf, -np.inf, np.nan))
    result = backend.where(positive == 0, minus, backend.where(negative, nan, infinity))
    return backend.where((slot0 & grid.tag) == grid.special, result, finite)


def logical_right(backend: Backend, grid: Grid, a: Array, amount: int) -> Array:
    return backend.shift_right(a, amount) & ((1 << (grid.bits - amount)) - 1)
