"""How replicas merge exact sums: by a maximum, and then a sum of integers, for which any collective has the same bits.

The tags of the three slots follow the bin of the largest value, each by a maximum: of ``level + 2`` bins that have
begun, slot s has seen ``(level + 2 - s) // 3``. So one byte per element, the *level*, gives all three. Once replicas
know the highest level among them, each drops the slots that are below it, and what is left adds up.

A sum over replicas stays within a word, as the digits of one replica do. Of settled words every replica brings one
digit a slot, so `MOST_REPLICAS` is the grid's capacity; of others the capacity bounds the deposits of all replicas
together, and past it the result is NaN.

**An all-reduce of few deposits** needs the result alone: each replica finishes its own part of the elements, from two
words of digits. Three aligned slots are one number of three overlapping digits. Each replica carries its own into two
words before they are summed: ``high * 2**low_bits + low``, where ``low`` is not negative. The word of the lower ones
has room for as many of them as there are replicas; what that costs, the higher ones have as long as there are few
deposits. Where a value is not finite, the counts of slot 0 take the place of all digits. On the wire that is a maximum
of one byte per element, a reduce-scatter of two words, and an all-gather of the results: 1.75 times the bytes of one
all-reduce of floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.reductions.cell import Totals
from gradcombine.reductions.exact import digits, rounding
from gradcombine.reductions.exact.digits import FLOAT32, Digits, Grid
from gradcombine.reductions.exact.weighted import ExactWeight, halves, joined
from gradcombine.types import Array

INT8 = np.dtype(np.int8)

MOST_REPLICAS = FLOAT32.capacity
"""Of one exchange."""


def highest(backend: Backend, collective: Collective, sums: Sequence[Digits]) -> list[Array]:
    """The highest level among replicas, of each element of each of these sums: one exchange."""
    return collective.all_max([backend.fused(_level, (digits.grid_of(backend, a),), a.slots)[0] for a in sums])


def merged(
    backend: Backend, collective: Collective, sums: Sequence[Digits], tops: Sequence[Array], totals: Totals
) -> tuple[list[Digits], Totals]:
    """The merged sums of all replicas, by one exchange: those of the accumulators, and the totals.

    Args:
      backend: of the arrays.
      collective: of at most `MOST_REPLICAS`.
      sums: this replica's, that of weights last.
      tops: the `highest` levels of each.
      totals: this replica's.
    """
    grids = [digits.grid_of(backend, a) for a in sums]
    aligned = (
        backend.fused(_aligned, (grid,), [top, *a.words]) for grid, a, top in zip(grids, sums, tops, strict=True)
    )
    counts = [totals.count, *halves(backend, totals.weight.deposits), totals.weight.link]
    received = iter(_sum_with_scalars(backend, collective, [*itertools.chain(*aligned), *counts]))
    sums_of_all: list[Digits] = []
    for grid, a, top in zip(grids, sums, tops, strict=True):
        words = [next(received) for _ in a.words]
        sums_of_all.append(Digits.of(backend.fused(_tagged, (grid,), [top, *words])))
    count, low, high, link = received
    *accumulators, weight = sums_of_all
    return accumulators, Totals(ExactWeight(weight, joined(backend, low, high), link), count)


def _sum_with_scalars(backend: Backend, collective: Collective, arrays: Sequence[Array]) -> list[Array]:
    """The sums over replicas. Scalars of a dtype travel together: some frameworks exchange integers one by one."""
    results = list(arrays)
    alone = [i for i, x in enumerate(arrays) if backend.shape(x)]
    together: dict[np.dtype, list[int]] = {}
    for i, x in enumerate(arrays):
        if not backend.shape(x):
            together.setdefault(backend.dtype(x), []).append(i)
    vectors = [backend.concat([arrays[i][None] for i in chosen]) for chosen in together.values()]
    received = collective.all_sum([*(arrays[i] for i in alone), *vectors])
    for i, total in zip(alone, received, strict=False):
        results[i] = total
    for chosen, vector in zip(together.values(), received[len(alone) :], strict=True):
        for at, i in enumerate(chosen):
            results[i] = vector[at]
    return results


class Plan(NamedTuple):
    """How a leaf is exchanged in two words: the grid of its accumulators, and the bits of the lower word."""

    grid: Grid
    low: int


def plan(backend: Backend, a: Digits, replicas: int, deposits: int) -> Plan | None:
    """None where two words do not hold so many deposits, those of all replicas together."""
    grid = digits.grid_of(backend, a)
    low = grid.bits - max(1, (replicas - 1).bit_length())
    return Plan(grid, low) if deposits << 3 * grid.width <= 1 << low + grid.bits - 1 else None


def finish(
    backend: Backend,
    collective: Collective,
    leaves: Sequence[tuple[Plan, Digits, Array, np.dtype]],
    divisors: Sequence[Sequence[Array]],
) -> list[Array]:
    """The finished sums or means over replicas, exchanged in two words.

    Args:
      backend: of the arrays.
      collective: of the replicas.
      leaves: of each its plan, this replica's accumulator, the highest levels among replicas, and the dtype of results.
      divisors: of each the divisor of a mean; empty for a sum.
    """
    words = [word for plan, a, top, _ in leaves for word in backend.fused(_carried, plan, [top, *a.words])]

    def finished(sums: Sequence[Array], tops: Sequence[Array]) -> list[Array]:
        results: list[Array] = []
        for (plan, _, _, output), high, low, top, divisor in zip(
            leaves, sums[::2], sums[1::2], tops, divisors, strict=True
        ):
            results += backend.fused(_finished, (*plan, output), [top, high, low, *divisor])
        return results

    return collective.reduce_scatter_map(finished, words, [top for _, _, top, _ in leaves])


def _level(backend: Backend, grid: Grid, *slots: Array) -> tuple[Array]:
    return (backend.cast(sum(word & grid.tag for word in slots[1:]) + (slots[0] & grid.tag), INT8),)


def _aligned(backend: Backend, grid: Grid, top: Array, *words: Array) -> tuple[Array, ...]:
    return digits.aligned(backend, grid, Digits.of(words), _tags_of(backend, grid, top))


@np.errstate(all="ignore")  # words of too many deposits wrap around, as in any merge
def _tagged(backend: Backend, grid: Grid, top: Array, *words: Array) -> tuple[Array, ...]:
    return digits.tagged(backend, grid, _tags_of(backend, grid, top), words).words


def _tags_of(backend: Backend, grid: Grid, level: Array) -> list[Array]:
    """``(level + 2 - s) // 3`` without a division: exact below 256."""
    wide = backend.cast(level, grid.word)
    return [backend.shift_right((wide + (2 - s)) * 171, 9) for s in range(3)]


