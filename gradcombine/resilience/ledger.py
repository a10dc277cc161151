# pyright: standard
"""Ledgers of the microbatches that windows hold, and how the work of lost replicas is reassigned and merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import resolve
from gradcombine.errors import (
    invalid,
    operation,
    require_equal,
    require_given,
    require_integer,
    require_items,
    require_list,
    shown,
)
from gradcombine.pairwise import fold_pairwise
from gradcombine.places.time import replace_window, whole_window
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.feedback import emptied
from gradcombine.reductions.numbered import NumberedState, ranges
from gradcombine.settings import check, valid
from gradcombine.types import AccumulateState, Array, BinaryCounter, Order, State, Tree

__all__ = ["deal", "merge_held", "read", "require_once"]

Assignment = Sequence[Sequence[int]]
"""For each running replica, by rank, the indices of the logical replicas whose windows it holds."""


class Ledger(NamedTuple):
    """The numbers of the microbatches that states hold; made and described by `read`."""

    held: tuple[int, ...]
    missing: tuple[int, ...]
    doubled: tuple[int, ...]

    def __str__(self) -> str:
        parts = [("holds", self.held), ("misses", self.missing), ("doubles", self.doubled)]
        return "; ".join(f"{verb} {ranges(numbers)}" for verb, numbers in parts if numbers or verb == "holds")


@operation("ledger.read")
def read(*states: State) -> Ledger:
    """Reads the combined ledger of states of a `gradcombine.reductions.numbered` reduction. Not for compiled code.

    Args:
      states: of one training window: states of `gradcombine.accumulate` or of the reduction, or trees that contain
        them, such as the state of an optimizer or a step. A state may be stacked over replicas.

    Returns:
      The numbers of microbatches, in ascending order: ``held`` (counted at least once), ``missing`` (not counted) and
      ``doubled`` (counted more than once). Prints as text.

    Raises:
      GradCombineError: for states without a ledger, ledgers of different lengths, and values that are traced or partly
        in other processes.

    >>> import numpy as np, gradcombine as gc
    >>> mean = gc.reductions.numbered(gc.reductions.mean(), 4)
    >>> empty = mean.init(np.float32(0))
    >>> one, other = (mean.update(empty, gc.reductions.Numbered(np.float32(1), n)) for n in (0, 1))
    >>> print(gc.ledger.read(one, other, other))
    holds 0-1; misses 2-3; doubles 1
    """
    ledgers = [_counts(node, filled) for state in states for node, filled in ledgers_in(state)]
    if not ledgers:
        received = ", ".join(type(state).__name__ for state in states) or "nothing"
        raise invalid("a state of reductions.numbered(...)", received)
    lengths = sorted({counts.shape[-1] for counts in ledgers})
    if len(lengths) > 1:
        raise invalid("ledgers of one length", f"lengths {lengths}")
    counts = np.sum([x.reshape(-1, lengths[0]).sum(0) for x in ledgers], axis=0)
    held, missing, doubled = (np.flatnonzero(x) for x in (counts > 0, counts == 0, counts > 1))
    return Ledger(tuple(held.tolist()), tuple(missing.tolist()), tuple(doubled.tolist()))


@operation("ledger.require_once")
def require_once(*states: State) -> None:
    """Raises unless the states hold each microbatch of their window exactly once.

    Args:
      states: as for `read`: the states of all replicas, or their merged state.

    Raises:
      GradCombineError: names the microbatches that are missing or were counted more than once; also as for `read`.

    >>> import numpy as np, gradcombine as gc
    >>> gc.ledger.require_once(gc.reductions.numbered(gc.reductions.sum(), 3).init(np.float32(0)))
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: ledger.require_once: expected each of 3 microbatches once, received none of 0-2
    """
    ledger = read(*states)
    faults = [("none of", ledger.missing), ("several of", ledger.doubled)]
    if received := ", ".join(f"{how} {ranges(numbers)}" for how, numbers in faults if numbers):
        count = len(ledger.held) + len(ledger.missing)
        raise invalid(f"each of {count} microbatches once", received)


@operation("ledger.deal")
def deal(numbers: Iterable[int], replicas: int, held: Assignment | None = None) -> list[list[int]]:
    """Distributes remaining microbatches, or the logical replicas of lost processes, over the replicas.

    Args:
      numbers: unique numbers of the microbatches or logical replicas.
      replicas: the number of running replicas.
      held: the numbers that each replica already has. Replicas with fewer numbers get more, to balance the totals to
        within one where possible. None: no replica has any.

    Returns:
      For each replica its numbers, in ascending order. Each gets a contiguous block of the sorted numbers; blocks of a
      power of two keep the bits of order ``"tree"`` if nothing is held.

    Raises:
      GradCombineError: for numbers that are negative, duplicated, or already held.

    >>> from gradcombine import ledger
    >>> ledger.deal(range(7), 3)
    [[0, 1, 2], [3, 4], [5, 6]]
    >>> ledger.deal([3], 3, held=[[0], [1], [2]])
    [[3], [], []]
    """
    count = valid("replicas", replicas)
    holders: list[list[int]] = [[]] * count if held is None else _numbers("what each replica holds", held)
    require_equal("held with {} lists, one per replica", count, len(holders))
    (wanted,) = _numbers("numbers to deal", [numbers])
    counts = Counter([*wanted, *chain.from_iterable(holders)])
    if duplicates := [number for number, times in counts.items() if times > 1]:
        raise invalid("each number once", f"several of {ranges(duplicates)}")
    shares, loads = [0] * count, [(len(part), rank) for rank, part in enumerate(holders)]
    heapify(loads)
    for _ in wanted:
        load, rank = loads[0]
        heapreplace(loads, (load + 1, rank))
        shares[rank] += 1
    remaining = iter(sorted(wanted))
    return [list(islice(remaining, share)) for share in shares]


@operation("ledger.merge_held")
def merge_held(
    reduction: Reduction,
    held: Sequence[State],
    assignment: Assignment,
    over: Collective,
    order: Order = "sequential",
) -> State:
    """`gradcombine.merge_replicas` for replicas that hold the windows of several logical replicas.

    The number of logical replicas stays the same throughout a training window, even if processes are lost: each logical
    replica has its own state, held by one of the running replicas. So the update has the bits of an undisturbed run.

    Args:
      reduction: that created the states.
      held: states of the logical replicas that this replica holds, in the order of its list in ``assignment``; states
        of the reduction or of `gradcombine.accumulate`. At least one: pass an empty state if it holds none. A program
        that runs on all replicas passes as many as any replica holds, padded with empty states.
      assignment: for each running replica, by rank, its logical replicas; equal on all replicas and static under jit.
      over, order: as for `gradcombine.merge_replicas`.

    Returns:
      The merged state, of the type of the states, equal on all replicas.

    Raises:
      GradCombineError: for an assignment for another number of replicas, or with missing or duplicate logical replicas;
        for more states than assigned; and as for `gradcombine.merge_replicas`.

    Bits: order ``"tree"``: those of `gradcombine.merge_replicas` over the logical replicas in that order. Every replica
    gathers all states, which takes memory. Order ``"sequential"``: each replica merges its states first.

    >>> import numpy as np, gradcombine as gc
    >>> total = gc.reductions.sum()
    >>> states = [total.update(total.init(np.float32(0)), np.float32(rank)) for rank in range(3)]
    >>> merged = gc.ledger.merge_held(total, [states[2], states[0], states[1]], [[2, 0, 1]], over=gc.LOCAL)
    >>> float(total.finalize(merged))
    3.0
    """
    check(reduction=reduction, order=order, over=over)
    assignment = _numbers("an assignment, a list for each replica", assignment)
    locations = _locations(assignment, over.size())
    states = require_list("a list of states, one per logical replica", held)
    slots = max(1, *map(len, assignment))
    if len(states) > slots:
        raise invalid(f"at most {slots} states, as assigned", len(states))
    windows = [whole_window(reduction, x) if isinstance(x, AccumulateState) else x for x in states]
    windows += [emptied(reduction, windows[0])] * (slots - len(windows))
    if order == "tree":
        merged = _merge_in_logical_order(reduction, windows, locations, over)
    else:
        merged = reduction.all_merge(fold_pairwise(reduction.merge, windows), over, order)
    first = states[0]
    return replace_window(reduction, first, merged) if isinstance(first, AccumulateState) else merged


def _merge_in_logical_order(
    reduction: Reduction, windows: Sequence[State], locations: Sequence[tuple[int, int]], over: Collective
) -> State:
    for window in windows[1:]:
        tree.require_alike(windows[0], window)
    columns = [tree.flatten(window)[0] for window in windows]
    backend = resolve([*chain.from_iterable(columns), over.rank()])
    present = [leaves for leaves in zip(*columns, strict=True) if leaves[0] is not None]
    of_ranks = list(over.of_each_rank([backend.stack(list(map(backend.asarray, leaves))) for leaves in present]))

    def state(rank: int, slot: int) -> State:
        stacks = iter(of_ranks[rank])
        return tree.map(lambda x: None if x is None else next(stacks)[slot], windows[0])

    return fold_pairwise(reduction.merge, [state(*location) for location in locations])


def _numbers(expected: str, parts: Iterable[Iterable[int]]) -> list[list[int]]:
    """Checks that ``parts`` are iterables of non-negative integers; returns them as lists."""
    listed = [require_items(expected, part) for part in require_items(expected, parts)]
    return [[require_integer("numbers of 0 or more", number, lowest=0) for number in part] for part in listed]


def _locations(parts: list[list[int]], size: int) -> list[tuple[int, int]]:
    """Rank and slot of each logical replica."""
    require_equal("an assignment of {} replicas", size, len(parts))
    numbers = [number for part in parts for number in part]
    if sorted(numbers) != list(range(len(numbers))) or not numbers:
        raise invalid("each logical replica once, from 0", shown(parts))
    where = {number: (rank, slot) for rank, part in enumerate(parts) for slot, number in enumerate(part)}
    return [where[number] for number in range(len(numbers))]


def ledgers_in(state: State) -> list[tuple[NumberedState, Array | None]]:
    """All ledgers in a state; inside a `BinaryCounter`, with its ``filled``, which tells the occupied levels."""
    ledgers: list[tuple[NumberedState, Array | None]] = []

    def collect(node: Tree, filled: Array | None) -> bool:
        if isinstance(node, BinaryCounter):
            tree.flatten(node.stacked, lambda inner: collect(inner, node.filled))
            return True
        if isinstance(node, NumberedState):
            ledgers.append((node, filled))
            return True
        return False

    tree.flatten(state, lambda node: collect(node, None))
    return ledgers


def _counts(node: NumberedState, filled: Array | None) -> np.ndarray:
    backend = resolve([node.counts])
    counts = backend.concrete(backend.asarray(node.counts))
    counts = require_given("a ledger with concrete values", counts, "a traced one", ".counts")
    if counts.dtype.kind not in "iu" or counts.ndim < (1 if filled is None else 2) or 0 in counts.shape:
        raise invalid("a ledger of integers, one per microbatch", f"{counts.dtype} of shape {counts.shape}", ".counts")
    if filled is None:
        return counts
    number = np.asarray(resolve([filled]).concrete(filled))  # concrete, as the counts are
    levels = np.arange(counts.shape[-2])
    top = int(levels[-1])
    # A level is occupied if its bit is set; the top level also takes all contributions beyond the counter's range.
    occupied = np.where(levels == top, number[..., None] >= 2**top, number[..., None] >> levels & 1)
    return (counts * occupied[..., None]).sum(-2)
