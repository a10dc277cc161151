"""Sums of floats in fixed-point digits, whose bits depend on the multiset of the values alone.

**The grid.** A bin covers 16 binary positions of the float32 range (of the float64 range 32). The window of an element
is the bin of the largest value that it has seen, and the two below: of every value the sum keeps its digits in the
window, truncated toward zero. What falls below the window falls there in any order, since the window never moves down.

**The slots.** Three integer words hold the three bins of the window: slot ``s`` holds the one with ``i % 3 == s``. Its
bin is a monotone function of the window's, so each slot follows it by a maximum of its own, and no slot needs another:
the update of a slot is one loop over memory, in place. The lowest bits of a word tell the bin (``i // 3``, the *tag*),
the others are the signed sum of digits. How many fit is the grid's capacity;
`gradcombine.reductions.exact.spill` has room for more.

**Values that are not finite** have the largest exponent, the only one that brings slot 0 to the last tag: there it
counts +inf, -inf and NaN in place of digits.

The sum of n values is off by at most ``(n - 1) * 2**-32 * max |x|`` (float64: ``2**-64``) before the one rounding at
the end: the window reaches that far, or farther, below the leading bit of the largest value.

References: J. Demmel and H. D. Nguyen, `Fast reproducible floating-point summation
<https://doi.org/10.1109/ARITH.2013.9>`_, 2013; P. Ahrens, J. Demmel and H. D. Nguyen, `Algorithms for efficient
reproducible floating point summation <https://doi.org/10.1145/3389360>`_, 2020, where the bins of a fixed grid come
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.exact.grid import Grid
from gradcombine.types import Array


class Digits(NamedTuple):
    """The three slots of every element, int32 or int64. All 0: no value, or only zeros."""

    in_words = "digits for max_terms up to 4096"

    slot0: Array
    slot1: Array
    slot2: Array


class Lower(NamedTuple):
    """The lower bits of a number that are too many for one word, ``significand * 2**exponent`` of the same unit."""

    exponent: Array
    significand: Array


class Decoded(NamedTuple):
    """A number, ``significand * 2**exponent`` times the smallest subnormal float.

    Attributes:
      magnitude: the bits of the float without its sign, where it is not finite; else less than those of infinity.
      exponent: of a number below the normal range it may be negative.
      significand: of the precision's bits.
      sign: 0 or -1.
      lower: further bits, below the significand's.
    """

    magnitude: Array
    exponent: Array
    significand: Array
    sign: Array
    lower: Lower | None = None


def deposit(backend: Backend, grid: Grid, digits: Digits, values: Sequence[Decoded]) -> Digits:
    """Adds numbers, all in one pass over the digits."""

    def slot(word: Array, s: int) -> Array:
        tag, added = arriving(backend, grid, word & grid.tag, values, s)
        return backend.where((word & grid.tag) < tag, tag, word) + added

    return Digits(*(slot(word, s) for s, word in enumerate(digits)))


def merge(backend: Backend, grid: Grid, a: Digits, b: Digits) -> Digits:
    """Adds two sums: in each slot the higher bin stays, and two equal ones are added."""

    def slot(x: Array, y: Array) -> Array:
        left, right = x & grid.tag, y & grid.tag
        return backend.where(left < right, y, backend.where(right < left, x, x + y - right))

    return Digits(*(slot(x, y) for x, y in zip(a, b, strict=True)))


def decode(backend: Backend, grid: Grid, x: Array) -> Decoded:
    """A float's parts."""
    bits = backend.bitcast(x, grid.word)
    magnitude = bits & grid.most
    # Subnormal numbers share the exponent of the smallest normal ones, and have no hidden bit.
    field = backend.maximum((magnitude & grid.infinity) - grid.hidden, backend.full((), 0, grid.word))
    exponent = backend.shift_right(field, grid.precision - 1)
    return Decoded(magnitude, exponent, magnitude - field, backend.shift_right(bits, grid.bits - 1))


def normal(backend: Backend, grid: Grid, magnitude: Array) -> tuple[Array, Array]:
    """Significand and exponent of a float's bits without sign; the leading bit is set, but of zero none is."""
    tiny = magnitude < grid.hidden
    as_float = backend.bitcast(backend.cast(magnitude, grid.value), grid.word)
    scaled = backend.where(tiny, as_float, magnitude)
    down, one, none = (backend.full((), n, grid.word) for n in (grid.unit + 1, 1, 0))
    exponent = backend.shift_right(scaled, grid.precision - 1) - backend.where(tiny, down, one)
    # Only of zero is the field of the exponent still 0.
    leading = backend.where(scaled < grid.hidden, none, backend.full((), grid.hidden, grid.word))
    return (scaled & (grid.hidden - 1)) | leading, exponent


def arriving(backend: Backend, grid: Grid, kept: Array, values: Sequence[Decoded], s: int) -> tuple[Array, Array]:
    """What values bring to slot s, whose tag is ``kept``: the tag of the largest of them, and the sum of the digits in
    the bin of the higher of both tags, above the bits of the tag."""
    largest = values[0].exponent
    for value in values[1:]:
        largest = backend.maximum(largest, value.exponent)
    tag = grid.tag_of(backend, largest, s)
    position = backend.maximum(kept, tag) * (3 * grid.width) + (grid.lowest(s) - grid.tag_bits)
    total = None
    for value in values:
        digit = _digit(backend, grid, value, position)
        added = _counted(backend, grid, value, digit) if s == 0 else digit
        total = added if total is None else total + added
    return tag, total


def _digit(backend: Backend, grid: Grid, value: Decoded, position: Array) -> Array:
    """The value's signed digit in the bin at a position, above the tag; 0 where the bin is above the value."""
    digit = _bits_at(backend, grid, value, position)
    if value.lower is not None:
        digit = digit | _bits_at(backend, grid, value.lower, position)
    return (digit ^ value.sign) - value.sign


def _bits_at(backend: Backend, grid: Grid, value: Decoded | Lower, position: Array) -> Array:
    zero, most = backend.full((), 0, grid.word), backend.full((), grid.bits - 1, grid.word)
    down = position - value.exponent
    up = backend.maximum(-down, zero)
    down = -backend.maximum(-backend.maximum(down, zero), -most)
    return backend.shift_right(backend.shift_left(value.significand, up), down) & (grid.digit << grid.tag_bits)


def _counted(backend: Backend, grid: Grid, value: Decoded, digit: Array) -> Array:
    """In slot 0: a value that is not finite counts in place of its digit."""
    counts = (1, grid.negative, 1 + grid.negative)
    one, many, both = (backend.full((), n << grid.tag_bits, grid.word) for n in counts)
    infinite = backend.where(value.sign < 0, many, one)
    special = backend.where(value.magnitude > grid.infinity, both, infinite)
    return backend.where(value.magnitude >= grid.infinity, special, digit)
