"""The model inside TensorFlow: in replica context, in tf.function, and with all components in cross-replica context."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import replicated
from tests.integrations.tensorflow.strategies import mirrored, per_replica

X = np.float32([[1, 2], [3, 5], [4, 7]])


def _on_replicas(step: Any, compiled: bool) -> list[Any]:
    strategy = mirrored(len(X))
    own = per_replica(strategy, lambda rank: X[rank])
    run = tf.function(lambda value: strategy.run(step, (value,))) if compiled else None
    out = run(own) if run else strategy.run(step, (own,))
    return [x.numpy().tolist() for x in strategy.experimental_local_results(out)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("aggregation", "added"),
    [("sum", [8, 14]), ("mean", [np.float32(8) / 3, np.float32(14) / 3]), ("only_first_replica", [1, 2])],
)
def test_on_write_inside_run(compiled: bool, aggregation: str, added: list[float]) -> None:
    variable = replicated.variable(aggregation, over=gc.tf_replicas())

    def step(value: Any) -> Any:
        return variable.read(variable.assign_add(variable.init(np.float32([10, 10])), value))

    assert _on_replicas(step, compiled) == [(np.float32(10) + np.float32(added)).tolist()] * 3


def test_integer_shares_inside_run() -> None:
    variable = replicated.variable("sum", "on_read", over=gc.tf_replicas())

    def step(value: Any) -> Any:
        return variable.cross.assign(variable.init(np.int32([0, 0])), tf.constant([7, -7])).value

    assert _on_replicas(step, compiled=True) == [[3, -2], [2, -2], [2, -3]]


def test_sparse_values_are_added_where_they_are() -> None:
    variable = replicated.variable("sum", over=gc.tf_replicas())

    def step(value: Any) -> Any:
        rank = tf.distribute.get_replica_context().replica_id_in_sync_group
        sparse = tf.IndexedSlices(value[None], tf.reshape(rank, (1,)), tf.constant((3, 2)))
        return variable.assign_add(variable.init(np.zeros((3, 2), np.float32)), sparse).value

    assert _on_replicas(step, compiled=False) == [X.tolist()] * 3


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int64])
def test_integers_from_outside(dtype: Any) -> None:
    """All components in one tensor, as the stacked result of experimental_local_results."""
    variable = replicated.variable("sum", "on_read", over=replicated.stacked(3))
    state = variable.assign_sub(variable.init(tf.constant(9, dtype)), tf.constant([1, 2, 3], dtype))
    assert state.value.numpy().tolist() == [8, 7, 6]
    assert variable.cross.read(state).numpy() == 21
    assert variable.cross.assign(state, tf.constant(11, dtype)).value.numpy().tolist() == [4, 4, 3]
