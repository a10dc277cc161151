"""Converts the states of N replicas to states of M replicas."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from gradcombine.backends.registry import resolve
from gradcombine.errors import MOST, operation, require_equal, require_given, require_integer, require_list
from gradcombine.pairwise import fold_pairwise
from gradcombine.places import binary_counter
from gradcombine.places.time import depth_of, is_begun, position, require_state, require_state_of, whole_window
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.feedback import emptied
from gradcombine.settings import check, valid
from gradcombine.types import AccumulateState, Array, BinaryCounter, Leaf, State


@operation("statefile.resize")
def resize(
    reduction: Reduction, states: Sequence[State], replicas: int, *, every: int | None = None, full: bool = False
) -> list[State]:
    """Converts the states of N replicas to states of M replicas, without losing a contribution.

    The state of rank r goes to rank ``r * M // N``. States that meet there are merged in the canonical order; a replica
    that gets none starts empty.

    A window of ``every`` microbatches on N replicas has ``N * every`` contributions. On M replicas it has
    ``every' = N * every / M`` microbatches (rounded up), and its position becomes ``step' = N * step // M``: it is full
    after ``every' - step'`` more calls. If these calls take more contributions than are missing, give the surplus ones
    weight 0. For example, a window saved after microbatch 3 of 8 on 4 replicas needs ``16 - 6 = 10`` more calls on 2
    replicas, whose 20 contributions are exactly the missing ones.

    Positions are rounded down, as a position does not determine whether a window is full; -1 in place of 0 marks a
    window that has contributions, which a flush applies. Pass ``full`` to keep a full window full: if M does not divide
    ``N * every``, it would otherwise be applied a second time. Microbatches of a `reductions.numbered` reduction need
    their numbers from then on, as the default ones are positions.

    Args:
      reduction: that created the states.
      states: one per replica, by rank: of the reduction, or of `gradcombine.accumulate` and at the same position.
      replicas: M, 1 or more.
      every: for order ``"tree"``, the new window length ``every'`` or ``max_every``, which sizes the binary counter.
        None: follows from the old counter if N / M is a power of two.
      full: whether the windows are full, as ``ready`` of `gradcombine.accumulate` returns.

    Returns:
      M states of the same type, by rank. A state that needed no merge shares the arrays of the one passed in.

    Raises:
      GradCombineError: for an empty list; states at different positions, with different levels, of different types or
        of another reduction; and windows of order ``"tree"`` that need ``every``.

    Bits: `sum` and `mean` in precision ``"exact"``, integers, `min` and `max` end with the bits of an unbroken run, for
    any N and M. Order ``"tree"`` with N / M a power of two: the nodes of each level are merged rank by rank, so the
    windows are still balanced trees: those of M replicas that received, from the highest level down, the contributions
    of each old rank in turn. For any other N and M, and in order ``"sequential"``, the roundings are grouped
    differently.

    To get the bits of N replicas in order ``"tree"``, let M replicas hold N / M states each, and resize when the
    windows are full: for ``every`` a power of two, they are blocks of the canonical tree then. In compiled code,
    positions are compared only if their values are known.

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
    step, index = _position(first.step, is_begun(first), len(parts), count, full), first.index
    if count == len(parts) and every is None:
        return parts
    shift = _log2(len(parts), count)
    old = depth_of(first)
    depth = _depth(old, shift, every)
    if shift is not None and depth == old + shift >= old > 1:
        levels = [_merge_levels(reduction, [part.levels for part in group], first.levels, shift) for group in groups]
    else:
        levels = [_merge_windows(reduction, group, first, depth) for group in groups]
    return [AccumulateState(level, step, index) for level in levels]


def _position(step: Array, begun: Array, old: int, new: int, full: bool) -> Array:
    """``step * old / new``, rounded down, or up for a full window, as its length is; -1 for 0 in a begun window."""
    backend = resolve([step])
    flushed = backend.asarray(step) == MOST  # a window without a length, which was flushed
    if backend.concrete(flushed):
        return step
    number = position(backend, step)
    # Not ``step * old // new``, whose product may overflow.
    scaled = number // new * old + (number % new * old + (new - 1 if full else 0)) // new
    scaled = backend.where(begun & (scaled < 1), scaled * 0 - 1, scaled)
    return scaled if backend.concrete(step) is not None else backend.where(flushed, step, scaled)


def _merge_levels(reduction: Reduction, counters: list[BinaryCounter], like: Leaf, shift: int) -> BinaryCounter:
    """Merges counters level by level: nodes of 2**i contributions from 2**shift replicas form one of 2**(i + shift)."""
    empty = binary_counter.cleared(reduction, like)
    merged = (
        fold_pairwise(reduction.merge, [binary_counter.level(counter, i) for counter in counters])
        for i in range(binary_counter.depth_of(like))
    )
    return binary_counter.of_levels([*[empty] * shift, *merged], like.filled * 2**shift)


def _merge_windows(
    reduction: Reduction, group: list[AccumulateState], like: AccumulateState, depth: int
) -> tuple[State, ...] | BinaryCounter:
    """Merges windows into one state, in the highest level, where it stays until the end of the window."""
    merged = _merged(reduction, [whole_window(reduction, part) for part in group], whole_window(reduction, like))
    if depth == 1:
        return (merged,)
    return binary_counter.holding(reduction, merged, depth)


def _merged(reduction: Reduction, group: list[State], like: State) -> State:
    if group:
        return fold_pairwise(reduction.merge, group)
    return emptied(reduction, like)


def _depth(levels: int, shift: int | None, every: int | None) -> int:
    if every is not None:
        return every.bit_length()
    if levels == 1:
        return 1
    inferred = levels + shift if shift is not None and levels + shift >= 1 else None
    return require_given("every, for order 'tree' where it does not follow from the old window's length", inferred)


def _log2(old: int, new: int) -> int | None:
    """The binary logarithm of ``old / new`` if that is a power of two, else None."""
    numerator, denominator = Fraction(old, new).as_integer_ratio()
    if numerator.bit_count() == denominator.bit_count() == 1:
        return numerator.bit_length() - denominator.bit_length()
    return None


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
