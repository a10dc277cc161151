"""Sums of floats in fixed-point digits, whose bits depend on the multiset of the values alone.

**The grid.** A bin covers 16 binary positions of the float32 range (of the float64 range 32). The window of an element
is the bin of the largest value that it has seen, and the two below: of every value the sum keeps its digits in the
window, truncated toward zero. What falls below the window falls there in any order, since the window never moves down.

**The slots.** Three integer words hold the three bins of the window: slot ``s`` holds the one with ``i % 3 == s``. Its
bin is a monotone function of the window's, so each slot follows it by a maximum of its own, and no slot needs another:
the update of a slot is one loop over memory, in place. The lowest bits of a word tell the bin (``i // 3``, the *tag*),
the others are the signed sum of digits. How many fit is the grid's capacity.

**Values that are not finite** have the largest exponent, the only one that brings slot 0 to the last tag: there it
counts +inf, -inf and NaN in place of digits.

**Room for more** than a word can sum up has a second word for each slot, into which it *spills*. A slot that is
*settled* keeps the bits of one digit of its sum; what is above goes into its spill word, in units of ``2**width`` of
the same bin. A carry into the next bin, which is another slot, would lose what that slot drops when its bin rises
later: then the sum would depend on when it happened. This way the two words are one long word, and what holds of a slot
holds of both: so the sum is a function of the multiset whenever the words were settled, and after a merge, which
settles them, each word is. A spill word has the tag of its bin as well. If the slot's tag is higher, what was spilled
has been dropped. So a deposit touches the slots alone, until there have been `BETWEEN` of them. In the place of counts
of +inf, -inf and NaN a settled slot 0 keeps only whether there were any.

The sum of n values is off by at most ``(n - 1) * 2**-32 * max |x|`` (float64: ``2**-64``) before the one rounding at
the end: the window reaches that far, or farther, below the leading bit of the largest value.

References: J. Demmel and H. D. Nguyen, `Fast reproducible floating-point summation
<https://doi.org/10.1109/ARITH.2013.9>`_, 2013; P. Ahrens, J. Demmel and H. D. Nguyen, `Algorithms for efficient
reproducible floating point summation <https://doi.org/10.1145/3389360>`_, 2020, where the bins of a fixed grid come
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.types import Array


@dataclass(frozen=True)
class Grid:
    """A float format, and the words that hold digits of it.

    Position 0 is the smallest subnormal number. A value with the exponent field E has the exponent
    ``p = max(E, 1) - 1``, and is ``significand * 2**p`` of it.

    Attributes:
      value: the float dtype.
      word: the signed integer dtype of its width.
      precision: the bits of a significand, the hidden one among them.
      width: the positions of a bin: half of those of a word.
      tag_bits: the bits of a word that tell its bin.
      special: the tag of slot 0 that only infinities and NaN have.
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
        """The digits that a word can sum up, below the sign and above the tag."""
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
        """Where slot 0 counts -inf, above the count of +inf; a NaN counts as one of each."""
        return 1 << ((self.bits - self.tag_bits) // 2)

    @cached_property
    def most(self) -> int:
        """The bits of a float without its sign."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def hidden(self) -> int:
        """The hidden bit of a significand: the lowest one of the exponent field."""
        return 1 << (self.precision - 1)

    @cached_property
    def half(self) -> int:
        """The bits of the lower half of a significand: products of halves, and sums of a few, fit a word."""
        return (self.precision + 1) // 2

    @cached_property
    def lower(self) -> int:
        """The mask of the lower bits of a product of significands, below the precision's."""
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
        """The exponent p of infinities and NaN; that of finite values is less."""
        return (self.infinity >> (self.precision - 1)) - 1

    @cached_property
    def _shift(self) -> int:
        """``(p + _shift) // width`` is the bin of the leading bit: so much that infinities begin the bin of a tag."""
        return self.special * 3 * self.width - self.top

    def lowest(self, s: int) -> int:
        """The lowest position of slot s at tag 0."""
        return self.width * s - (self._shift - self.precision + 1)

    def tag_of(self, backend: Backend, exponent: Array, s: int) -> Array:
        """``(exponent + shift - width * s) // (3 * width)`` without a division, which is exact for every exponent."""
        factor = -(-(1 << 20) // (3 * self.width))
        return backend.shift_right(exponent * factor + (self._shift - self.width * s) * factor, 20)


FLOAT32 = Grid(np.dtype(np.float32), np.dtype(np.int32), precision=24, width=16, tag_bits=3, special=6)
FLOAT64 = Grid(np.dtype(np.float64), np.dtype(np.int64), precision=53, width=32, tag_bits=5, special=22)


def grid_for(dtype: np.dtype) -> Grid:
    """The grid for contributions, or of words, of this dtype: that of float64 for 64 bits, else that of float32."""
    return FLOAT64 if dtype.itemsize == 8 else FLOAT32


SPILLED_CAPACITY = 1 << 26
"""The deposits that are counted where the digits of float32 spill."""

BETWEEN = FLOAT32.capacity // 2
"""The deposits after which words are settled: a slot has room for that many and as many again."""


class Digits(NamedTuple):
    """The sums of every element, int32 or int64. All 0: no value, or only zeros.

    Attributes:
      slots: three.
      spills: the spill word of each slot; empty where there are none.
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


def grid_of(backend: Backend, digits: Digits) -> Grid:
    return grid_for(backend.dtype(digits.slots[0]))


def deposit(backend: Backend, grid: Grid, digits: Digits, values: Sequence[Decoded]) -> Digits:
    """Adds numbers, all in one pass over the slots; of digits that spill there is room for `BETWEEN`, once settled."""

    def slot(word: Array, s: int) -> Array:
        tag, added = arriving(backend, grid, word & grid.tag, values, s)
        return backend.where((word & grid.tag) < tag, tag, word) + added

    return Digits(tuple(slot(word, s) for s, word in enumerate(digits.slots)), digits.spills)


def merge(backend: Backend, grid: Grid, a: Digits, b: Digits) -> Digits:
    """Adds two sums: in each slot the higher bin stays, and two equal ones are added. The words are settled."""
    tags = [backend.maximum(x & grid.tag, y & grid.tag) for x, y in zip(a.slots, b.slots, strict=True)]
    left, right = aligned(backend, grid, a, tags), aligned(backend, grid, b, tags)
    return tagged(backend, grid, tags, [x + y for x, y in zip(left, right, strict=True)])


def aligned(backend: Backend, grid: Grid, digits: Digits, tags: Sequence[Array]) -> tuple[Array, ...]:
    """Settled words without their tags, 0 where the slot's tag is not this one."""
    digits, zero = settle(backend, grid, digits), backend.full((), 0, grid.word)
    stays = [(word & grid.tag) == tag for word, tag in zip(digits.slots, tags, strict=True)]
    slots = [word - tag for word, tag in zip(digits.slots, tags, strict=True)]
    words = (*slots, *spilled(backend, grid, digits))
    return tuple(backend.where(stays[i % 3], word, zero) for i, word in enumerate(words))


def tagged(backend: Backend, grid: Grid, tags: Sequence[Array], words: Sequence[Array]) -> Digits:
    """Digits with these tags, settled, from words without: sums above the bits of the tags, and what is spilled."""
    slots, spills = words[:3], words[3:]
    if not spills:
        return Digits(tuple(word + tag for word, tag in zip(slots, tags, strict=True)))
    pairs = [_settled(backend, grid, *each, s) for s, each in enumerate(zip(tags, slots, spills, strict=True))]
    return Digits(tuple(word for word, _ in pairs), tuple(spill for _, spill in pairs))


def settle(backend: Backend, grid: Grid, digits: Digits) -> Digits:
    """Settles the words: carries are propagated, the value stays."""
    if not digits.spills:
        return digits
    tags = [word & grid.tag for word in digits.slots]
    sums = [word - tag for word, tag in zip(digits.slots, tags, strict=True)]
    return tagged(backend, grid, tags, [*sums, *spilled(backend, grid, digits)])


def spilled(backend: Backend, grid: Grid, digits: Digits) -> list[Array]:
    """The digits that the slots have spilled, without tags."""
    zero, pairs = backend.full((), 0, grid.word), zip(digits.slots, digits.spills, strict=bool(digits.spills))
    return [backend.where(((a ^ b) & grid.tag) == 0, backend.shift_right(b, grid.tag_bits), zero) for a, b in pairs]


def _settled(backend: Backend, grid: Grid, tag: Array, total: Array, spilled: Array, s: int) -> tuple[Array, Array]:
    """The two words of slot s with this tag, this sum above the bits of the tag, and what is spilled without a tag."""
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
    """A float's parts."""
    bits = backend.bitcast(x, grid.word)
    magnitude = bits & grid.most
    # Subnormal numbers share the exponent of the smallest normal ones, and have no hidden bit.
    field = backend.maximum((magnitude & grid.infinity) - grid.hidden, backend.full((), 0, grid.word))
    exponent = backend.shift_right(field, grid.precision - 1)
    return Decoded(magnitude, exponent, magnitude - field, backend.shift_right(bits, grid.bits - 1))


def normal(backend: Backend, grid: Grid, magnitude: Array) -> tuple[Array, Array]:
    """Significand and exponent of a float's bits without sign. The leading bit is set, except for zero."""
    tiny = magnitude < grid.hidden
    as_float = backend.bitcast(backend.cast(magnitude, grid.value), grid.word)
    scaled = backend.where(tiny, as_float, magnitude)
    down, one, none = (backend.full((), n, grid.word) for n in (grid.unit + 1, 1, 0))
    exponent = backend.shift_right(scaled, grid.precision - 1) - backend.where(tiny, down, one)
    # Only of zero is the field of the exponent still 0.
    leading = backend.where(scaled < grid.hidden, none, backend.full((), grid.hidden, grid.word))
    return (scaled & (grid.hidden - 1)) | leading, exponent


def arriving(backend: Backend, grid: Grid, kept: Array, values: Sequence[Decoded], s: int) -> tuple[Array, Array]:
    """The addends of slot s, whose tag is ``kept``: the tag of the largest of them, and the sum of the digits in
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