@np.errstate(all="ignore")  # words wrap around, as meant
def _carried(backend: Backend, grid: Grid, low: int, top: Array, *words: Array) -> tuple[Array, Array]:
    """The kernel that makes two words of an accumulator; ``top``: the highest level among replicas."""
    tags = _tags_of(backend, grid, top)
    aligned = digits.aligned(backend, grid, Digits.of(words), tags)
    slots = [backend.shift_right(word, grid.tag_bits) for word in aligned[:3]]
    if aligned[3:]:
        slots = [a + backend.shift_left(b, grid.width) for a, b in zip(slots, aligned[3:], strict=True)]
    level, zero = backend.cast(top, grid.word), backend.full((), 0, grid.word)
    # The lowest of the three bins has the number of the level, and slot s the bins i with i % 3 == s.
    lowest = level - tags[2] * 3
    first, second = lowest == 0, lowest == 1

    def column(at: int) -> Array:
        other = backend.where(second, slots[(at + 1) % 3], slots[(at + 2) % 3])
        return backend.where(first, slots[at], other)

    special = level == _special(grid)
    bottom, middle, high = backend.where(special, zero, column(0)), backend.where(special, zero, column(1)), column(2)
    middle = middle + backend.shift_right(bottom, grid.width)
    high = high + backend.shift_right(middle, grid.width)
    word = backend.shift_left(middle & grid.digit, grid.width) | (bottom & grid.digit)
    above = backend.shift_left(high, grid.bits - low) + rounding.logical_right(backend, grid, word, low)
    return above, word & ((1 << low) - 1)


def _special(grid: Grid) -> int:
    """The level of values that are not finite: they begin the bin of slot 0."""
    return 3 * grid.special - 2


@np.errstate(all="ignore")
def _finished(
    backend: Backend, grid: Grid, low: int, output: np.dtype, top: Array, high: Array, lower: Array, *divisor: Array
) -> tuple[Array]:
    """The kernel that rounds the sums over replicas of what `_carried` made, divided by the divisor of a mean."""
    high = high + rounding.logical_right(backend, grid, lower, low)
    lower = (lower & ((1 << low) - 1)) | backend.shift_left(high, low)
    high = backend.shift_right(high, grid.bits - low)
    level = backend.cast(top, grid.word)
    wide = rounding.normalised(backend, grid, [lower, high], level * grid.width + grid.lowest(0))
    counts = backend.shift_left(high, grid.tag_bits) | grid.special
    slot0 = backend.where(level == _special(grid), counts, backend.full((), 0, grid.word))
    return (rounding.finished(backend, grid, wide, slot0, divisor, output),)
