"""Merges exact sums over replicas by a maximum and a sum of integers, whose bits do not depend on the collective.

The tags of the three slots are functions of the *level*, the index of the lowest bin of the window, which takes one
byte: the tag of slot s is ``(level + 2 - s) // 3``. The replicas exchange the highest level by a maximum. Each then
drops its slots of lower tags, and the remaining ones are summed.

The sum over replicas must fit a word, as the digits of one replica do. A settled word of a replica has one digit per
slot, so `MOST_REPLICAS` is the capacity of the grid; without spilling, the capacity limits the deposits of all replicas
together, and beyond it the result is NaN.

**An all-reduce of few deposits** only needs the result, so each replica finishes a part of the elements, from two words
instead of three slots. The aligned slots are one number of three overlapping digits, which each replica carries into
two words, ``high * 2**low_bits + low`` with ``low >= 0``, before they are summed. The lower word reserves as many bits
for the sum as the number of replicas requires, which the higher word can hold if there are few deposits. If a value is
not finite, the counts of slot 0 replace all digits. The exchange is a maximum of one byte per element, a reduce-scatter
of two words, and an all-gather of the results: 1.75 times the bytes of an all-reduce of floats.
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
"""The largest number of replicas of an exchange."""


def highest(backend: Backend, collective: Collective, sums: Sequence[Digits]) -> list[Array]:
    """The highest level over the replicas of each element of each sum, by one exchange."""
    return collective.all_max([backend.fused(_level, (digits.grid_of(backend, a),), a.slots)[0] for a in sums])


def merged(
    backend: Backend, collective: Collective, sums: Sequence[Digits], tops: Sequence[Array], totals: Totals
) -> tuple[list[Digits], Totals]:
    """Merges the sums of all replicas by one exchange.

    Args:
      collective: at most `MOST_REPLICAS` replicas.
      sums: the accumulators of this replica, and its sum of weights as the last one.
      tops: the `highest` levels of each sum.
      totals: the totals of this replica.

    Returns:
      The merged accumulators and totals.
    """
    grids = [digits.grid_of(backend, a) for a in sums]
    aligned = (
        backend.fused(_aligned, (grid,), [top, *a.words]) for grid, a, top in zip(grids, sums, tops, strict=True)
    )
    counts = [totals.count, *halves(backend, totals.weight.deposits), totals.weight.link]
    received = iter(_sum_with_scalars(backend, collective, [*itertools.chain(*aligned), *counts]))
    merged_sums: list[Digits] = []
    for grid, a, top in zip(grids, sums, tops, strict=True):
        words = [next(received) for _ in a.words]
        merged_sums.append(Digits.of(backend.fused(_tagged, (grid,), [top, *words])))
    count, low, high, link = received
    *accumulators, weight = merged_sums
    return accumulators, Totals(ExactWeight(weight, joined(backend, low, high), link), count)


def _sum_with_scalars(backend: Backend, collective: Collective, arrays: Sequence[Array]) -> list[Array]:
    """Sums arrays over replicas; concatenates scalars by dtype, as some frameworks exchange integers one by one."""
    results = list(arrays)
    not_scalars = [i for i, x in enumerate(arrays) if backend.shape(x)]
    scalars: dict[np.dtype, list[int]] = {}
    for i, x in enumerate(arrays):
        if not backend.shape(x):
            scalars.setdefault(backend.dtype(x), []).append(i)
    vectors = [backend.concat([arrays[i][None] for i in indices]) for indices in scalars.values()]
    received = collective.all_sum([*(arrays[i] for i in not_scalars), *vectors])
    for i, total in zip(not_scalars, received, strict=False):
        results[i] = total
    for indices, vector in zip(scalars.values(), received[len(not_scalars) :], strict=True):
        for position, i in enumerate(indices):
            results[i] = vector[position]
    return results


class Plan(NamedTuple):
    """The format of a leaf's exchange in two words: the grid of its digits, and the bits of the lower word."""

    grid: Grid
    low: int


def plan(backend: Backend, a: Digits, replicas: int, deposits: int) -> Plan | None:
    """The plan for a leaf; None if two words cannot hold the deposits of all replicas together."""
    grid = digits.grid_of(backend, a)
    low = grid.bits - max(1, (replicas - 1).bit_length())
    return Plan(grid, low) if deposits << 3 * grid.width <= 1 << low + grid.bits - 1 else None


