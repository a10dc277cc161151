"""The record of variables that have had a gradient is part of the aggregation's state, decided at run time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.horovod import AllReduce, LocalGradientAggregation
from tests.integrations.tensorflow.strategies import RUNS
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("tensorflow")

KINDS = ("new", "variable", "earlier")


class Program:
    """An aggregation of two passes over three variables; the second may have a gradient or None."""

    def __init__(self, run: str = "eager", mode: Any = "eager", k: int = 2) -> None:
        self.aggregation = LocalGradientAggregation(k, AllReduce(gc.LOCAL, "sum"), mode=mode)
        self.variables = [tf.Variable(0.0) for _ in range(3)]
        self.run = RUNS[run](self._run)

    def _run(self, second: Any = None) -> list[Any]:
        given = None if second is None else second * tf.constant(1.0)
        return self.aggregation.compute_gradients([tf.constant(1.0), given, None], self.variables)

    def received(self, second: Any = None) -> list[float | None]:
        gradients = self.run(None if second is None else tf.constant(second))
        return [None if x is None else float(x) for x in gradients]


def hand_over(before: Program, after: Program, kind: str, folder: Path) -> Any:
    """Restores from a current checkpoint, one in which `seen` is a variable, or an older one without `seen`."""
    saved: Any = before.aggregation
    if kind != "new":
        saved = tf.Module()
        saved.position, saved.windows = before.aggregation.position, before.aggregation.windows
    if kind == "variable":
        saved.seen = before.aggregation.seen
    path = tf.train.Checkpoint(aggregation=saved).save(folder / "window")
    return tf.train.Checkpoint(aggregation=after.aggregation).restore(path)


@pytest.mark.parametrize(
    ("kind", "run", "made"),
    cases(
        [
            ("new", "compiled", False),
            ("new", "eager", False),
            ("variable", "function", False),
            ("earlier", "eager", True),
        ],
        KINDS,
        RUNS,
        (False, True),
    ),
)
def test_a_restored_contribution_is_returned(kind: str, run: str, made: bool, tmp_path: Path) -> None:
    """By an aggregation that creates its variables before or after the restore."""
    before, after = Program(), Program(run)
    before.received(2.0)
    if made:
        made_by = Program()
        made_by.aggregation, made_by.variables = after.aggregation, after.variables
        made_by.received()
    status = hand_over(before, after, kind, tmp_path)
    assert after.received() == [2, 2, None]
    status.assert_consumed()
    assert after.received() == [1, 0, None]


@pytest.mark.parametrize(("kind", "run"), cases([("new", "function")], KINDS[:2], RUNS))
def test_zeros_are_a_gradient(kind: str, run: str, tmp_path: Path) -> None:
    before, after = Program(), Program(run)
    before.received(0.0)
    hand_over(before, after, kind, tmp_path)
    assert after.received() == [2, 0, None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_from_before_the_restore_refuses_to_drop_what_it_holds(kind: str, tmp_path: Path) -> None:
    """Each trace fixes which gradients are None; the window is kept for other traces."""
    before, after = Program(), Program("function")
    before.received(2.0)
    assert [after.received() for _ in range(2)] == [[1, None, None], [2, None, None]]
    hand_over(before, after, kind, tmp_path)
    with pytest.raises(tf.errors.InvalidArgumentError, match="compute_gradients: expected a function traced after"):
        after.received()
    after.run = tf.function(after._run)
    assert after.received() == [2, 2, None]


def test_another_trace_s_gradient_is_not_dropped() -> None:
    program = Program("function", k=3)
    for second in (None, 2.0):
        program.received(second)
    with pytest.raises(tf.errors.InvalidArgumentError, match="compute_gradients: expected a function traced after"):
        program.received()
    assert program.received(1.0) == [3, 3, None]
    assert [program.received() for _ in range(3)] == [[1, None, None], [2, None, None], [3, None, None]]


def test_a_gradient_that_was_traced_and_never_run_is_none() -> None:
    program = Program("function")
    program.run.get_concrete_function(tf.constant(1.0))
    other = Program()
    other.aggregation, other.variables = program.aggregation, program.variables
    assert [other.received() for _ in range(2)] == [[1, None, None], [2, None, None]]


def test_passes_of_one_function_know_of_each_other() -> None:
    program = Program()
    both = tf.function(lambda: (program._run(tf.constant(2.0)), program._run()))
    assert [None if x is None else float(x) for x in both()[1]] == [2, 2, None]


def test_a_graph_of_tensorflow_1_refuses_to_drop_what_was_restored(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        program = Program(mode="eager")
        with_gradient, without = program._run(tf.constant(2.0)), program._run()
        del without
        other = Program(mode="eager")
        received = other._run()
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        session.run(with_gradient[:2])
        assert session.run(program.aggregation.seen).tolist() == [True, True, False]
        with session.as_default():
            path = tf.train.Checkpoint(aggregation=program.aggregation).save(str(tmp_path / "c"))
        status = tf.train.Checkpoint(aggregation=other.aggregation).restore(path)
        status.assert_consumed().run_restore_ops(session)
        assert session.run(other.aggregation.seen).tolist() == [True, True, False]
        with pytest.raises(tf.errors.InvalidArgumentError, match="compute_gradients: expected a function traced after"):
            session.run(received[0])
        assert int(session.run(other.aggregation.counter)) == 1
