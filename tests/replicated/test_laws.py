"""Laws for any values and any number of replicas. Values are integers, so that sums are exact."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine import replicated
from gradcombine.replicated import ReplicatedState, ReplicatedVariable

OPS = ("assign", "assign_add", "assign_sub")

replicas_and_writes = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(
            st.tuples(st.sampled_from(OPS), st.lists(st.integers(-99, 99), min_size=n, max_size=n)),
            max_size=6,
        ),
    )
)


def _written(variable: ReplicatedVariable, start: int, writes: list[tuple[str, list[int]]]) -> ReplicatedState:
    state = variable.init(np.int32(start))
    for op, values in writes:
        state = getattr(variable, op)(state, np.asarray(values, np.int32))
    return state


@given(replicas_and_writes, st.integers(-99, 99), st.sampled_from(["sum", "only_first_replica"]))
def test_on_write_leaves_all_components_equal(drawn: tuple, start: int, aggregation: str) -> None:
    replicas, writes = drawn
    variable = replicated.variable(aggregation, "on_write", over=replicated.stacked(replicas))
    state = _written(variable, start, writes)
    assert set(state.value.tolist()) == {int(variable.cross.read(state))}


@given(replicas_and_writes)
def test_a_sum_is_the_same_when_taken_at_the_read(drawn: tuple) -> None:
    """Holds for any writes to a variable of zeros: aggregation by SUM is linear."""
    replicas, writes = drawn
    over = replicated.stacked(replicas)
    early, late = (replicated.variable("sum", when, over=over) for when in ("on_write", "on_read"))
    assert early.cross.read(_written(early, 0, writes)) == late.cross.read(_written(late, 0, writes))


@given(replicas_and_writes, st.integers(-99, 99))
def test_the_first_replica_alone_is_the_first_of_many(drawn: tuple, start: int) -> None:
    replicas, writes = drawn
    many = replicated.variable("only_first_replica", "on_read", over=replicated.stacked(replicas))
    one = replicated.variable("sum", over=gc.LOCAL)
    alone = _written(one, start, [(op, values[0]) for op, values in writes])
    assert many.cross.read(_written(many, start, writes)) == one.read(alone)


@given(replicas_and_writes, st.integers(-99, 99))
def test_what_is_assigned_is_what_is_read(drawn: tuple, value: int) -> None:
    replicas, writes = drawn
    for aggregation in ("sum", "only_first_replica"):
        for when in ("on_write", "on_read"):
            variable = replicated.variable(aggregation, when, over=replicated.stacked(replicas))
            state = variable.cross.assign(_written(variable, 1, writes), np.int32(value))
            assert variable.cross.read(state) == value
