"""Checkpoints of a variable that is summed on read hold the sum in TensorFlow and the components in the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradcombine import replicated

COMPONENTS = np.float32([3, 7])

counter = replicated.variable("sum", "on_read", over=replicated.stacked(2))


@pytest.fixture
def state() -> replicated.ReplicatedState:
    return counter.assign(counter.init(np.float32(0)), COMPONENTS)


@pytest.mark.needs("tensorflow")
def test_tensorflow_restores_equal_shares(tmp_path: Path, state: replicated.ReplicatedState) -> None:
    import tensorflow as tf

    from tests.integrations.tensorflow.strategies import mirrored, per_replica

    strategy = mirrored(2)
    with strategy.scope():
        variable = tf.Variable(
            0.0, aggregation=tf.VariableAggregation.SUM, synchronization=tf.VariableSynchronization.ON_READ
        )
    own = per_replica(strategy, lambda rank: COMPONENTS[rank])
    strategy.run(lambda value: variable.assign(value, read_value=False), (own,))
    path = tf.train.Checkpoint(variable=variable).save(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(variable=variable).restore(path).assert_consumed()
    restored = [x.numpy() for x in strategy.experimental_local_results(variable)]
    assert restored == [5, 5]
    assert counter.cross.assign(state, counter.cross.read(state)).value.tolist() == restored


def test_the_state_keeps_the_components(tmp_path: Path, state: replicated.ReplicatedState) -> None:
    np.savez(tmp_path / "state.npz", **state._asdict())
    with np.load(tmp_path / "state.npz") as saved:
        restored = replicated.ReplicatedState(**saved)
    assert restored.value.tolist() == [3, 7]
    assert counter.assign_add(restored, np.float32([1, 2])).value.tolist() == [4, 9]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_an_integer_sum_is_kept_on_another_number_of_replicas(replicas: int) -> None:
    here = replicated.variable("sum", "on_read", over=replicated.stacked(2))
    there = replicated.variable("sum", "on_read", over=replicated.stacked(replicas))
    total = here.cross.read(here.assign(here.init(np.int32(0)), np.int32([3, 8])))
    state = there.cross.assign(there.init(np.int32(0)), total)
    assert there.cross.read(state) == 11
    assert int(state.value.max() - state.value.min()) <= 1
