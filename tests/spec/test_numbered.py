"""Ledgers: which microbatches a window holds, over time and replicas, in every mode."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError, ledger, reductions, statefile
from gradcombine.reductions import Numbered
from tests.spec import modes
from tests.spec.programs import rows
from tests.spec.selection import COLLECTIVE, among

COUNT = 8
GRADS = np.float32([[2.0**-k, 1e8 * (-1) ** k] for k in range(COUNT)])
MEAN = reductions.numbered(reductions.mean(), COUNT)


def window(reduction: Any, numbers: Any, order: Any = "sequential", every: int = COUNT) -> Any:
    acc = gc.accumulate(reduction, every, order=order)
    state = acc.init(GRADS[0])
    for number in numbers:
        state = acc.update(Numbered(GRADS[number], number), state, weight=number + 1)
    return state


def over_time(env: modes.Env, data: Any, order: Any) -> Any:
    acc = gc.accumulate(MEAN, every=3, order=order)
    state = acc.init(data["grads"][0])
    for row in rows(data):
        state = acc.update(Numbered(row["grads"], row["number"]), state)
    merged = gc.merge_replicas(MEAN, state, over=env.collective)
    return state, merged, acc.value(state)


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("name", among(COLLECTIVE[:1], modes.EXCHANGING))
def test_counts_of_a_window_and_of_all_replicas(name: str, order: str) -> None:
    # The first three belong to a finished window; the placeholder is in no ledger.
    per_replica = [{"grads": GRADS[:5], "number": np.int32([0, 1, 2, n, -1])} for n in (3, 5, 5, 7)]
    results = modes.get(name).run(partial(over_time, order=order), per_replica)
    assert [ledger.read(own).held for own, _, _ in results] == [(3,), (5,), (5,), (7,)]
    for _, merged, value in results:
        assert ledger.read(merged) == ledger.Ledger((3, 5, 7), (0, 1, 2, 4, 6), (5,))
        assert str(ledger.read(merged)) == "holds 3, 5, 7; misses 0-2, 4, 6; doubles 5"
        plain = gc.combine(reductions.mean(), [GRADS[3], GRADS[4]], order=order)
        assert np.asarray(value).tobytes() == plain.tobytes()


def test_a_list_keeps_the_bits_of_its_values() -> None:
    contributions = [Numbered(g, k) for k, g in enumerate(GRADS)]
    for order in ("sequential", "tree"):
        expected = gc.combine(reductions.mean(), list(GRADS), range(1, COUNT + 1), order=order)
        assert gc.combine(MEAN, contributions, range(1, COUNT + 1), order=order).tobytes() == expected.tobytes()


def test_a_doubled_microbatch_is_named_and_loses_nothing() -> None:
    state = window(MEAN, [0, 1, 2])
    before = ledger.read(state)
    acc = gc.accumulate(MEAN, COUNT)
    with pytest.raises(GradCombineError, match=r"numbered\(mean\): expected each microbatch once, received twice: 1$"):
        acc.update(Numbered(GRADS[1], 1), state)
    assert ledger.read(state) == before
    others = [window(MEAN, numbers).levels[0] for numbers in ([0, 1, 4, 5], [1, 4, 5, 7])]
    with pytest.raises(GradCombineError, match=r"received twice: 1, 4-5$"):
        MEAN.merge(*others)
    with pytest.raises(GradCombineError, match=r"received none of 2-3, 6, several of 1, 4-5$"):
        ledger.require_once(*others)


@pytest.mark.parametrize(
    ("received", "message"),
    [
        (GRADS[0], r"numbered\(mean\): expected Numbered\(value, number\), received ndarray"),
        (Numbered(GRADS[0], 8), r"leaf \.number: expected the number of a microbatch, from 0 to 7, or -1, received 8"),
        (Numbered(GRADS[0], -2), r"received -2"),
        (Numbered(GRADS[0], 1.0), r"leaf \.number: .*received float32 of shape \(\)"),
        (Numbered(GRADS[0], np.int32([1])), r"leaf \.number: .*received int32 of shape \(1,\)"),
        (Numbered(GRADS[0], 2**31), r"leaf \.number: expected the number .*, from 0 to 7, or -1, received 2147483648"),
        (Numbered(GRADS[0], -(10**30)), r"leaf \.number: expected the number .*, from 0 to 7, or -1, received -10"),
        (Numbered(GRADS[0], True), r"leaf \.number: .*received bool"),
        (Numbered(GRADS[0], "1"), r"leaf \.number: "),
    ],
)
def test_refused_contributions(received: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        gc.accumulate(MEAN, COUNT).update(received, window(MEAN, []))


def test_a_ledger_of_another_length_is_refused(tmp_path: Any) -> None:
    """The number of microbatches in a window changes with ``every`` or the number of replicas."""
    state = window(MEAN, [0, 1])
    other = reductions.numbered(reductions.mean(), 16)
    with pytest.raises(GradCombineError, match=r"\.counts.*ledger of 16 microbatches, received int32 of shape \(8,\)"):
        gc.accumulate(other, 16).update(Numbered(GRADS[0], 2), state)
    path = tmp_path / "window.npz"
    statefile.save(path, MEAN, state)
    assert ledger.read(statefile.load(path, MEAN, like=GRADS[0])) == ledger.read(state)
    with pytest.raises(GradCombineError, match=r"microbatches=16\), received .*microbatches=8\)"):
        statefile.load(path, other, like=GRADS[0])
    with pytest.raises(GradCombineError, match="expected states of 'mean', received states of 'numbered"):
        statefile.load(path, reductions.mean(), like=GRADS[0])
    with pytest.raises(GradCombineError, match=r"ledgers of one length, received lengths \[8, 16\]"):
        ledger.read(state, other.init(GRADS[0]))
    with pytest.raises(GradCombineError, match=r"a state of reductions\.numbered"):
        ledger.read(reductions.mean().init(GRADS[0]))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_what_is_missing_is_dealt_and_completes_the_window(replicas: int) -> None:
    exact = reductions.numbered(reductions.mean("exact"), COUNT)
    expected = gc.combine(reductions.mean("exact"), list(GRADS), range(1, COUNT + 1))
    saved = [window(exact, [0, 1]), window(exact, [4])]
    parts = statefile.resize(exact, [state.levels[0] for state in saved], replicas)
    for rank, numbers in enumerate(ledger.deal(ledger.read(*parts).missing, replicas)):
        for number in numbers:
            parts[rank] = exact.update(parts[rank], Numbered(GRADS[number], number), number + 1)
    ledger.require_once(*parts)
    (whole,) = statefile.resize(exact, parts, 1)
    assert exact.finalize(whole).tobytes() == expected.tobytes()


def test_dealing_is_even_and_keeps_neighbours_together() -> None:
    for n in range(1, 9):
        for count in range(20):
            dealt = ledger.deal(range(count), n)
            assert [x for part in dealt for x in part] == list(range(count))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    assert ledger.deal([9, 2, 5], 3, held=[[0, 1], [3], []]) == [[], [2], [5, 9]]
    for bad, message in [([1, 1], "several of 1"), ([-1], "received -1"), ([1.5], "received 1.5")]:
        with pytest.raises(GradCombineError, match=message):
            ledger.deal(bad, 2)
    with pytest.raises(GradCombineError, match="several of 3"):
        ledger.deal([3], 1, held=[[3]])
    with pytest.raises(GradCombineError, match="held with 2 lists, one per replica, received 1"):
        ledger.deal([3], 2, held=[[4]])


ASSIGNMENTS = [((3, 1), (), (0, 2), ()), pytest.param(((0, 3), (1,), (2,), ()), marks=pytest.mark.full)]


def held_windows(env: modes.Env, data: Any, assignment: Any, order: Any, precision: Any) -> Any:
    reduction = reductions.numbered(reductions.mean(precision), COUNT)
    acc = gc.accumulate(reduction, every=2, order=order)
    slots = max(map(len, assignment))
    held = []
    for slot in range(slots):
        state = acc.init(data["grads"][0, 0])
        for row in rows(data):
            state = acc.update(Numbered(row["grads"][slot], row["number"][slot]), state, row["weight"][slot])
        held.append(state)
    merged = ledger.merge_held(reduction, held, assignment, env.collective, order)
    return merged, acc.value(merged)


@pytest.mark.parametrize("assignment", ASSIGNMENTS, ids=str)
@pytest.mark.parametrize("precision", ["fast", pytest.param("exact", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", among(("jax_vmap",), modes.EXCHANGING))
def test_logical_replicas_keep_their_bits_wherever_they_are(name: str, precision: str, assignment: Any) -> None:
    order = "tree" if precision == "fast" else "sequential"
    slots = max(map(len, assignment))
    per_replica = []
    for part in assignment:
        logical = [*part, *[None] * (slots - len(part))]
        numbers = np.int32([[-1 if r is None else 2 * r + k for r in logical] for k in range(2)])
        weights = np.where(numbers < 0, 0, numbers + 1).astype(np.float32)
        per_replica.append({"grads": GRADS[np.maximum(numbers, 0)], "number": numbers, "weight": weights})
    program = partial(held_windows, assignment=assignment, order=order, precision=precision)
    expected = gc.combine(reductions.mean(precision), list(GRADS), range(1, COUNT + 1), order="tree")
    for merged, value in modes.get(name).run(program, per_replica):
        ledger.require_once(merged)
        assert np.asarray(value).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ([[0], [1]], "an assignment of 1 replicas, received 2"),
        ([[0, 0]], "each logical replica once, from 0"),
        ([[1, 2]], "each logical replica once, from 0"),
        ([[]], "each logical replica once, from 0"),
        ([[0]], "at most 1 states, as assigned, received 2"),
    ],
)
def test_refused_assignments(assignment: Any, message: str) -> None:
    held = [window(MEAN, [0]), window(MEAN, [1])]
    with pytest.raises(GradCombineError, match=message):
        ledger.merge_held(MEAN, held, assignment, gc.LOCAL)


def test_every_partition_of_a_window_merges_to_the_same_ledger() -> None:
    for size in range(COUNT + 1):
        for chosen in list(combinations(range(COUNT), size))[:5]:
            rest = [k for k in range(COUNT) if k not in chosen]
            merged = MEAN.merge(window(MEAN, chosen).levels[0], window(MEAN, rest).levels[0])
            ledger.require_once(merged)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "number"), [("int64", 2**32), ("int64", 2**32 + 1), ("int64", -(2**32)), ("uint32", 2**31)]
)
def test_a_traced_number_does_not_wrap_around(compiled: bool, dtype: str, number: int) -> None:
    import tensorflow as tf

    @tf.function(jit_compile=compiled)
    def counts(number: Any) -> Any:
        return MEAN.update(MEAN.init(GRADS[0]), Numbered(GRADS[0], number)).counts

    assert counts(tf.constant(number, dtype)).numpy().sum() == 0
    assert counts(tf.constant(3, dtype)).numpy().tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
