"""Keras optimizers under a strategy apply already merged gradients without a second all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.integrations.keras import Accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep, boundary
from tests.integrations.tensorflow.strategies import Counting

SIZES = (3, 5, 2)


def several() -> Any:
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.5), {"v1": keras.optimizers.AdamW(0.25)})
    return keras.optimizers.MultiOptimizer(chosen)


class SumsItself(keras.optimizers.SGD):
    """A user's optimizer, which expects gradients that are still to be summed."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)


MAKE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "adamw": lambda: keras.optimizers.AdamW(0.25, weight_decay=0.5, global_clipnorm=1.0),
    "nadam": lambda: keras.optimizers.Nadam(0.25),
    "ema": lambda: keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.25), initial_scale=1.0),
    "several": several,
    "several in a loss scale": lambda: keras.optimizers.LossScaleOptimizer(several(), initial_scale=1.0),
}
LESS = ["sgd", "nadam", "ema", "loss scale", "several"]
OF_USERS: dict[str, Callable[[], Any]] = {
    "of a user": lambda: SumsItself(0.5),
    "in a loss scale": lambda: keras.optimizers.LossScaleOptimizer(SumsItself(0.5), 1.0),
}


def gradients(rank: int, k: int) -> list[np.ndarray]:
    draw = np.random.default_rng([rank, k]).integers
    return [draw(-8, 9, size).astype(np.float32) for size in SIZES]


def made() -> list[Any]:
    return [keras.Variable(np.arange(size, dtype=np.float32), name=f"v{i}") for i, size in enumerate(SIZES)]


def expected(make: Callable[[], Any], having: int) -> list[bytes]:
    """Reference without a strategy: the optimizer applied to the (exact) mean over replicas."""
    variables, optimizer = made(), make()
    optimizer.build(variables)
    for window in range(2):
        columns = zip(*(gradients(rank, 2 * window + k) for rank in range(2) for k in range(2)), strict=True)
        means = [tf.constant(np.mean(x, axis=0)) if i < having else None for i, x in enumerate(columns)]
        tf.function(lambda: optimizer.apply(means, variables), autograph=False)()  # noqa: B023
    return [x.numpy().tobytes() for x in (*variables, *optimizer.variables)]


def trained(way: str, make: Callable[[], Any], having: int) -> tuple[list[bytes], int]:
    """Results of four microbatches in windows of two on two replicas, and the elements exchanged in one trace."""
    counting = Counting()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=counting)
    with strategy.scope():
        variables, optimizer = made(), make()
        if way == "step":
            given = lambda *grads: ([*grads[:having], *[None] * len(grads[having:])], 1)  # noqa: E731
            call = AccumulatedStep(given, variables, optimizer, every=2)
        else:
            accumulating = Accumulate(optimizer, every=2)
            accumulating.build(variables)

            def apply(*grads: Any) -> None:
                held = [x / 2 for x in grads[:having]]  # Keras has divided the loss by the number of replicas
                accumulating.apply([*held, *[None] * len(grads[having:])], variables)

            call = lambda *grads: strategy.run(apply, args=grads)  # noqa: E731
    run = tf.function(call, autograph=False)
    for k in range(4):
        place = strategy.experimental_distribute_values_from_function
        run(*(place(lambda c, i=i, k=k: tf.constant(gradients(c.replica_id_in_sync_group, k)[i])) for i in range(3)))
    assert run.experimental_get_tracing_count() == 1
    components = [
        [x.numpy().tobytes() for x in strategy.experimental_local_results(v.value)]
        for v in (*variables, *optimizer.variables)
    ]
    assert all(one == other for one, other in components)
    return [one for one, _ in components], counting.elements


FULL = pytest.mark.full


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("way", ["step", "optimizer"])
@pytest.mark.parametrize("having", [3, 2])
@pytest.mark.parametrize("name", ["adamw", "several in a loss scale", *LESS])
def test_merged_gradients_are_exchanged_once(way: str, having: int, name: str) -> None:
    received, elements = trained(way, MAKE[name], having)
    assert received == expected(MAKE[name], having)
    assert elements == sum(SIZES)


@pytest.mark.full
@pytest.mark.parametrize("way", ["step", "optimizer"])
@pytest.mark.parametrize("name", OF_USERS)
def test_an_optimizer_that_may_sum_elsewhere_sums(way: str, name: str) -> None:
    received, elements = trained(way, OF_USERS[name], 3)
    assert received == expected(OF_USERS[name], 3)
    assert elements == 2 * sum(SIZES)


@pytest.mark.full
@pytest.mark.parametrize("way", ["step", "optimizer"])
@pytest.mark.parametrize("renamed", ["_all_reduce_sum_gradients", "_backend_update_step"])
def test_another_version_of_keras_sums(monkeypatch: pytest.MonkeyPatch, way: str, renamed: str) -> None:
    constant = {"_all_reduce_sum_gradients": "_SUM", "_backend_update_step": "_UPDATE"}[renamed]
    monkeypatch.setattr(boundary, constant, "of_another_version")
    received, elements = trained(way, MAKE["sgd"], 3)
    assert received == expected(MAKE["sgd"], 3)
    assert elements == 2 * sum(SIZES)
