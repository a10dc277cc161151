"""Digits with room for more than a word can sum up: each slot has a second word, into which it spills.

A slot that is *settled* keeps 16 bits of its sum; what is above goes into its spill word, in units of ``2**16`` of the
same bin. A carry into the next bin, which is another slot, would lose what that slot drops when its bin rises later:
then the sum would depend on when it happened. This way the two words are one long word, and what holds of a slot holds
of both: so the sum is a function of the multiset whenever the words were settled, and after a merge, which settles
them, each word is.

A spill word has the tag of its bin as well. If the slot's tag is higher, what was spilled has been dropped. So a
deposit touches the slots alone, until there have been `BETWEEN` of them.

In the place of counts of +inf, -inf and NaN a settled slot 0 keeps only whether there were any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradcombine.backends.protocol import Backend
from gradcombine.reductions.exact import digits as plain
from gradcombine.reductions.exact.digits import Decoded, Digits
from gradcombine.reductions.exact.grid import FLOAT32, Grid
from gradcombine.types import Array

CAPACITY = 1 << 26
"""The deposits that are counted."""

BETWEEN = FLOAT32.capacity // 2
"""The deposits after which words are settled: a slot has room for that many and as many again."""


class SpilledDigits(NamedTuple):
    """The three slots of every element, and the spill word of each, int32."""

    in_words = "digits for max_terms above 4096"

    slot0: Array
    slot1: Array
    slot2: Array
    spill0: Array
    spill1: Array
    spill2: Array

    @property
    def slots(self) -> Digits:
        return Digits(*self[:3])


def deposit(backend: Backend, grid: Grid, digits: SpilledDigits, values: Sequence[Decoded]) -> SpilledDigits:
    """Adds numbers, of which a settled sum has room for `BETWEEN`, all in one pass over the slots."""
    return SpilledDigits(*plain.deposit(backend, grid, digits.slots, values), *digits[3:])


def settle(backend: Backend, grid: Grid, digits: SpilledDigits) -> SpilledDigits:
    """The same sum in settled words."""
    spilled = beside(backend, grid, digits)

    def slot(s: int) -> tuple[Array, Array]:
        tag = digits[s] & grid.tag
        return settled(backend, grid, tag, digits[s] - tag, spilled[s], s)

    return _of(slot)


def beside(backend: Backend, grid: Grid, digits: SpilledDigits) -> list[Array]:
    """What the slots have spilled, without tags."""
    zero = backend.full((), 0, grid.word)
    pairs = zip(digits[:3], digits[3:], strict=True)
    return [backend.where(((a ^ b) & grid.tag) == 0, backend.shift_right(b, grid.tag_bits), zero) for a, b in pairs]


def merge(backend: Backend, grid: Grid, a: SpilledDigits, b: SpilledDigits) -> SpilledDigits:
    """Adds two sums: in each slot the higher bin stays, and two equal ones are added. The words are settled."""
    a, b = settle(backend, grid, a), settle(backend, grid, b)
    zero, lefts, rights = backend.full((), 0, grid.word), beside(backend, grid, a), beside(backend, grid, b)

    def slot(s: int) -> tuple[Array, Array]:
        left, right = a[s] & grid.tag, b[s] & grid.tag
        a_falls, b_falls = left < right, right < left
        total = backend.where(a_falls, zero, a[s] - left) + backend.where(b_falls, zero, b[s] - right)
        spilled = backend.where(a_falls, zero, lefts[s]) + backend.where(b_falls, zero, rights[s])
        return settled(backend, grid, backend.maximum(left, right), total, spilled, s)

    return _of(slot)


def settled(backend: Backend, grid: Grid, tag: Array, total: Array, spilled: Array, s: int) -> tuple[Array, Array]:
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


def _of(slot: Callable[[int], tuple[Array, Array]]) -> SpilledDigits:
    slots, spills = zip(*map(slot, range(3)), strict=True)
    return SpilledDigits(*slots, *spills)