def finish(
    backend: Backend,
    collective: Collective,
    leaves: Sequence[tuple[Plan, Digits, Array, np.dtype]],
    divisors: Sequence[Sequence[Array]],
) -> list[Array]:
    """All-reduces sums or means in two words, to the dtype of the results.

    Args:
      leaves: for each leaf, its plan, the accumulator of this replica, the `highest` levels, and the result dtype.
      divisors: for each leaf, the divisor of a mean; empty for a sum.
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
    return (backend.cast(sum(word & grid.tag for word in slots), INT8),)


def _aligned(backend: Backend, grid: Grid, top: Array, *words: Array) -> tuple[Array, ...]:
    return digits.aligned(backend, grid, Digits.of(words), _tags_of(backend, grid, top))


@np.errstate(all="ignore")  # words of too many deposits wrap around, as in any merge
def _tagged(backend: Backend, grid: Grid, top: Array, *words: Array) -> tuple[Array, ...]:
    return digits.tagged(backend, grid, _tags_of(backend, grid, top), words).words


def _tags_of(backend: Backend, grid: Grid, level: Array) -> list[Array]:
    """``(level + 2 - s) // 3`` of each slot by a multiplication, exact for levels below 256."""
    wide = backend.cast(level, grid.word)
    return [backend.shift_right((wide + (2 - s)) * 171, 9) for s in range(3)]


@np.errstate(all="ignore")  # words wrap around on purpose
def _carried(backend: Backend, grid: Grid, low: int, top: Array, *words: Array) -> tuple[Array, Array]:
    """The kernel that carries an accumulator into two words, at the highest level over the replicas, ``top``."""
    tags = _tags_of(backend, grid, top)
    aligned = digits.aligned(backend, grid, Digits.of(words), tags)
    slots = [backend.shift_right(word, grid.tag_bits) for word in aligned[:3]]
    if aligned[3:]:
        slots = [a + backend.shift_left(b, grid.width) for a, b in zip(slots, aligned[3:], strict=True)]
    level, zero = backend.cast(top, grid.word), backend.full((), 0, grid.word)
    # The level is the index of the lowest of the three bins: `lowest` is its slot.
    lowest = level - tags[2] * 3
    is_slot0, is_slot1 = lowest == 0, lowest == 1

    def column(i: int) -> Array:
        """Bin i of the window, from the lowest one."""
        other = backend.where(is_slot1, slots[(i + 1) % 3], slots[(i + 2) % 3])
        return backend.where(is_slot0, slots[i], other)

    special = level == _special(grid)
    bottom, middle, high = backend.where(special, zero, column(0)), backend.where(special, zero, column(1)), column(2)
    middle = middle + backend.shift_right(bottom, grid.width)
    high = high + backend.shift_right(middle, grid.width)
    word = backend.shift_left(middle & grid.digit, grid.width) | (bottom & grid.digit)
    above = backend.shift_left(high, grid.bits - low) + rounding.logical_right(backend, grid, word, low)
    return above, word & ((1 << low) - 1)


def _special(grid: Grid) -> int:
    """The level of values that are not finite, which start a bin of slot 0."""
    return 3 * grid.special - 2


@np.errstate(all="ignore")
def _finished(
    backend: Backend, grid: Grid, low: int, output: np.dtype, top: Array, high: Array, lower: Array, *divisor: Array
) -> tuple[Array]:
    """The kernel that rounds the sums over replicas of the results of `_carried`, divided for a mean."""
    high = high + rounding.logical_right(backend, grid, lower, low)
    lower = (lower & ((1 << low) - 1)) | backend.shift_left(high, low)
    high = backend.shift_right(high, grid.bits - low)
    level = backend.cast(top, grid.word)
    wide = rounding.normalized(backend, grid, [lower, high], level * grid.width + grid.lowest(0))
    counts = backend.shift_left(high, grid.tag_bits) | grid.special
    slot0 = backend.where(level == _special(grid), counts, backend.full((), 0, grid.word))
    return (rounding.finished(backend, grid, wide, slot0, divisor, output),)
