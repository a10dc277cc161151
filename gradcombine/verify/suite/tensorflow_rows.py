# pyright: standard
"""TensorFlow: the digits classifier, and the combine: eager, tf.function, XLA; MirroredStrategy over logical CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.types import Order, Tree
from gradcombine.verify.suite import places
from gradcombine.verify.suite.digits import PIXELS, Batch
from gradcombine.verify.suite.places import Case, Contributions


def cases(counts: Sequence[int]) -> Iterator[Case]:
    for order in places.ORDERS:
        for mode, compiled in _COMPILED.items():
            yield Case("tensorflow", mode, places.LIST, 1, order, partial(_over_list, compiled, order))
            yield Case("tensorflow", mode, places.TIME, 1, order, partial(_over_time, compiled, order))
    for order in places.ORDERS:
        for place, run in ((places.REPLICAS, _over_replicas), (places.TIME_AND_REPLICAS, _over_time_and_replicas)):
            for count in counts:
                yield Case("tensorflow", "MirroredStrategy", place, count, order, partial(run, count, order))


def _over_list(compiled: Callable[..., Any], order: Order, contributions: Contributions) -> list[Tree]:
    function = compiled(partial(places.over_list, order=order))
    return [_numpy(function(*_tensors(contributions)))]


def _over_time(compiled: Callable[..., Any], order: Order, contributions: Contributions) -> list[Tree]:
    accumulator, state = places.over_time(*_tensors(contributions), order, compiled)
    return [_numpy(accumulator.value(state))]


def _over_replicas(count: int, order: Order, contributions: Contributions) -> list[Tree]:
    run = partial(places.over_replicas, over=gc.tf_replicas(), order=order)
    return _every_replica(run, count, contributions.stacked(count))


def _over_time_and_replicas(count: int, order: Order, contributions: Contributions) -> list[Tree]:
    def run(values: Tree, weights: tf.Tensor) -> Tree:
        listed = [dict(zip(values, step, strict=True)) for step in zip(*map(tf.unstack, values.values()), strict=True)]
        # As a separate function, the update is traced once, not once for each step.
        window = places.over_time(listed, tf.unstack(weights), order, tf.function)
        return places.merged(window, gc.tf_replicas(), order)

    return _every_replica(run, count, contributions.stacked(count, len(contributions.weights) // count))


def _every_replica(run: Callable[..., Any], count: int, dealt: Any) -> list[Tree]:
    replicas = strategy(count)

    def block_of(context: tf.distribute.ReplicaContext) -> Any:
        return tf.nest.map_structure(lambda block: tf.constant(block[context.replica_id_in_sync_group]), dealt)

    arguments = replicas.experimental_distribute_values_from_function(block_of)
    results = tf.function(lambda contributions: replicas.run(run, args=contributions))(arguments)
    local = {name: replicas.experimental_local_results(result) for name, result in results.items()}
    return [_numpy({name: result[rank] for name, result in local.items()}) for rank in range(count)]


@cache
def strategy(count: int) -> tf.distribute.Strategy:
    # The default collective ops of two strategies in one process disturb each other.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{rank}" for rank in range(count)], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


_COMPILED: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "tf.function": tf.function,
    "XLA": partial(tf.function, jit_compile=True),
}


def _tensors(contributions: Contributions) -> tuple[list[Tree], list[tf.Tensor]]:
    weights = [tf.constant(weight, tf.float32) for weight in contributions.weights]
    return tf.nest.map_structure(tf.constant, list(contributions.values)), weights


def _numpy(result: Tree) -> Tree:
    return {name: tensor.numpy() for name, tensor in result.items()}


_IMAGES, _LABELS = tf.TensorSpec([None, PIXELS], tf.float32), tf.TensorSpec([None], tf.int32)


@tf.function(reduce_retracing=True)
def measured(parameters: dict[str, Any], images: tf.Tensor, labels: tf.Tensor) -> dict[str, Any]:
    with tf.GradientTape() as tape:
        tape.watch(parameters)
        hidden = tf.tanh(images @ parameters["w1"] + parameters["b1"])
        logits = hidden @ parameters["w2"] + parameters["b2"]
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    return tape.gradient(loss, parameters) | {"loss": loss}


def measure(parameters: dict[str, Any], batch: Batch) -> dict[str, tf.Tensor]:
    """The mean loss over a batch and its gradient, as one flat tree."""
    tensors = {name: tf.convert_to_tensor(leaf) for name, leaf in parameters.items()}
    return measured(tensors, tf.constant(batch.images), tf.constant(batch.labels))


def exported(tree: dict[str, tf.Tensor]) -> dict[str, np.ndarray]:
    return {name: leaf.numpy() for name, leaf in tree.items()}
