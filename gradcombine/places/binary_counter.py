"""The canonical tree over time: partial states of 1, 2, 4, 8 ... contributions, counted up like a binary number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import resolve
from gradcombine.pairwise import fold_levels
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import INT32
from gradcombine.types import Array, BinaryCounter, Leaf, State


def empty(reduction: Reduction, state: State, depth: int) -> BinaryCounter:
    """A counter of ``depth`` levels for states like an empty one; nothing is counted."""
    backend = resolve(tree.flatten(state)[0])
    return of_levels(reduction, [state] * depth, backend.full((), 0, INT32))


def of_levels(reduction: Reduction, levels: Sequence[State], filled: Array) -> BinaryCounter:
    """A counter of these levels, lowest first."""
    _, structure, backend = _opened(levels[0])
    columns = zip(*(tree.flatten_as(structure, state) for state in levels), strict=True)
    return BinaryCounter(tree.unflatten(structure, [backend.stack(column) for column in columns]), filled)


def deeper(reduction: Reduction, counter: BinaryCounter, depth: int) -> BinaryCounter:
    """The counter with more levels above its own, of which the last has not been counted on."""
    old = depth_of(counter)
    levels = [*(level(counter, i) for i in range(old)), *[cleared(reduction, counter)] * (depth - old)]
    return of_levels(reduction, levels, counter.filled)


def depth_of(counter: BinaryCounter) -> int:
    """The number of levels."""
    leaves, _, backend = _opened(counter.stacked)
    return backend.shape(leaves[0])[0]


def level(counter: BinaryCounter, i: int | Array) -> State:
    """One level, which exists."""
    leaves, structure, backend = _opened(counter.stacked)
    return tree.unflatten(structure, [backend.slice_at(x, i) for x in leaves])


def cleared(reduction: Reduction, counter: BinaryCounter) -> State:
    """The empty state of the levels' shapes."""
    return reduction.clear(level(counter, 0))


def holding(reduction: Reduction, state: State, depth: int) -> BinaryCounter:
    """A counter that holds this state, for whatever was counted: in the last level, where it stays."""
    # The other levels are made anew: a merged state is the same on all replicas, and so is all of the counter then.
    levels = [*[reduction.clear(state)] * (depth - 1), state]
    return of_levels(reduction, levels, np.asarray(2 ** (depth - 1), INT32))


def count(reduction: Reduction, counter: BinaryCounter, carry: State) -> BinaryCounter:
    """One more contribution: occupied levels are merged into the carry, up to the first that is free.

    Levels are read where they lie, and one of them is written, so a contribution costs one merge on average, whatever
    the number of levels. Past the last level everything is merged there.
    """
    leaves, structure = tree.flatten(counter.stacked)
    carried = tree.flatten_as(structure, carry)
    # A window that was loaded from a file may be NumPy's.
    backend = resolve([*leaves, *carried])
    leaves, carried = ([backend.asarray(x) for x in arrays] for arrays in (leaves, carried))
    top = depth_of(counter) - 1
    # The bits in which n and n + 1 differ are the ones at the end of n, and one more.
    changed = counter.filled ^ (counter.filled + 1)
    place = _sum(backend, [backend.shift_right(changed, i) & 1 for i in range(1, top + 1)])
    overfull = (place >= top) & (counter.filled >= 2**top)
    turns = backend.where(overfull, place + 1, place)

    def merged(i: Array, carried: list[Array], levels: list[Array]) -> list[Array]:
        earlier = tree.unflatten(structure, [backend.slice_at(x, i) for x in levels])
        later = tree.unflatten(structure, carried)
        return tree.flatten_as(structure, reduction.merge(earlier, later))

    carried = backend.repeat(turns, merged, carried, leaves, most=top + 1)
    stacked = [backend.update_at(x, place, y) for x, y in zip(leaves, carried, strict=True)]
    return BinaryCounter(tree.unflatten(structure, stacked), counter.filled + 1)


def total(reduction: Reduction, counter: BinaryCounter) -> State:
    """All that was counted, as one partial state."""
    leaves, structure, backend = _opened(counter.stacked)
    top = depth_of(counter) - 1
    known = backend.concrete(counter.filled)
    if known is not None:
        occupied = [i for i in range(top + 1) if _is_occupied(int(known), i, top)]
        if not occupied:
            return cleared(reduction, counter)
        return fold_levels(reduction.merge, [level(counter, i) for i in occupied])
    zero, last = backend.full((), 0, INT32), backend.full((), 2**top, INT32)
    occupied = (counter.filled & (2**top - 1)) | backend.where(counter.filled >= 2**top, last, zero)
    lowest = level(counter, _lowest_bit(backend, occupied, top))
    latest = tree.select(backend, occupied == 0, cleared(reduction, counter), lowest)
    left = occupied & (occupied - 1)
    turns = _sum(backend, [backend.shift_right(left, i) & 1 for i in range(top + 1)])

    def merged(_: Array, carried: list[Array], levels: list[Array]) -> list[Array]:
        remaining, *later = carried
        at = _lowest_bit(backend, remaining, top)
        earlier = tree.unflatten(structure, [backend.slice_at(x, at) for x in levels])
        both = reduction.merge(earlier, tree.unflatten(structure, later))
        return [remaining & (remaining - 1), *tree.flatten_as(structure, both)]

    carried = [left, *tree.flatten_as(structure, latest)]
    _, *whole = backend.repeat(turns, merged, carried, leaves, most=top)
    return tree.unflatten(structure, whole)


def _is_occupied(filled: int, i: int, top: int) -> bool:
    return filled >= 2**top if i == top else bool(filled >> i & 1)


def _lowest_bit(backend: Backend, bits: Array, top: int) -> Array:
    """The position of the lowest bit that is set, 0 where there is none."""
    alone = bits & -bits
    return _sum(backend, [backend.cast(alone >= 2**i, INT32) for i in range(1, top + 1)])


def _sum(backend: Backend, scalars: list[Array]) -> Array:
    result = backend.full((), 0, INT32)
    for scalar in scalars:
        result = result + scalar
    return result


def _opened(state: State) -> tuple[list[Leaf], tree.Structure, Backend]:
    leaves, structure = tree.flatten(state)
    return leaves, structure, resolve(leaves)
