"""N replicas become M: nothing is lost, and where documented the bits are those of an unbroken run."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.pairwise import fold_pairwise
from gradcombine.places.time import whole_window
from gradcombine.places.window import Window
from gradcombine.settings import UNTIL_FLUSH
from tests.spec.test_moments import bound, columns, true_moments
from tests.statefile.states import contents

EVERY = 8
ORDERS = ("sequential", "tree")
COUNTS = st.integers(1, 6)
Number = tuple[int, int]
"""A contribution: its rank and its microbatch in the unbroken run."""


def rounding(number: Number) -> Any:
    """Values of many magnitudes, for which nearly every addition rounds."""
    rng = np.random.default_rng(number)
    return np.float32(rng.normal(size=3) * 10.0 ** rng.integers(-3, 4, 3))


def whole(number: Number) -> Any:
    """Small integers, for which no addition rounds."""
    return np.float32(np.random.default_rng(number).integers(-50, 50, 3))


def binary(number: Number) -> Any:
    """Powers of two of either sign, for which no multiplication rounds."""
    return np.float32(2.0) ** np.random.default_rng(number).integers(-1, 2, 3) * np.float32(1 - 2 * (number[1] % 2))


def integers(number: Number) -> Any:
    return whole(number).astype(np.int32) * 10**8


def weight(number: Number) -> int:
    return (number[0] + 2 * number[1]) % 4


UNGROUPED: dict[str, tuple[gc.Reduction, Any]] = {
    "exact sum": (reductions.sum("exact"), rounding),
    "exact mean": (reductions.mean("exact"), rounding),
    "min": (reductions.min(), rounding),
    "max": (reductions.max(), rounding),
    "integer sum": (reductions.sum(), integers),
    "sum of whole numbers": (reductions.sum(), whole),
    "mean of whole numbers": (reductions.mean(), whole),
    "compensated mean": (reductions.mean("compensated"), whole),
    "product of powers of two": (reductions.product(), binary),
}
"""Combinations whose bits are independent of the grouping."""


def feed(reduction: gc.Reduction, value: Any, states: list[Any], numbers: list[list[Number]], **settings: Any) -> Any:
    """Feeds replica i the contributions numbers[i], then weight 0 until all windows are full."""
    acc = gc.accumulate(reduction, **settings)
    calls = 0
    while not bool(acc.ready(states[0])):
        for i, state in enumerate(states):
            own = numbers[i][calls] if calls < len(numbers[i]) else None
            fed = np.full_like(value((0, 0)), -1) if own is None else value(own)
            states[i] = acc.update(fed, state, 0 if own is None else weight(own))
        calls += 1
    assert all(len(own) <= calls for own in numbers)
    return fold_pairwise(reduction.merge, [whole_window(reduction, state) for state in states])


def started(reduction: gc.Reduction, value: Any, replicas: int, step: int, order: Any) -> list[Any]:
    acc = gc.accumulate(reduction, EVERY, order=order)
    states = [acc.init(value((0, 0))) for _ in range(replicas)]
    for k in range(step):
        states = [acc.update(value((rank, k)), state, weight((rank, k))) for rank, state in enumerate(states)]
    return states


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full) if x == "exact mean" else x for x in UNGROUPED]
)
@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=6)
@given(old=COUNTS, new=COUNTS, step=st.integers(0, EVERY))
def test_bits_that_no_grouping_can_change(name: str, order: Any, old: int, new: int, step: int) -> None:
    reduction, value = UNGROUPED[name]
    every = math.ceil(old * EVERY / new)
    before = started(reduction, value, old, step, order)
    after = statefile.resize(reduction, before, new, every=every if order == "tree" else None)
    assert len(after) == new
    rest = [(rank, k) for k in range(step, EVERY) for rank in range(old)]
    merged = feed(reduction, value, after, [rest[i::new] for i in range(new)], every=every, order=order)
    numbers = [(rank, k) for rank in range(old) for k in range(EVERY)]
    expected = gc.combine(reduction, map(value, numbers), map(weight, numbers))
    assert contents(reduction.finalize(merged)) == contents(expected)
    assert int(merged.count) == sum(weight(number) > 0 for number in numbers)


@settings(max_examples=12)
@given(old=COUNTS, new=COUNTS, step=st.integers(0, EVERY))
def test_moments_stay_within_their_bound(old: int, new: int, step: int) -> None:
    """The mean of integers has the exact bits; the variance keeps the error bound of `reductions.moments`."""
    moments, every = reductions.moments(), math.ceil(old * EVERY / new)
    after = statefile.resize(moments, started(moments, whole, old, step, "sequential"), new)
    rest = [(rank, k) for k in range(step, EVERY) for rank in range(old)]
    result = moments.finalize(feed(moments, whole, after, [rest[i::new] for i in range(new)], every=every))
    numbers = [(rank, k) for rank in range(old) for k in range(EVERY)]
    weights = np.float32([weight(number) for number in numbers])
    for i, terms in enumerate(columns(np.stack([whole(number) for number in numbers]), weights)):
        mean, variance = true_moments(terms)
        assert result.mean[i] == np.float32(float(mean))
        assert abs(Fraction(float(result.variance[i])) - variance) <= bound(terms)


def by_levels(ranks: range, step: int) -> list[Number]:
    """The contributions of these ranks so far: by level of the binary counters from the highest, then by rank."""
    numbers, done = [], 0
    for size in (8, 4, 2, 1):
        if step & size:
            numbers += [(rank, k) for rank in ranks for k in range(done, done + size)]
            done += size
    return numbers


SHRUNK = [(2, 1), (4, 2), (4, 1), (8, 2), (3, 3), (6, 3)]


@pytest.mark.parametrize(("old", "new"), SHRUNK)
@pytest.mark.parametrize(
    "step", [step if step in (0, 3, 7, 8) else pytest.param(step, marks=pytest.mark.full) for step in range(EVERY + 1)]
)
@pytest.mark.parametrize("name", [pytest.param("sum", marks=pytest.mark.full), "mean"])
def test_tree_order_on_fewer_replicas(name: str, step: int, old: int, new: int) -> None:
    """Has the bits of an unbroken run on the new replicas that begins with the microbatches of the levels in order."""
    reduction, share = getattr(reductions, name)(), old // new
    groups = [range(i * share, (i + 1) * share) for i in range(new)]
    rest = [[(rank, k) for k in range(step, EVERY) for rank in group] for group in groups]
    numbers = [by_levels(group, step) + own for group, own in zip(groups, rest, strict=True)]
    every: dict[str, Any] = {"every": EVERY * share, "order": "tree"}
    unbroken = gc.accumulate(reduction, **every).init(np.zeros(3, np.float32))
    expected = feed(reduction, rounding, [unbroken] * new, numbers, **every)
    after = statefile.resize(reduction, started(reduction, rounding, old, step, "tree"), new)
    assert contents(feed(reduction, rounding, after, rest, **every)) == contents(expected)


@pytest.mark.parametrize("step", range(EVERY))
@pytest.mark.parametrize("new", [1, 2])
def test_parts_that_are_held_until_they_are_full(step: int, new: int) -> None:
    """Order "tree" gives the bits of the old replicas if their windows are merged when they are full."""
    mean, numbers = reductions.mean(), [(rank, k) for rank in range(4) for k in range(EVERY)]
    held = started(mean, rounding, 4, step, "tree")
    acc = gc.accumulate(mean, EVERY, order="tree")
    for k in range(step, EVERY):
        held = [acc.update(rounding((rank, k)), state, weight((rank, k))) for rank, state in enumerate(held)]
    states = statefile.resize(mean, held, new)
    wider = gc.accumulate(mean, EVERY * 4 // new, order="tree")
    assert all(bool(wider.ready(state)) for state in states)
    value = mean.finalize(fold_pairwise(mean.merge, [whole_window(mean, state) for state in states]))
    assert contents(value) == contents(gc.combine(mean, map(rounding, numbers), map(weight, numbers), order="tree"))


POSITIONS = [  # N, M, step, step' and the missing calls of windows of 8
    (4, 2, 3, 6, 10),
    (4, 1, 3, 12, 20),
    (2, 4, 3, 1, 3),
    (2, 4, 4, 2, 2),
    (4, 3, 3, 4, 7),
    (1, 4, 8, 2, 0),
    (2, 3, 8, 6, 0),
    (4, 3, 8, 11, 0),
    (1, 2, 1, -1, 4),  # rounded down to 0, but not empty
    (2, 5, 2, -1, 4),
    (4, 2, 0, 0, 16),
    (4, 4, 5, 5, 3),
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("old", "new", "step", "position", "calls"), POSITIONS)
def test_positions(old: int, new: int, step: int, position: int, calls: int, order: Any) -> None:
    mean, every = reductions.mean(), math.ceil(old * EVERY / new)
    states = [state._replace(index=np.int32(7)) for state in started(mean, whole, old, step, order)]
    acc = gc.accumulate(mean, every, order=order)
    length = every if order == "tree" else None
    for state in statefile.resize(mean, states, new, every=length, full=step == EVERY):
        assert (int(state.step), int(state.index)) == (position, 7)
        for k in range(calls):
            assert not bool(acc.ready(state))
            state = acc.update(whole((0, k)), state)
        assert bool(acc.ready(state))


def test_a_window_that_is_rounded_down_to_position_0_is_not_empty() -> None:
    """A flush applies it, and it stays so after further changes of the number of replicas."""
    mean = reductions.mean()
    window, acc = Window(mean, 2), gc.accumulate(mean, 2)
    held = statefile.resize(mean, [acc.update(np.float32(3), acc.init(np.float32(0)))], 2)
    for states in (held, statefile.resize(mean, held, 3), statefile.resize(mean, statefile.resize(mean, held, 5), 2)):
        for state in states:
            assert int(state.step) == -1 and bool(window.is_partial(state)) and not bool(window.is_full(state))
            assert [int(x) for x in window.next(state)] == [0, 0] and int(acc.restart(state).index) == 1
        value = mean.finalize(fold_pairwise(mean.merge, [whole_window(mean, state) for state in states]))
        assert value == 3


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("old", "new"), [(4, 2), (4, 3), (2, 4), (2, 3)])
def test_a_window_that_a_flush_has_ended_stays_so(old: int, new: int, full: bool) -> None:
    window = Window(reductions.mean(), UNTIL_FLUSH)
    state = window.end(window.contribute(window.init(np.float32(0)), np.float32(1)))
    for resized in statefile.resize(window.reduction, [state] * old, new, full=full):
        assert bool(window.is_full(resized)) and not bool(window.is_partial(resized))


@pytest.mark.parametrize(("old", "new"), [(2, 5), (5, 2), (3, 4), (4, 4), (1, 3)])
def test_the_order_of_ranks_is_kept(old: int, new: int) -> None:
    """Replicas contribute their ranks: `first` and `last` must still give the first and the last."""
    for reduction, expected in ((reductions.first(), 0.0), (reductions.last(), old - 1.0)):
        empty = reduction.init(np.float32(0))
        states = [reduction.update(empty, np.float32(rank)) for rank in range(old)]
        after = statefile.resize(reduction, states, new)
        assert [int(state.count) for state in after].count(0) == max(0, new - old)
        assert float(reduction.finalize(fold_pairwise(reduction.merge, after))) == expected


REFUSED: dict[str, tuple[Any, str]] = {
    "no states": (lambda a, b: ([], 2, {}), "a list of states, one per replica, received an empty list"),
    "one state": (lambda a, b: (a, 2, {}), "a list of states, one per replica, received AccumulateState"),
    "0 replicas": (lambda a, b: ([a], 0, {}), "from 1 to 131072 replicas, received 0"),
    "half a replica": (lambda a, b: ([a], 0.5, {}), "from 1 to 131072 replicas, received 0.5"),
    "every": (lambda a, b: ([a], 2, {"every": 0}), "a window length of 1 or more, received 0"),
    "kinds": (lambda a, b: ([a, b], 1, {}), "expected an AccumulateState, received MeanState"),
    "steps": (lambda a, b: ([a, a._replace(step=np.int32(1))], 1, {}), "leaf .step: expected 0 on every replica"),
    "windows": (lambda a, b: ([a, a._replace(index=np.int32(1))], 1, {}), "leaf .index: expected 0 on every replica"),
    "levels": (
        lambda a, b: ([a, gc.accumulate(reductions.mean(), every=2).init(np.float32(0))], 1, {}),
        "4 levels on every replica, received 1",
    ),
    "stacked": (
        lambda a, b: ([a._replace(step=np.zeros(2, np.int32))], 2, {}),
        "leaf .step: expected int32 of shape ()",
    ),
    "no power of two": (lambda a, b: ([a] * 3, 2, {}), "expected every, for order 'tree'"),
    "too many": (lambda a, b: ([a], 32, {}), "expected every, for order 'tree'"),
    "another reduction": (lambda a, b: ([reductions.sum().init(np.float32(0))] * 2, 1, {}), "expected a MeanState"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resized(name: str) -> None:
    mean = reductions.mean()
    a = gc.accumulate(mean, EVERY, order="tree").init(np.float32(0))
    states, replicas, options = REFUSED[name][0](a, mean.init(np.float32(0)))
    with pytest.raises(gc.GradCombineError) as caught:
        statefile.resize(mean, states, replicas, **options)
    assert REFUSED[name][1] in str(caught.value)
