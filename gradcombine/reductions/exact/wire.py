"""How replicas merge exact sums: by a maximum, and then a sum of integers, for which any collective has the same bits.

The tags of the three slots follow the bin of the largest value, each by a maximum: of ``level + 2`` bins that have
begun, slot s has seen ``(level + 2 - s) // 3``. So one byte an element, the *level*, tells all three. Once replicas
know the highest level among them, each drops the slots that are below it, and what is left adds up.

A sum over replicas stays within a word, as the digits of one replica do. Of settled words every replica brings one
digit a slot, so `most_replicas` is the grid's capacity; of others the capacity bounds the deposits of all replicas
together, and past it the result is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Backend, Collective
from gradcombine.reductions.cell import Totals
from gradcombine.reductions.exact import grid, spill
from gradcombine.reductions.exact.digits import Digits
from gradcombine.reductions.exact.grid import FLOAT32, Grid
from gradcombine.reductions.exact.spill import SpilledDigits
from gradcombine.reductions.exact.weight import counted, halves, whole
from gradcombine.types import Array

INT8 = np.dtype(np.int8)

MOST_REPLICAS = FLOAT32.capacity
"""Of one exchange."""


def highest(backend: Backend, collective: Collective, sums: Sequence[Any]) -> list[Array]:
    """The highest level among replicas, of each element of each of these `Digits` and `SpilledDigits`: one exchange."""
    return collective.all_max([_fused(backend, _level, a, list(a))[0] for a in sums])


def merged(
    backend: Backend, collective: Collective, sums: Sequence[Any], tops: Sequence[Array], totals: Totals
) -> tuple[list[Any], Totals]:
    """The merged sums of all replicas, by one exchange: those of the accumulators, and the totals.

    Args:
      backend: of the arrays.
      collective: of at most `MOST_REPLICAS`.
      sums: this replica's, that of weights last.
      tops: the `highest` levels of each.
      totals: this replica's.
    """
    arrays = [word for a, top in zip(sums, tops, strict=True) for word in _fused(backend, _aligned, a, [top, *a])]
    counts = [totals.count, *halves(backend, totals.weight.deposits), totals.weight.link]
    received = iter(_sum_with_scalars(backend, collective, [*arrays, *counts]))
    summed = [[next(received) for _ in a] for a in sums]
    joined = (_fused(backend, _joined, a, [top, *words]) for a, top, words in zip(sums, tops, summed, strict=True))
    *accumulators, weight = (type(a)(*words) for a, words in zip(sums, joined, strict=True))
    count, low, high, link = received
    return accumulators, Totals(counted(weight, whole(backend, low, high), link), count)


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


def _fused(backend: Backend, kernel: Any, like: Any, arrays: Sequence[Array]) -> tuple[Array, ...]:
    return backend.fused(kernel, (grid.of(backend.dtype(like.slot0)), type(like)), arrays)


def _level(backend: Backend, own: Grid, kind: type, *words: Array) -> tuple[Array]:
    return (backend.cast(sum(word & own.tag for word in words[1:3]) + (words[0] & own.tag), INT8),)


def _aligned(backend: Backend, own: Grid, kind: type, top: Array, *words: Array) -> list[Array]:
    return aligned(backend, own, kind(*words), top)


def aligned(backend: Backend, own: Grid, digits: Digits | SpilledDigits, top: Array) -> list[Array]:
    """Settled words without their tags, 0 where the slot of another replica is higher."""
    tags, zero, spilled = tags_of(backend, own, top), backend.full((), 0, own.word), []
    if isinstance(digits, SpilledDigits):
        digits = spill.settle(backend, own, digits)
        spilled = spill.beside(backend, own, digits)
    stays = [(word & own.tag) == tag for word, tag in zip(digits[:3], tags, strict=True)]
    slots = [word - tag for word, tag in zip(digits[:3], tags, strict=True)]
    return [backend.where(stays[i % 3], word, zero) for i, word in enumerate((*slots, *spilled))]


@np.errstate(all="ignore")  # words of too many deposits wrap around, as in any merge
def _joined(backend: Backend, own: Grid, kind: type, top: Array, *words: Array) -> Sequence[Array]:
    tags = tags_of(backend, own, top)
    if kind is Digits:
        return [word + tag for word, tag in zip(words, tags, strict=True)]
    pairs = [spill.settled(backend, own, tags[s], words[s], words[s + 3], s) for s in range(3)]
    return SpilledDigits(*(word for word, _ in pairs), *(spilled for _, spilled in pairs))


def tags_of(backend: Backend, own: Grid, level: Array) -> list[Array]:
    """``(level + 2 - s) // 3`` without a division: exact below 256."""
    wide = backend.cast(level, own.word)
    return [backend.shift_right((wide + (2 - s)) * 171, 9) for s in range(3)]
