"""One window as Keras, GradientAccumulator, Horovod and gradcombine have it: how far each is from one batch.

A batch of 35 examples in microbatches of 10, the last of which holds 5: a mean of the microbatches' means is not the
mean over examples.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.horovod import AllReduce, LocalGradientAggregation
from gradcombine.integrations.keras import Accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep

K, SIZE = 4, 10
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(35, 3)).astype(np.float32), RNG.normal(size=35).astype(np.float32)
MICROBATCHES = [(X[i : i + SIZE], Y[i : i + SIZE]) for i in range(0, len(X), SIZE)]


def gradient(w: tf.Variable, x: np.ndarray, y: np.ndarray) -> tf.Tensor:
    """Of the mean loss over the examples."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
    return tape.gradient(loss, w)


def parameters() -> tf.Variable:
    return tf.Variable(np.float32([0.5, -0.25, 1.0]))


def moved(w: tf.Variable) -> np.ndarray:
    """By SGD of rate 1: the gradient."""
    return parameters().numpy() - w.numpy()


def keras_accumulation() -> tuple[np.ndarray, np.ndarray]:
    w = parameters()
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=K)
    for x, y in MICROBATCHES:
        optimizer.apply([gradient(w, x, y)], [w])
    theirs = moved(w)

    w = parameters()
    optimizer = Accumulate(keras.optimizers.SGD(1.0), every=K)
    for x, y in MICROBATCHES:
        optimizer.apply([gradient(w, x, y)], [w], weight=len(x))
    return theirs, moved(w)


def gradient_accumulator() -> tuple[np.ndarray, np.ndarray]:
    """It adds each gradient over the number of steps to variables, in the train_step of Keras 2: here, as it does."""
    w = parameters()
    sums = tf.Variable(tf.zeros_like(w))
    for x, y in MICROBATCHES:
        sums.assign_add(gradient(w, x, y) / K)
    w.assign_sub(sums)
    theirs = moved(w)

    w = parameters()
    step = AccumulatedStep(lambda x, y: ([gradient(w, x, y)], len(x)), [w], keras.optimizers.SGD(1.0), every=K)
    for x, y in MICROBATCHES:
        step(x, y)
    return theirs, moved(w)


def horovod() -> tuple[np.ndarray, np.ndarray]:
    """backward_passes_per_step=4 with average_aggregated_gradients: the same class first, then weights."""
    w = parameters()
    aggregation = LocalGradientAggregation(K, AllReduce(over=gc.LOCAL), average_aggregated_gradients=True)
    for x, y in MICROBATCHES:
        (combined,) = aggregation.compute_gradients([gradient(w, x, y)], [w])
    theirs = combined.numpy()

    acc = gc.accumulate(gc.reductions.mean(), every=K)
    state = acc.init(w)
    for x, y in MICROBATCHES:
        state = acc.update(gradient(w, x, y), state, weight=len(x))
    return theirs, acc.value(state).numpy()


WAYS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "Keras gradient_accumulation_steps": keras_accumulation,
    "GradientAccumulator": gradient_accumulator,
    "Horovod backward_passes_per_step": horovod,
}


def main() -> None:
    w = parameters().numpy().astype(np.float64)
    true = 2 * (X.astype(np.float64) @ w - Y) @ X / len(X)

    def off(received: np.ndarray) -> float:
        return float(np.abs(received - true).max() / np.abs(true).max())

    print(f"{'off from the gradient of one batch by':<40}{'theirs':>10}{'ours':>10}")
    for name, way in WAYS.items():
        theirs, ours = way()
        print(f"{name:<40}{off(theirs):>10.0e}{off(ours):>10.0e}")


if __name__ == "__main__":
    main()
