"""The model has the bits of real variables under MirroredStrategy at every step, on three and four replicas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import replicated
from tests.foreign_orders.data import assert_same_bits
from tests.integrations.tensorflow.strategies import mirrored, per_replica

AGGREGATIONS = ("SUM", "MEAN", "ONLY_FIRST_REPLICA")
SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ")
SHAPE = (5,)


class Real:
    """A tf.Variable and the operations on it."""

    def __init__(self, replicas: int, aggregation: str, synchronization: str, start: np.ndarray) -> None:
        self.strategy = mirrored(replicas)
        with self.strategy.scope():
            self.variable = tf.Variable(
                start,
                aggregation=tf.VariableAggregation[aggregation],
                synchronization=tf.VariableSynchronization[synchronization],
            )

    def replica(self, op: str, values: np.ndarray) -> None:
        own = per_replica(self.strategy, lambda rank: values[rank])
        self.strategy.run(lambda value: getattr(self.variable, op)(value, read_value=False), (own,))

    def cross(self, op: str, value: np.ndarray) -> None:
        getattr(self.variable, op)(value)

    def components(self) -> list[np.ndarray]:
        return [x.numpy() for x in self.strategy.experimental_local_results(self.variable)]

    def read(self) -> np.ndarray:
        return self.variable.read_value().numpy()


def _steps(rng: np.random.Generator, replicas: int, sums_on_read: bool) -> Iterator[tuple[str, str, Any]]:
    for _ in range(2):
        for op in ("assign_add", "assign", "assign_sub"):
            yield "replica", op, rng.standard_normal((replicas, *SHAPE)).astype(np.float32)
        for op in ("assign",) if sums_on_read else ("assign_add", "assign", "assign_sub"):
            yield "cross", op, rng.standard_normal(SHAPE).astype(np.float32)


@pytest.mark.parametrize("replicas", [3, 4])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("synchronization", SYNCHRONIZATIONS)
def test_model_predicts_the_variable(replicas: int, aggregation: str, synchronization: str) -> None:
    rng = np.random.default_rng(replicas)
    start = rng.standard_normal(SHAPE).astype(np.float32)
    real = Real(replicas, aggregation, synchronization, start)
    model = replicated.variable(aggregation, synchronization, over=replicated.stacked(replicas))
    state = model.init(start)
    sums_on_read = (aggregation, synchronization) == ("SUM", "ON_READ")
    for context, op, values in _steps(rng, replicas, sums_on_read):
        getattr(real, context)(op, values)
        state = getattr(model if context == "replica" else model.cross, op)(state, values)
        assert_same_bits(state.value, np.stack(real.components()))
        assert_same_bits(model.cross.read(state), real.read())


@pytest.mark.parametrize("op", ["assign_add", "assign_sub"])
def test_both_refuse_a_cross_replica_addition_to_a_sum(op: str) -> None:
    start = np.zeros(SHAPE, np.float32)
    with pytest.raises(ValueError, match="does not support"):
        Real(3, "SUM", "ON_READ", start).cross(op, start)
    model = replicated.variable("sum", "on_read", over=replicated.stacked(3))
    with pytest.raises(gc.GradCombineError, match=r"cross\.assign of the new sum"):
        getattr(model.cross, op)(model.init(start), start)
