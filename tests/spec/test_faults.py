"""All replicas detect, name and handle a replica's faults identically."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError, faults, reductions
from gradcombine.reductions import Numbered
from gradcombine.verify.check.laws import run_replicas
from tests.spec import modes
from tests.spec.selection import among

COUNT = 8
MEAN = reductions.numbered(reductions.mean(), COUNT)


def replica(rank: int, **changed: Any) -> dict[str, Any]:
    """The data of a replica without faults after two contributions."""
    own = {
        "grads": {"b": np.int32(7), "v": np.float32([1, 2]), "w": np.float32([rank, -rank])},
        "params": {"w": np.float32([[1, -0.0], [2, 3]]), "z": np.float32(0)},
        "numbers": np.int32([2 * rank, 2 * rank + 1]),
        "behind": np.int32(0),
    }
    return own | changed


def program(env: modes.Env, data: Any, order: Any, drop: bool) -> Any:
    acc = gc.accumulate(MEAN, every=2, order=order)
    state = acc.init(data["grads"]["w"])
    for i in range(2):
        state = acc.update(Numbered(data["grads"]["w"], data["numbers"][i]), state)
    state = state._replace(step=state.step - data["behind"])
    found = faults.find(env.collective, data["grads"], window=state, twins=data["params"])
    kept = faults.drop(MEAN, state, found) if drop else state
    merged = gc.merge_replicas(MEAN, kept, env.collective)
    return found, acc.value(merged), kept.step


W = {"b": np.int32(7), "v": np.float32([1, 2]), "w": np.float32([np.inf, 0])}
V = {"b": np.int32(7), "v": np.float32([1, np.nan]), "w": np.float32([np.nan, -np.inf])}
FLIPPED = {"w": np.float32([[1, 0.0], [2, 3]]), "z": np.float32(0)}
CASES = {
    "none": ({}, {}, ""),
    "nan": ({2: {"grads": V}}, {2: {1: 2, 2: 3}}, r"replica 2: NaN in \['v'\], an infinity in \['w'\]$"),
    "infinity": ({0: {"grads": W}}, {0: {2: 3}}, r"replica 0: an infinity in \['w'\]$"),
    "stale": ({3: {"behind": np.int32(1)}}, {3: {3: 1}}, "replica 3: a window that is behind the others'$"),
    "doubled": (
        {1: {"numbers": np.int32([2, 0])}},
        {0: {4: 1}, 1: {4: 1}},
        "replica 0: a microbatch that .*; replica 1: a microbatch that ",
    ),
    "differs": ({1: {"params": FLIPPED}}, {1: {5: 1}}, "replica 1: a copy that differs from those of most replicas$"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", among(("jax_vmap",), modes.EXCHANGING))
def test_each_fault_is_named_by_replica_on_all_of_them(name: str, case: str) -> None:
    changed, expected, message = CASES[case]
    data = [replica(rank, **changed.get(rank, {})) for rank in range(4)]
    table = np.zeros((4, 6), np.int32)
    for rank, row in expected.items():
        for column, code in row.items():
            table[rank, column] = code
    for rank, (found, _, _) in enumerate(modes.get(name).run(_program("sequential", False), data)):
        assert np.asarray(found.table).tolist() == table.tolist()
        assert (bool(found.found), bool(found.own)) == (bool(expected), rank in expected)
        assert (int(found.index), int(found.step)) == (0, 2)
        if expected:
            with pytest.raises(GradCombineError, match=message):
                faults.require_none(found, data[0]["grads"])
        else:
            faults.require_none(found, data[0]["grads"])


@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", among(("jax_vmap",), modes.EXCHANGING))
def test_a_dropped_replica_counts_nothing_and_is_in_step_again(name: str, order: str) -> None:
    data = [replica(rank) for rank in range(4)]
    data[2] = replica(2, grads=V)
    data[3] = replica(3, behind=np.int32(1))
    for _, value, step in modes.get(name).run(_program(order, True), data):
        # The mean of replicas 0 and 1, with two contributions each.
        assert np.asarray(value).tolist() == [0.5, -0.5]
        assert int(step) == 2


_PROGRAMS = {(o, drop): partial(program, order=o, drop=drop) for o in ("sequential", "tree") for drop in (False, True)}


def _program(order: str, drop: bool) -> Any:
    """Cached: a mode compiles each program object once."""
    return _PROGRAMS[order, drop]


class Others(type(gc.LOCAL)):  # type: ignore[misc]
    """Two or three replicas whose other members first send these values, then their findings."""

    def __init__(self, *others: Any) -> None:
        self.others, self.gathered = others, 0

    def size(self) -> int:
        return 1 + len(self.others)

    def all_gather(self, arrays: Any) -> Any:
        self.gathered += 1
        return [np.stack([x, *(other(x, self.gathered) for other in self.others)]) for x in arrays]


def sends(**columns: int) -> Any:
    at = {"structure": 0, "index": 1, "step": 2, "copy": 3}

    def change(values: Any, exchange: int) -> Any:
        changed = values.copy() if exchange == 1 else values * 0
        for name, value in columns.items() if exchange == 1 else ():
            changed[at[name]] = value
        return changed

    return change


def test_the_majority_decides_and_of_two_neither_is_right() -> None:
    params = {"w": np.float32([1, 2])}
    same, other = sends(), sends(copy=5)
    assert faults.find(Others(same, same), twins=params).table[0].tolist() == [0] * 6
    assert faults.find(Others(same, other), twins=params).table[0].tolist() == [0] * 6
    assert faults.find(Others(other, other), twins=params).table[0].tolist() == [0, 0, 0, 0, 0, 1]
    assert faults.find(Others(other), twins=params).table[0].tolist() == [0, 0, 0, 0, 0, 1]
    wrong = sends(structure=5)
    assert faults.find(Others(wrong, wrong), params).table[0].tolist() == [1, 0, 0, 0, 0, 0]


ONE, TWO = np.float32([1, 2]), np.float32([3, 4])


class Point(NamedTuple):
    x: Any
    y: Any


@pytest.mark.parametrize(
    ("others", "own"),
    [
        ([ONE, TWO], (ONE, TWO)),
        ({"a": [ONE, TWO]}, {"a": (ONE, TWO)}),
        ({"a": ONE, "b": []}, {"a": ONE, "b": {}}),
        ({"a": ONE, "b": ()}, {"a": ONE}),
        ({"a": ONE, "b": None}, {"a": ONE, "b": ()}),
        (Point(ONE, TWO), [ONE, TWO]),
        (ONE, [ONE]),
        (ONE, ONE.astype(np.float64)),
        (ONE, ONE[:1]),
        (ONE, None),
    ],
)
@pytest.mark.parametrize("part", ["values", "twins"])
def test_another_structure_is_a_fault_of_the_one_that_has_it(others: Any, own: Any, part: str) -> None:
    def look(rank: int, over: Any) -> Any:
        return faults.find(over, **{part: own if rank == 1 else others}).table[:, 0].tolist()

    assert run_replicas(3, look) == [[0, 1, 0]] * 3


def test_the_furthest_window_is_that_of_the_last_index_first() -> None:
    acc = gc.accumulate(reductions.sum(), 9)
    state = acc.init(np.float32(0))._replace(step=np.int32(5), index=np.int32(1))
    found = faults.find(Others(sends(index=2, step=3), sends(index=2, step=1)), window=state)
    assert (int(found.index), int(found.step), found.table[0].tolist()) == (2, 3, [0, 0, 0, 1, 0, 0])
    dropped = faults.drop(reductions.sum(), state, found)
    assert (int(dropped.index), int(dropped.step)) == (2, 3)
    assert not faults.find(Others(sends(index=0, step=9)), window=state).found


@pytest.mark.parametrize(
    "values", [np.complex64([1j, complex(np.nan, 0)]), np.float64([np.nan]), np.float16([1, np.nan])], ids=str
)
def test_every_floating_dtype_is_looked_at(values: Any) -> None:
    assert faults.find(gc.LOCAL, [None, values]).table.tolist() == [[0, 2, 0, 0, 0, 0]]


def test_what_is_refused() -> None:
    with pytest.raises(GradCombineError, match=r"faults\.find: expected a collective"):
        faults.find("data")  # type: ignore[arg-type]
    with pytest.raises(GradCombineError, match="expected an AccumulateState"):
        faults.find(gc.LOCAL, window=(1, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_window_of_another_reduction_is_not_dropped(order: Any) -> None:
    window = gc.accumulate(gc.reductions.sum(), every=4, order=order).init(np.float32(0))
    with pytest.raises(GradCombineError, match=r"mean: leaf \.levels.*: expected a MeanState, received SumState"):
        faults.drop(gc.reductions.mean(), window, faults.find(gc.LOCAL))


@pytest.mark.parametrize("contributions", [1, 2, 3])
def test_ledgers_in_a_counter_are_those_of_its_occupied_levels(contributions: int) -> None:
    acc = gc.accumulate(MEAN, every=4, order="tree")
    state = acc.init(np.float32(0))
    for number in range(contributions):
        state = acc.update(Numbered(np.float32(1), number), state)
    assert not faults.find(gc.LOCAL, window=state).found
    stacked = state.levels.stacked  # type: ignore[union-attr]
    doubled = state._replace(levels=state.levels._replace(stacked=stacked._replace(counts=stacked.counts * 2)))
    assert faults.find(gc.LOCAL, window=doubled).table.tolist() == [[0, 0, 0, 0, 1, 0]]
