"""The canonical tree over time: a binary counter of partial states of 1, 2, 4, 8 ... contributions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import resolve
from gradcombine.errors import invalid
from gradcombine.pairwise import fold_levels
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.dtypes import INT32
from gradcombine.reductions.feedback import residuals
from gradcombine.types import Array, BinaryCounter, Leaf, State


def empty(state: State, depth: int) -> BinaryCounter:
    """A counter without contributions, of ``depth`` levels; ``state`` is an empty state of the reduction."""
    if residuals(state):
        raise invalid("order 'sequential' for residuals", "tree")
    backend = resolve(tree.flatten(state)[0])
    return of_levels([state] * depth, backend.full((), 0, INT32))


def of_levels(levels: Sequence[State], filled: Array) -> BinaryCounter:
    """A counter of these levels, lowest first."""
    _, structure, backend = _flatten(levels[0])
    columns = zip(*(tree.flatten_as(structure, state) for state in levels), strict=True)
    return BinaryCounter(tree.unflatten(structure, [backend.stack(column) for column in columns]), filled)


def deeper(reduction: Reduction, counter: BinaryCounter, depth: int) -> BinaryCounter:
    """Adds levels on top, up to ``depth``; only for a counter that has room left in its last level."""
    old = depth_of(counter)
    levels = [*(level(counter, i) for i in range(old)), *[cleared(reduction, counter)] * (depth - old)]
    return of_levels(levels, counter.filled)


def depth_of(counter: BinaryCounter) -> int:
    """The number of levels."""
    leaves, _, backend = _flatten(counter.stacked)
    return backend.shape(leaves[0])[0]


def level(counter: BinaryCounter, i: int | Array) -> State:
    """The partial state of level ``i``."""
    leaves, structure, backend = _flatten(counter.stacked)
    return tree.unflatten(structure, [backend.slice_at(x, i) for x in leaves])


def cleared(reduction: Reduction, counter: BinaryCounter) -> State:
    """The empty state of the levels' shapes."""
    return reduction.clear(level(counter, 0))


def holding(reduction: Reduction, state: State, depth: int) -> BinaryCounter:
    """A counter whose total is ``state``, of any number of contributions: it is the last level."""
    # The other levels are cleared copies of it: if a merged state is replicated, all of the counter is.
    levels = [*[reduction.clear(state)] * (depth - 1), state]
    return of_levels(levels, np.asarray(2 ** (depth - 1), INT32))


def count(reduction: Reduction, counter: BinaryCounter, carry: State) -> BinaryCounter:
    """Adds a contribution: merges the occupied levels below the first free one into the carry, and writes it there.

    Reads the levels in place and writes one of them, so a contribution takes one merge on average, for any number of
    levels. The last level takes all further carries.
    """
    leaves, structure = tree.flatten(counter.stacked)
    carried = tree.flatten_as(structure, carry)
    # A window that was loaded from a file may have NumPy arrays.
    backend = resolve([*leaves, *carried])
    leaves, carried = ([backend.asarray(x) for x in arrays] for arrays in (leaves, carried))
    top = backend.shape(leaves[0])[0] - 1
    # n and n + 1 differ in the trailing ones of n and the zero above them, which is the first free level.
    changed = counter.filled ^ (counter.filled + 1)
    free = _sum(backend, [backend.shift_right(changed, i) & 1 for i in range(1, top + 1)])
    overfull = (free >= top) & (counter.filled >= 2**top)
    merges = backend.where(overfull, free + 1, free)

    def merge_level(i: Array, carried: list[Array], levels: list[Array]) -> list[Array]:
        earlier = tree.unflatten(structure, [backend.slice_at(x, i) for x in levels])
        later = tree.unflatten(structure, carried)
        return tree.flatten_as(structure, reduction.merge(earlier, later))

    carried = backend.repeat(merges, merge_level, carried, leaves, most=top + 1)
    stacked = [backend.update_at(x, free, y) for x, y in zip(leaves, carried, strict=True)]
    return BinaryCounter(tree.unflatten(structure, stacked), counter.filled + 1)


def total(reduction: Reduction, counter: BinaryCounter) -> State:
    """Merges all occupied levels into one partial state."""
    leaves, structure, backend = _flatten(counter.stacked)
    top = backend.shape(leaves[0])[0] - 1
    known = backend.concrete(counter.filled)
    if known is not None:
        filled = int(known)
        occupied = [*(i for i in range(top) if filled >> i & 1), *([top] if filled >= 2**top else [])]
        if not occupied:
            return cleared(reduction, counter)
        return fold_levels(reduction.merge, [level(counter, i) for i in occupied])
    # Traced: loops over the set bits of `occupied`, from the lowest one, which it clears.
    zero, last = backend.full((), 0, INT32), backend.full((), 2**top, INT32)
    occupied = (counter.filled & (2**top - 1)) | backend.where(counter.filled >= 2**top, last, zero)
    lowest = level(counter, _lowest_bit(backend, occupied, top))
    latest = tree.select(backend, occupied == 0, cleared(reduction, counter), lowest)
    others = occupied & (occupied - 1)
    merges = _sum(backend, [backend.shift_right(others, i) & 1 for i in range(top + 1)])

    def merge_lowest(_: Array, carried: list[Array], levels: list[Array]) -> list[Array]:
        remaining, *later = carried
        i = _lowest_bit(backend, remaining, top)
        earlier = tree.unflatten(structure, [backend.slice_at(x, i) for x in levels])
        both = reduction.merge(earlier, tree.unflatten(structure, later))
        return [remaining & (remaining - 1), *tree.flatten_as(structure, both)]

    carried = [others, *tree.flatten_as(structure, latest)]
    _, *merged = backend.repeat(merges, merge_lowest, carried, leaves, most=top)
    return tree.unflatten(structure, merged)


def sum_of_levels(stacked: Array, filled: Array) -> Array:
    """The sum of the occupied levels of an array with a first axis of levels."""
    backend = resolve([stacked, filled])
    top = backend.shape(stacked)[0] - 1
    bits = [*(backend.shift_right(filled, i) & 1 for i in range(top)), backend.cast(filled >= 2**top, INT32)]
    return _sum(backend, [backend.slice_at(stacked, i) * bit for i, bit in enumerate(bits)])


def _lowest_bit(backend: Backend, bits: Array, top: int) -> Array:
    """The index of the lowest set bit; 0 if there is none."""
    lowest = bits & -bits
    return _sum(backend, [backend.cast(lowest >= 2**i, INT32) for i in range(1, top + 1)])


def _sum(backend: Backend, scalars: list[Array]) -> Array:
    return reduce(operator.add, scalars, backend.full((), 0, INT32))


def _flatten(state: State) -> tuple[list[Leaf], tree.Structure, Backend]:
    leaves, structure = tree.flatten(state)
    return leaves, structure, resolve(leaves)
