"""Trains a classifier of handwritten digits on two replicas, with a tf.function for microbatches of any size."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from gradcombine.integrations.tensorflow import AccumulatedStep

SPECS = (tf.TensorSpec((None, 64), tf.float32), tf.TensorSpec((None,), tf.int32))


def two_replicas() -> tf.distribute.Strategy:
    """A strategy for two virtual devices of one CPU. With GPUs, use ``tf.distribute.MirroredStrategy()``."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    all_reduce = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=all_reduce)


def microbatches(rng: np.random.Generator, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The data in random order, 10 to 40 images at a time. At the end, a replica may get an empty microbatch."""
    rest = rng.permutation(len(labels))
    while len(rest):
        rows, rest = np.split(rest, [rng.integers(10, 41)])
        yield images[rows], labels[rows]


def main(epochs: int = 5) -> list[float]:
    """Returns the loss over all images, before training and after each epoch."""
    keras.utils.set_random_seed(0)
    strategy, digits, rng = two_replicas(), load_digits(), np.random.default_rng(0)
    images, labels = np.float32(digits.data) / 16, np.int32(digits.target)
    data = tf.data.Dataset.from_generator(lambda: microbatches(rng, images, labels), output_signature=SPECS)
    batches = strategy.distribute_datasets_from_function(lambda _: data)

    # quickstart: begin
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)])
        optimizer = keras.optimizers.Adam(0.01)

        def mean_loss(images, labels):
            logits = model(images)
            return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

        def gradients(images, labels):
            with tf.GradientTape() as tape:
                loss = mean_loss(images, labels)
            return tape.gradient(loss, model.trainable_variables), tf.size(labels)  # weight: the number of examples

        step = AccumulatedStep(gradients, model.trainable_variables, optimizer, every=4)

    train, flush = tf.function(step, input_signature=batches.element_spec), tf.function(step.flush)
    losses = [float(mean_loss(images, labels))]
    for epoch in range(epochs):
        for batch in batches:
            train(*batch)  # four microbatches on each replica, then one all-reduce and one step of Adam
        flush()  # applies the partial window at the end of the epoch, divided by its weight
        losses.append(float(mean_loss(images, labels)))
        print(f"epoch {epoch + 1}: loss {losses[-2]:.3f} -> {losses[-1]:.3f}")
    # quickstart: end
    print(f"{optimizer.iterations.numpy()} optimizer steps, {train.experimental_get_tracing_count()} trace")
    return losses


if __name__ == "__main__":
    main()
