"""The states of N replicas as those of M."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gradcombine.backends.registry import resolve
from gradcombine.errors import MOST, operation, require_equal, require_given, require_integer, require_list
from gradcombine.pairwise import fold_pairwise
from gradcombine.places import binary_counter
from gradcombine.places.time import depth_of, require_state, require_state_of, whole_window
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check, valid
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, State


@operation("statefile.resize")
def resize(
    reduction: Reduction, states: Sequence[State], replicas: int, *, every: int | None = None, full: bool = False
) -> list[State]:
    """The states of N replicas as those of M: every contribution and every weight is in one of them.

    The part of rank r goes to rank ``r * M // N``. Parts that meet there are merged in the canonical order; a replica
    that gets none starts empty.

    A window of ``every`` microbatches on N replicas has ``N * every`` contributions. On M replicas it has
    ``every' = N * every / M`` microbatches (rounded up), and its position becomes ``step' = N * step // M``. So it is
    full after ``every' - step'`` more calls; places that these calls have beyond the contributions that are missing
    take weight 0. Saved after microbatch 3 of 8 on 4 replicas, it needs ``16 - 6 = 10`` more calls on 2 replicas, and
    none of their 20 places is left over.

    Positions are rounded down, as a position alone does not tell whether a window is full. One that is full stays so
    with ``full``: what has been applied would otherwise be so again, where M does not divide ``N * every``.

    Args:
      reduction: the one that made the states.
      states: one per replica, by rank: of the reduction, or of `gradcombine.accumulate`, all at the same position.
      replicas: M, 1 or more.
      every: the window length ``every'`` of an accumulator of order ``"tree"`` that goes on, or its ``max_every``; it
        sizes the binary counter. None: as follows from the old one, where N / M is a power of two.
      full: whether the windows are, as `gradcombine.accumulate`'s ``ready`` tells.

    Returns:
      M states of the same kind, by rank. One that had no part to merge is made of the arrays that were passed in.

    Raises:
      GradCombineError: for no states, states at different positions or with different levels, of different kinds or of
        another reduction, and for windows of order ``"tree"`` that need ``every``.

    Bits: `sum` and `mean` of precision ``"exact"``, integers, `min` and `max` end with the bits of a run that was never
    broken, for any N and M. Order ``"tree"`` with N / M a power of two: the nodes of one level are merged rank by rank,
    so the windows are still balanced trees: those of M replicas that had, level by level from the highest, the
    contributions of each old rank in turn. With any other N and M, and in order ``"sequential"``, the roundings are
    grouped anew.

    To end with the bits of the N replicas in order ``"tree"``, let M replicas hold N / M states each, and resize when
    the windows are full: they are blocks of the canonical tree then, where ``every`` is a power of two. As all of this
    may be done inside of compiled code, positions are compared only where their values are known.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import reductions, statefile
    >>> mean = reductions.mean()
    >>> old, params = gc.accumulate(mean, every=8), np.float32(0)
    >>> states = [old.update(np.float32(rank), old.init(params), weight=rank) for rank in range(4)]
    >>> left, right = statefile.resize(mean, states, 2)
    >>> int(left.step), float(old.value(left)), float(old.value(right))
    (2, 1.0, 2.5999999046325684)
    """
    check(reduction=reduction, full=full)
    parts = require_list("a list of states, one per replica", states)
    count = valid("replicas", replicas)
    if every is not None:
        require_integer("a window length of 1 or more", every)
    for part in parts:
        require_state_of(reduction, part)
    groups: list[list[State]] = [[] for _ in range(count)]
    for rank, part in enumerate(parts):
        groups[rank * count // len(parts)].append(part)
    if not any(isinstance(part, AccumulateState) for part in parts):
        return [_merged(reduction, group, parts[0]) for group in groups]
    _require_alike(parts)
    first = parts[0]
    step, index = _position(first.step, len(parts), count, full), first.index
    if count == len(parts) and every is None:
        return parts
    shift = _power(len(parts), count)
    old = depth_of(first)
    depth = _depth(old, shift, every)
    if shift is not None and depth == old + shift >= old > 1:
        levels = [_level_by_level(reduction, [part.levels for part in group], first.levels, shift) for group in groups]
    else:
        levels = [_on_top(reduction, group, first, depth) for group in groups]
    return [AccumulateState(level, step, index) for level in levels]


def _position(step: Array, old: int, new: int, full: bool) -> Array:
    """``step * old / new``, rounded down; of a full window rounded up, as its length is."""
    backend = resolve([step])
    without_end = backend.asarray(step) == MOST  # a window that a flush alone ends, and has ended
    if backend.concrete(without_end):
        return step
    moved = step // new * old + (step % new * old + (new - 1 if full else 0)) // new
    return moved if backend.concrete(step) is not None else backend.where(without_end, step, moved)


def _level_by_level(reduction: Reduction, counters: list[BinaryCounter], like: Leaf, shift: int) -> BinaryCounter:
    """A node of 2**i contributions from each of 2**shift replicas is one of 2**(i + shift)."""
    empty = binary_counter.cleared(reduction, like)
    merged = (
        fold_pairwise(reduction.merge, [binary_counter.level(counter, i) for counter in counters])
        for i in range(binary_counter.depth_of(like))
    )
    return binary_counter.of_levels(reduction, [*[empty] * shift, *merged], like.filled * 2**shift)


def _on_top(
    reduction: Reduction, group: list[AccumulateState], like: AccumulateState, depth: int
) -> tuple[State, ...] | BinaryCounter:
    """Whole windows in the highest level, where they stay until the end."""
    merged = _merged(reduction, [whole_window(reduction, part) for part in group], whole_window(reduction, like))
    if depth == 1:
        return (merged,)
    return binary_counter.holding(reduction, merged, depth)


def _merged(reduction: Reduction, group: list[State], like: State) -> State:
    if group:
        return fold_pairwise(reduction.merge, group)
    return reduction.clear(reduction.clear(like))  # twice: `fed_back` begins a window with what the last one left


def _depth(levels: int, shift: int | None, every: int | None) -> int:
    if every is not None:
        return every.bit_length()
    if levels == 1:
        return 1
    follows = levels + shift if shift is not None and levels + shift >= 1 else None
    return require_given("every, for order 'tree' where it does not follow from the old window's length", follows)


def _power(old: int, new: int) -> int | None:
    """The logarithm of ``old / new``, where that is a power of two."""
    over, under = Fraction(old, new).as_integer_ratio()
    return over.bit_length() - under.bit_length() if over.bit_count() == under.bit_count() == 1 else None


def _require_alike(states: list[AccumulateState]) -> None:
    for state in states:
        require_state(state)
        require_equal("{} levels on every replica", depth_of(states[0]), depth_of(state))
    backend = resolve([position for state in states for position in (state.step, state.index)])
    for name in ("step", "index"):
        known = [backend.concrete(getattr(state, name)) for state in states]
        for value in known:
            if known[0] is not None and value is not None:
                require_equal("{} on every replica", int(known[0]), int(value), f".{name}")
