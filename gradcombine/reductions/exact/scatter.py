"""Exact all-reduce of few deposits: each replica finishes its own part of the elements, from two words of digits.

Three aligned slots are one number of three overlapping digits. Each replica carries its own into two words before they
are summed: ``high * 2**low_bits + low``, where ``low`` is not negative. The word of the lower ones has room for as many
of them as there are replicas; what that costs, the higher ones have as long as there are few deposits. Where a value is
not finite, the counts of slot 0 take the place of all digits.

On the wire that is a maximum of one byte an element, a reduce-scatter of two words, and an all-gather of the results:
1.75 times the bytes of one all-reduce of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.reductions.exact import rounding, wire
from gradcombine.reductions.exact.grid import Grid
from gradcombine.reductions.exact.spill import SpilledDigits
from gradcombine.types import Array


class Plan(NamedTuple):
    """How a leaf is exchanged: the grid of its accumulators, and the bits of the lower word."""

    grid: Grid
    low: int


def plan(own: Grid, replicas: int, deposits: int) -> Plan | None:
    """None where two words do not hold so many deposits, those of all replicas together."""
    low = own.bits - max(1, (replicas - 1).bit_length())
    return Plan(own, low) if deposits << 3 * own.width <= 1 << low + own.bits - 1 else None


def finish(
    backend: Backend,
    collective: Collective,
    leaves: Sequence[tuple[Plan, Any, Array, np.dtype]],
    divisors: Sequence[Sequence[Array]],
) -> list[Array]:
    """The finished sums or means over replicas.

    Args:
      backend: of the arrays.
      collective: of the replicas.
      leaves: of each its plan, this replica's accumulator, the highest levels among replicas, and the dtype of results.
      divisors: of each the divisor of a mean; empty for a sum.
    """
    words = [
        word for (own, low), a, top, _ in leaves for word in backend.fused(_carried, (own, type(a), low), [top, *a])
    ]

    def finished(sums: Sequence[Array], tops: Sequence[Array]) -> list[Array]:
        results = []
        for (own, _, _, output), high, low, top, divisor in zip(
            leaves, sums[::2], sums[1::2], tops, divisors, strict=True
        ):
            results += backend.fused(_finished, (*own, output), [top, high, low, *divisor])
        return results

    return collective.of_sums(finished, words, [top for _, _, top, _ in leaves])


@np.errstate(all="ignore")  # words wrap around, as meant
def _carried(backend: Backend, own: Grid, kind: type, low: int, top: Array, *words: Array) -> tuple[Array, Array]:
    """The kernel that makes two words of an accumulator; ``top``: the highest level among replicas."""
    aligned = wire.aligned(backend, own, kind(*words), top)
    slots = [backend.shift_right(word, own.tag_bits) for word in aligned[:3]]
    if kind is SpilledDigits:
        slots = [a + backend.shift_left(b, own.width) for a, b in zip(slots, aligned[3:], strict=True)]
    level, zero = backend.cast(top, own.word), backend.full((), 0, own.word)
    # The lowest of the three bins has the number of the level, and slot s the bins i with i % 3 == s.
    lowest = level - wire.tags_of(backend, own, top)[2] * 3
    first, second = lowest == 0, lowest == 1

    def column(at: int) -> Array:
        digits = backend.where(second, slots[(at + 1) % 3], slots[(at + 2) % 3])
        return backend.where(first, slots[at], digits)

    special = level == _special(own)
    bottom, middle, high = backend.where(special, zero, column(0)), backend.where(special, zero, column(1)), column(2)
    middle = middle + backend.shift_right(bottom, own.width)
    high = high + backend.shift_right(middle, own.width)
    word = backend.shift_left(middle & own.digit, own.width) | (bottom & own.digit)
    above = backend.shift_left(high, own.bits - low) + rounding.logical_right(backend, own, word, low)
    return above, word & ((1 << low) - 1)


def _special(own: Grid) -> int:
    """The level of values that are not finite: they begin the bin of slot 0."""
    return 3 * own.special - 2


@np.errstate(all="ignore")
def _finished(
    backend: Backend, own: Grid, low: int, output: np.dtype, top: Array, high: Array, lower: Array, *divisor: Array
) -> tuple[Array]:
    """The kernel that rounds the sums over replicas of what `_carried` made, divided by the divisor of a mean."""
    high = high + rounding.logical_right(backend, own, lower, low)
    lower = (lower & ((1 << low) - 1)) | backend.shift_left(high, low)
    high = backend.shift_right(high, own.bits - low)
    level = backend.cast(top, own.word)
    wide = rounding.normalised(backend, own, [lower, high], level * own.width + own.lowest(0))
    counts = backend.shift_left(high, own.tag_bits) | own.special
    slot0 = backend.where(level == _special(own), counts, backend.full((), 0, own.word))
    return (rounding.finished(backend, own, wide, slot0, divisor, output),)
