"""Strategies by name, and microbatches with exactly known means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

FULL = pytest.mark.full
STRATEGIES = ("none", pytest.param("one_device", marks=FULL), "mirrored_2", pytest.param("mirrored_4", marks=FULL))

RUNS: dict[str, Callable[[Any], Any]] = {
    "eager": lambda function: function,
    "function": tf.function,
    "compiled": lambda function: tf.function(function, jit_compile=True),
}


@cache
def mirrored(size: int) -> tf.distribute.Strategy:
    devices = [f"CPU:{i}" for i in range(size)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


@cache
def central() -> tf.distribute.Strategy:
    """Two replicas, with the variables on one device."""
    return tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")


MADE = {"one_device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"), "central_2": central}


class Counting(tf.distribute.ReductionToOneDevice):
    """Counts the exchanged elements of floating-point tensors, excluding scalars."""

    elements = 0

    def reduce_implementation(self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any) -> Any:
        shape = per_replica_value.values[0].shape
        if shape.rank:
            self.elements += shape.num_elements()
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


@contextmanager
def scope(name: str) -> Iterator[tf.distribute.Strategy]:
    """Enters the scope of the strategy with this name."""
    if name == "none":
        yield tf.distribute.get_strategy()
        return
    chosen = MADE[name]() if name in MADE else mirrored(int(name[-1]))
    with chosen.scope():
        yield chosen


def per_replica(strategy: tf.distribute.Strategy, value: Callable[[int], Any]) -> Any:
    """``value(rank)`` on each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.convert_to_tensor(value(context.replica_id_in_sync_group))
    )


def local(strategy: tf.distribute.Strategy, variable: Any) -> list[np.ndarray]:
    return [x.numpy() for x in strategy.experimental_local_results(variable)]


def subtract(gradients: list[Any], variables: list[Any]) -> None:
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign_sub(gradient)


def replace(gradients: list[Any], variables: list[Any]) -> None:
    for gradient, variable in zip(gradients, variables, strict=True):
        variable.assign(gradient)


def given(gradient: Any, weight: Any) -> tuple[list[Any], Any]:
    """A gradient function whose batch is the gradient and its weight."""
    return [gradient], weight


def gradient_at(rank: int, k: int) -> np.ndarray:
    return np.float32([5 * rank + 3 * k + 1, -k, rank + 0.5]) / 4


def weight_at(rank: int, k: int) -> np.float32:
    """1 or 3, such that the weights of two consecutive microbatches sum to 4 and every mean is a dyadic fraction."""
    return np.float32(1 + 2 * ((rank + k) % 2))


def exact_mean(replicas: int, microbatches: range) -> np.ndarray:
    contributions = [(gradient_at(r, k), weight_at(r, k)) for k in microbatches for r in range(replicas)]
    total = sum(Fraction(float(w)) for _, w in contributions)
    means = [sum(Fraction(float(w)) * Fraction(float(g[i])) for g, w in contributions) / total for i in range(3)]
    rounded = np.float32([float(mean) for mean in means])
    assert [Fraction(float(x)) for x in rounded] == means
    return rounded


def microbatch(strategy: tf.distribute.Strategy, k: int) -> tuple[Any, Any]:
    """The gradient and the weight of microbatch k on each replica."""
    return per_replica(strategy, lambda r: gradient_at(r, k)), per_replica(strategy, lambda r: weight_at(r, k))


def feed(strategy: tf.distribute.Strategy, step: Any, microbatches: range) -> list[bool]:
    """Returns for each call whether it applied a window."""
    return [bool(step(*microbatch(strategy, k))[0]) for k in microbatches]
