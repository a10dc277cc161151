"""The valid combinations of aggregation and synchronization, and their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import replicated
from gradcombine.replicated.policy import Aggregation, Synchronization

TWO = replicated.stacked(2)


@pytest.mark.parametrize("given", ["mean", "MEAN", Aggregation.MEAN])
def test_names(given: Any) -> None:
    assert replicated.variable(given, over=TWO).aggregation is Aggregation.MEAN


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", Aggregation.__members__)
def test_tensorflow_aggregations(name: str) -> None:
    import tensorflow as tf

    for enum in (tf.VariableAggregation, tf.compat.v1.VariableAggregation):
        assert replicated.variable(enum[name], over=TWO).aggregation is Aggregation[name]


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("name", ["AUTO", "ON_WRITE", "ON_READ"])
def test_tensorflow_synchronizations(name: str) -> None:
    import tensorflow as tf

    found = replicated.variable("sum", tf.VariableSynchronization[name], over=TWO).synchronization
    assert found is Synchronization["ON_WRITE" if name == "AUTO" else name]


@pytest.mark.needs("tensorflow")
def test_names_are_those_of_tensorflow() -> None:
    import tensorflow as tf

    assert list(Aggregation.__members__) == list(tf.VariableAggregation.__members__)
    assert list(Synchronization.__members__) == list(tf.VariableSynchronization.__members__)


@pytest.mark.parametrize(
    ("aggregation", "synchronization", "message"),
    [
        ("average", "auto", "expected one aggregation of none, sum, mean, only_first_replica, or the tf.Variable"),
        ("sum", "sometimes", "of auto, none, on_write, on_read"),
        (Synchronization.NONE, "auto", "expected one aggregation"),
        ("sum", Aggregation.NONE, "expected one synchronization"),
        (None, "auto", "received None"),
        (1, "auto", "received 1"),
        ("sum", "none", r"none is for a variable with a single copy, over=LOCAL"),
    ],
)
def test_refused(aggregation: Any, synchronization: Any, message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        replicated.variable(aggregation, synchronization, over=TWO)


@pytest.mark.parametrize("over", [None, 2, "data"])
def test_replicas_are_explicit(over: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="expected a collective"):
        replicated.variable("sum", over=over)


@pytest.mark.parametrize("replicas", [0, -1, True, 2.0, "2"])
def test_number_of_replicas(replicas: Any) -> None:
    with pytest.raises(gc.GradCombineError, match="from 1 to 131072 replicas"):
        replicated.stacked(replicas)


def test_unknown_order() -> None:
    order: Any = "random"
    with pytest.raises(gc.GradCombineError, match="order"):
        replicated.variable("sum", over=TWO, order=order)


@pytest.mark.parametrize("synchronization", ["auto", "none", "on_write", "on_read"])
@pytest.mark.parametrize("aggregation", ["none", "sum", "mean", "only_first_replica"])
def test_one_copy_is_a_plain_variable(aggregation: str, synchronization: str) -> None:
    variable = replicated.variable(aggregation, synchronization, over=gc.LOCAL)
    state = variable.init(np.float32([1, 2]))
    state = variable.assign_add(state, np.float32([2, 2]))
    state = variable.assign_sub(state, np.float32([0, 1]))
    np.testing.assert_array_equal(variable.read(state), np.float32([3, 3]))
    state = variable.assign(state, np.float32([5, 6]))
    np.testing.assert_array_equal(state.value, np.float32([5, 6]))
    if (aggregation, synchronization) != ("none", "on_read"):
        np.testing.assert_array_equal(variable.cross.read(state), np.float32([5, 6]))
        np.testing.assert_array_equal(variable.cross.assign(state, np.float32([7, 8])).value, np.float32([7, 8]))
