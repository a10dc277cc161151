"""Digits with room for more than a word can sum up: each slot has a second word, into which it spills.

A slot keeps 16 bits of its sum; what is above goes into its spill word, in units of ``2**16`` of the same bin. A carry
into the next bin, which is another slot, would lose what that slot drops when its bin rises later: then the state would
depend on when it happened. This way the two words are one long word, and what holds of a slot holds of both.

The words are settled after each deposit and merge, so the state is a function of the multiset word for word. In the
place of counts of +inf, -inf and NaN slot 0 keeps only whether there were any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.digits import Digits, arriving, decode
from gradcombine.reductions.grid import Grid
from gradcombine.types import Array

CAPACITY = 1 << 26
"""The deposits that are counted; the words would hold 16 times as many."""


class SpilledDigits(NamedTuple):
    """The three slots of every element, and the spill word of each, int32."""

    slot0: Array
    slot1: Array
    slot2: Array
    spill0: Array
    spill1: Array
    spill2: Array

    @property
    def slots(self) -> Digits:
        return Digits(*self[:3])


def deposit(backend: Backend, grid: Grid, digits: SpilledDigits, values: Sequence[Array]) -> SpilledDigits:
    """Adds floats, fewer than the grid's capacity, all in one pass over the digits."""
    decoded = [decode(backend, grid, x) for x in values]
    zero = backend.full((), 0, grid.word)

    def slot(s: int) -> tuple[Array, Array]:
        kept = digits[s] & grid.tag
        tag, added = arriving(backend, grid, kept, decoded, s)
        rises = kept < tag
        total = backend.where(rises, zero, digits[s] - kept) + added
        spill = backend.where(rises, zero, digits[s + 3])
        return settled(backend, grid, backend.maximum(kept, tag), total, spill, s)

    return _of(slot)


def merge(backend: Backend, grid: Grid, a: SpilledDigits, b: SpilledDigits) -> SpilledDigits:
    """Adds two sums: in each slot the higher bin stays, and two equal ones are added."""
    zero = backend.full((), 0, grid.word)

    def slot(s: int) -> tuple[Array, Array]:
        left, right = a[s] & grid.tag, b[s] & grid.tag
        a_falls, b_falls = left < right, right < left
        total = backend.where(a_falls, zero, a[s] - left) + backend.where(b_falls, zero, b[s] - right)
        spill = backend.where(a_falls, zero, a[s + 3]) + backend.where(b_falls, zero, b[s + 3])
        return settled(backend, grid, backend.maximum(left, right), total, spill, s)

    return _of(slot)


def settled(backend: Backend, grid: Grid, tag: Array, total: Array, spill: Array, s: int) -> tuple[Array, Array]:
    """The two words of slot s with this tag, and this sum above the bits of the tag."""
    word = tag | (total & (grid.digit << grid.tag_bits))
    spill = spill + backend.shift_right(total, grid.width + grid.tag_bits)
    if s > 0:
        return word, spill
    zero, flag, flags = (backend.full((), n << grid.tag_bits, grid.word) for n in (0, 1, grid.negative))
    positive = backend.where((total & ((grid.negative - 1) << grid.tag_bits)) == 0, zero, flag)
    negative = backend.where(total < grid.negative << grid.tag_bits, zero, flags)
    special = tag == grid.special
    return backend.where(special, tag | positive | negative, word), backend.where(special, zero, spill)


def _of(slot: Callable[[int], tuple[Array, Array]]) -> SpilledDigits:
    slots, spills = zip(*map(slot, range(3)), strict=True)
    return SpilledDigits(*slots, *spills)
