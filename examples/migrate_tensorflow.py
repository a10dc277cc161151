"""One window with Keras, GradientAccumulator, Horovod and gradcombine: how far each gradient is from one batch.

A batch of 35 examples in microbatches of 10, the last of which has 5, so that the mean of the microbatches' means is
not the mean over examples.
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
    """The gradient of the mean loss over the examples."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.linalg.matvec(x, w) - y) ** 2)
    return tape.gradient(loss, w)


def parameters() -> tf.Variable:
    return tf.Variable(np.float32([0.5, -0.25, 1.0]))


def applied(w: tf.Variable) -> np.ndarray:
    """The gradient that SGD with rate 1 applied."""
    return parameters().numpy() - w.numpy()


def keras_accumulation() -> tuple[np.ndarray, np.ndarray]:
    w = parameters()
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=K)
    for x, y in MICROBATCHES:
        optimizer.apply([gradient(w, x, y)], [w])
    theirs = applied(w)

    w = parameters()
    optimizer = Accumulate(keras.optimizers.SGD(1.0), every=K)
    for x, y in MICROBATCHES:
        optimizer.apply([gradient(w, x, y)], [w], weight=len(x))
    return theirs, applied(w)


def gradient_accumulator() -> tuple[np.ndarray, np.ndarray]:
    """Mimics GradientAccumulator, which adds each gradient divided by the number of steps in Keras 2's train_step."""
    w = parameters()
    sums = tf.Variable(tf.zeros_like(w))
    for x, y in MICROBATCHES:
        sums.assign_add(gradient(w, x, y) / K)
    w.assign_sub(sums)
    theirs = applied(w)

    w = parameters()
    step = AccumulatedStep(lambda x, y: ([gradient(w, x, y)], len(x)), [w], keras.optimizers.SGD(1.0), every=K)
    for x, y in MICROBATCHES:
        step(x, y)
    return theirs, applied(w)


def horovod() -> tuple[np.ndarray, np.ndarray]:
    """backward_passes_per_step=4 with average_aggregated_gradients; first Horovod's class, then weights."""
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


METHODS: dict[str, Callable[[], tuple[np.ndarray, np.ndarray]]] = {
    "Keras gradient_accumulation_steps": keras_accumulation,
    "GradientAccumulator": gradient_accumulator,
    "Horovod backward_passes_per_step": horovod,
}


def main() -> None:
    w = parameters().numpy().astype(np.float64)
    exact = 2 * (X.astype(np.float64) @ w - Y) @ X / len(X)

    def error(received: np.ndarray) -> float:
        return float(np.abs(received - exact).max() / np.abs(exact).max())

    print(f"{'distance from the gradient of one batch':<40}{'theirs':>10}{'ours':>10}")
    for name, run in METHODS.items():
        theirs, ours = run()
        print(f"{name:<40}{error(theirs):>10.0e}{error(ours):>10.0e}")


if __name__ == "__main__":
    main()
