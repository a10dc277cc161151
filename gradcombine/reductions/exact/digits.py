"""Sums of floats as fixed-point integers, whose bits depend on the multiset of the values only.

**The grid.** Bins of 16 binary positions divide the range of float32 (of 32 positions, that of float64). Each element
has a window of three bins: that of the leading bit of the largest value so far, and the two below. The sum keeps the
digits of each value in the window, truncated toward zero. The window only moves up, so the digits below it are dropped
whatever the order of the values.

**The slots.** Three integer words hold the bins of the window: slot ``s`` holds the bin ``i`` with ``i % 3 == s``. Its
bin is a monotone function of the window, so a slot computes it by a maximum and without the other slots: its update is
one loop over memory, in place. The lowest bits of a word are the *tag*, ``i // 3``; the bits above are the signed sum
of digits. The number of digits that fit is the capacity of the grid.

**Values that are not finite** have the largest exponent, and only they raise slot 0 to the last tag. With that tag,
slot 0 counts +inf, -inf and NaN instead of digits.

**Spilling.** For more terms than the capacity, each slot has a second word, into which it *spills*. To *settle* a slot
is to keep the bits of one digit in it, and to move those above to the spill word, in units of ``2**width`` of the same
bin. They are not carried into the next bin: another slot would keep the carry when this slot drops its bin, and the sum
would depend on when the carry happened. As it is, the two words are one long word, so their sum depends on the multiset
only, and so does each word after a settlement, which is part of every merge. A spill word has the tag of its bin, too:
if the tag of the slot is higher, the spilled digits are dropped. So deposits change the slots only, and words are
settled after every `BETWEEN` deposits. A settled slot 0 with the last tag does not count +inf, -inf and NaN, but
records whether there were any.

The error of the sum of n values is at most ``(n - 1) * 2**-32 * max |x|`` (float64: ``2**-64``) before the final
rounding, as the window extends at least that far below the leading bit of the largest value.

References: J. Demmel and H. D. Nguyen, `Fast reproducible floating-point summation
<https://doi.org/10.1109/ARITH.2013.9>`_, 2013; P. Ahrens, J. Demmel and H. D. Nguyen, `Algorithms for efficient
reproducible floating point summation <https://doi.org/10.1145/3389360>`_, 2020, for the fixed grid of bins.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array


@dataclass(frozen=True)
class Grid:
    """A float format, and the format of the words that hold its digits.

    Position 0 is that of the smallest subnormal number. A value whose exponent field is E has the exponent
    ``p = max(E, 1) - 1``: it is ``significand * 2**p`` times the smallest subnormal number.

    Attributes:
      value: the float dtype.
      word: the signed integer dtype of the same width.
      precision: the number of bits of a significand, including the hidden bit.
      width: the number of positions of a bin: half the bits of a word.
      tag_bits: the number of bits of the tag.
      special: the tag of slot 0 for infinities and NaN.
    """

    value: np.dtype
    word: np.dtype
    precision: int
    width: int
    tag_bits: int
    special: int

    @cached_property
    def bits(self) -> int:
        return 8 * self.word.itemsize

    @cached_property
    def capacity(self) -> int:
        """The number of digits that a word can sum, below the sign bit and above the tag."""
        return 1 << (self.bits - 1 - self.tag_bits - self.width)

    @cached_property
    def tag(self) -> int:
        """The mask of the tag."""
        return (1 << self.tag_bits) - 1

    @cached_property
    def digit(self) -> int:
        """The mask of a digit."""
        return (1 << self.width) - 1

    @cached_property
    def negative(self) -> int:
        """A -inf in the count of slot 0, which is above the count of +inf; a NaN counts as one of each."""
        return 1 << ((self.bits - self.tag_bits) // 2)

    @cached_property
    def most(self) -> int:
        """The mask of a float's bits without the sign."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def hidden(self) -> int:
        """The hidden bit of a significand, which is the lowest bit of the exponent field."""
        return 1 << (self.precision - 1)

    @cached_property
    def half(self) -> int:
        """The number of bits of the lower half of a significand: a word holds a sum of a few products of halves."""
        return (self.precision + 1) // 2

    @cached_property
    def lower(self) -> int:
        """The mask of the lower half of a product of significands."""
        return (1 << 2 * self.half) - 1

    @cached_property
    def unit(self) -> int:
        """``2**-unit`` is the smallest subnormal number."""
        return self.top // 2 + self.precision - 2

    @cached_property
    def infinity(self) -> int:
        """The bits of +inf."""
        return self.most & -self.hidden

    @cached_property
    def top(self) -> int:
        """The exponent p of infinities and NaN; finite values have smaller ones."""
        return (self.infinity >> (self.precision - 1)) - 1

    @cached_property
    def _shift(self) -> int:
        """The bin of the leading bit is ``(p + _shift) // width``; chosen so that infinities start a bin of slot 0."""
        return self.special * 3 * self.width - self.top

    def lowest(self, s: int) -> int:
        """The lowest position of slot s with tag 0."""
        return self.width * s - (self._shift - self.precision + 1)

    def tag_of(self, backend: Backend, exponent: Array, s: int) -> Array:
        """``(exponent + shift - width * s) // (3 * width)`` by a multiplication, exact for every exponent."""
        factor = -(-(1 << 20) // (3 * self.width))
        return backend.shift_right(exponent * factor + (self._shift - self.width * s) * factor, 20)


FLOAT32 = Grid(np.dtype(np.float32), np.dtype(np.int32), precision=24, width=16, tag_bits=3, special=6)
FLOAT64 = Grid(np.dtype(np.float64), np.dtype(np.int64), precision=53, width=32, tag_bits=5, special=22)


def grid_for(dtype: np.dtype) -> Grid:
    """The grid of contributions or words of this dtype: FLOAT64 for 64 bits, else FLOAT32."""
    return FLOAT64 if dtype.itemsize == 8 else FLOAT32


SPILLED_CAPACITY = 1 << 26
"""The capacity of float32 digits that spill."""

BETWEEN = FLOAT32.capacity // 2
"""The number of deposits after which words are settled: half of those that a slot has room for."""


class Digits(NamedTuple):
    """The sum of each element, in int32 or int64 words, which are all 0 for no values and for zeros only.

    Attributes:
      slots: the three slots.
      spills: the spill word of each slot; empty if the digits do not spill.
    """

    slots: tuple[Array, ...]
    spills: tuple[Array, ...] = ()

    @classmethod
    def of(cls, words: Sequence[Array]) -> Digits:
        return cls(tuple(words[:3]), tuple(words[3:]))

    @property
    def words(self) -> tuple[Array, ...]:
        return (*self.slots, *self.spills)

    @property
    def in_words(self) -> str:
        return f"digits for max_terms {'above' if self.spills else 'up to'} {FLOAT32.capacity}"


class Lower(NamedTuple):
    """The lower bits of a number that does not fit a word: ``significand * 2**exponent`` in the unit of `Decoded`."""

    exponent: Array
    significand: Array


class Decoded(NamedTuple):
    """A number: ``significand * 2**exponent`` times the smallest subnormal float.

    Attributes:
      magnitude: the bits without sign of an infinity or NaN; for finite numbers, any smaller integer.
      exponent: may be negative.
      significand: an integer of at most ``Grid.precision`` bits.
      sign: 0 or -1.
      lower: the bits below those of the significand, if there are more.
    """

    magnitude: Array
    exponent: Array
    significand: Array
    sign: Array
    lower: Lower | None = None


def grid_of(backend: Backend, digits: Digits) -> Grid:
    return grid_for(backend.dtype(digits.slots[0]))


def deposit(backend: Backend, grid: Grid, digits: Digits, values: Sequence[Decoded]) -> Digits:
    """Adds numbers in one pass over the slots; to digits that spill, at most `BETWEEN` after they were settled."""

    def slot(word: Array, s: int) -> Array:
        tag, total = _slot_terms(backend, grid, word & grid.tag, values, s)
        return backend.where((word & grid.tag) < tag, tag, word) + total

    return Digits(tuple(slot(word, s) for s, word in enumerate(digits.slots)), digits.spills)


def merge(backend: Backend, grid: Grid, a: Digits, b: Digits) -> Digits:
    """Adds two sums and settles the words: each slot keeps the higher bin, or the sum of equal ones."""
    tags = [backend.maximum(x & grid.tag, y & grid.tag) for x, y in zip(a.slots, b.slots, strict=True)]
    left, right = aligned(backend, grid, a, tags), aligned(backend, grid, b, tags)
    return tagged(backend, grid, tags, [x + y for x, y in zip(left, right, strict=True)])


def aligned(backend: Backend, grid: Grid, digits: Digits, tags: Sequence[Array]) -> tuple[Array, ...]:
    """The settled words without tags; 0 for slots of other tags than these."""
    digits, zero = settle(backend, grid, digits), backend.full((), 0, grid.word)
    stays = [(word & grid.tag) == tag for word, tag in zip(digits.slots, tags, strict=True)]
    slots = [word - tag for word, tag in zip(digits.slots, tags, strict=True)]
    words = (*slots, *spilled(backend, grid, digits))
    return tuple(backend.where(stays[i % 3], word, zero) for i, word in enumerate(words))


def tagged(backend: Backend, grid: Grid, tags: Sequence[Array], words: Sequence[Array]) -> Digits:
    """Settled digits with these tags, from words without tags as `aligned` returns them, or sums of them."""
    slots, spills = words[:3], words[3:]
    if not spills:
        return Digits(tuple(word + tag for word, tag in zip(slots, tags, strict=True)))
    pairs = [_settled(backend, grid, *each, s) for s, each in enumerate(zip(tags, slots, spills, strict=True))]
    return Digits(tuple(word for word, _ in pairs), tuple(spill for _, spill in pairs))


def settle(backend: Backend, grid: Grid, digits: Digits) -> Digits:
    """Settles the words, which keeps the value."""
    if not digits.spills:
        return digits
    tags = [word & grid.tag for word in digits.slots]
    sums = [word - tag for word, tag in zip(digits.slots, tags, strict=True)]
    return tagged(backend, grid, tags, [*sums, *spilled(backend, grid, digits)])


def spilled(backend: Backend, grid: Grid, digits: Digits) -> list[Array]:
    """The spill words without tags; 0 for spill words of a lower tag than their slot."""
    zero, pairs = backend.full((), 0, grid.word), zip(digits.slots, digits.spills, strict=bool(digits.spills))
    return [backend.where(((a ^ b) & grid.tag) == 0, backend.shift_right(b, grid.tag_bits), zero) for a, b in pairs]


def _settled(backend: Backend, grid: Grid, tag: Array, total: Array, spilled: Array, s: int) -> tuple[Array, Array]:
    """The settled slot s and its spill word.

    Args:
      tag: the tag of the slot.
      total: the sum of digits, above the bits of the tag.
      spilled: the spill word without tag.
      s: the index of the slot.
    """
    word = tag | (total & (grid.digit << grid.tag_bits))
    spilled = spilled + backend.shift_right(total, grid.width + grid.tag_bits)
    spill = backend.shift_left(spilled, grid.tag_bits) | tag
    if s > 0:
        return word, spill
    zero, flag, flags = (backend.full((), n << grid.tag_bits, grid.word) for n in (0, 1, grid.negative))
    positive = backend.where((total & ((grid.negative - 1) << grid.tag_bits)) == 0, zero, flag)
    negative = backend.where(total < grid.negative << grid.tag_bits, zero, flags)
    special = tag == grid.special
    return backend.where(special, tag | positive | negative, word), backend.where(special, tag, spill)


def decode(backend: Backend, grid: Grid, x: Array) -> Decoded:
    """Splits a float into its parts."""
    bits = backend.bitcast(x, grid.word)
    magnitude = bits & grid.most
    # Subnormal numbers share the exponent of the smallest normal ones, and have no hidden bit.
    field = backend.maximum((magnitude & grid.infinity) - grid.hidden, backend.full((), 0, grid.word))
    exponent = backend.shift_right(field, grid.precision - 1)
    return Decoded(magnitude, exponent, magnitude - field, backend.shift_right(bits, grid.bits - 1))


def normal(backend: Backend, grid: Grid, magnitude: Array) -> tuple[Array, Array]:
    """The significand and exponent of a float from its bits without sign; the leading bit is set except for zero."""
    subnormal = magnitude < grid.hidden
    # The bits of a subnormal number are an integer, which its conversion to a float normalizes.
    as_float = backend.bitcast(backend.cast(magnitude, grid.value), grid.word)
    scaled = backend.where(subnormal, as_float, magnitude)
    down, one, zero = (backend.full((), n, grid.word) for n in (grid.unit + 1, 1, 0))
    exponent = backend.shift_right(scaled, grid.precision - 1) - backend.where(subnormal, down, one)
    # After that only zero has the exponent field 0.
    leading = backend.where(scaled < grid.hidden, zero, backend.full((), grid.hidden, grid.word))
    return (scaled & (grid.hidden - 1)) | leading, exponent


def _slot_terms(
    backend: Backend, grid: Grid, slot_tag: Array, values: Sequence[Decoded], s: int
) -> tuple[Array, Array]:
    """The terms of slot s, whose tag is ``slot_tag``.

    Returns:
      The tag of the largest value, and the sum, above the bits of the tag, of the digits in the bin of the higher tag.
    """
    tag = grid.tag_of(backend, reduce(backend.maximum, [value.exponent for value in values]), s)
    position = backend.maximum(slot_tag, tag) * (3 * grid.width) + (grid.lowest(s) - grid.tag_bits)

    def term(value: Decoded) -> Array:
        digit = _digit(backend, grid, value, position)
        return _counted(backend, grid, value, digit) if s == 0 else digit

    return tag, reduce(operator.add, map(term, values))


def _digit(backend: Backend, grid: Grid, value: Decoded, position: Array) -> Array:
    """The signed digit of the value in the bin at a position, above the tag; 0 if the bin is above the value."""
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
    """The term of slot 0: the digit, or the count of an infinity or NaN."""
    counts = (1, grid.negative, 1 + grid.negative)
    positive, negative, nan = (backend.full((), n << grid.tag_bits, grid.word) for n in counts)
    infinite = backend.where(value.sign < 0, negative, positive)
    special = backend.where(value.magnitude > grid.infinity, nan, infinite)
    return backend.where(value.magnitude >= grid.infinity, special, digit)
