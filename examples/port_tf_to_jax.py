"""Ports a Keras model to flax and finds the two bugs of the port: one in the combination of gradients, one in Adam."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import tensorflow as tf
from sklearn.datasets import load_digits

import gradcombine as gc
from gradcombine.verify import first_divergence, record
from gradcombine.verify.diff.by_step import diff_steps
from gradcombine.verify.diff.comparing import Allowed

RATE, WINDOWS = 0.01, 6
SIZES = (24, 56, 8, 40)
"""Sizes of a window's microbatches, in examples."""

ALLOWED = {
    "gradients": Allowed(relative=1e-4),
    "combined": Allowed(relative=1e-4),
    "updates": Allowed(relative=1e-3),
    "params": Allowed(relative=1e-4),
}
"""Kernels round differently, by about 1e-6 of a leaf's largest element, and errors accumulate over the steps. Adam
divides each element by its magnitude, which enlarges the errors of small ones."""


def microbatches() -> Iterator[tuple[int, list[tuple[np.ndarray, np.ndarray]]]]:
    """The windows' microbatches, with the same data in the same order for both runs."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    for window in range(WINDOWS):
        ends = np.cumsum(SIZES) + window * sum(SIZES)
        yield window, [(images[end - n : end], labels[end - n : end]) for n, end in zip(SIZES, ends, strict=True)]


def keras_run(trace: Path, model: Any) -> None:
    """The original run, which is correct."""
    optimizer = keras.optimizers.Adam(RATE)
    acc = gc.accumulate(gc.reductions.mean(), every=len(SIZES))
    names = [variable.path for variable in model.trainable_variables]
    state = acc.init([variable.numpy() for variable in model.trainable_variables])

    @tf.function(reduce_retracing=True)
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            losses: Any = keras.losses.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, model.trainable_variables)

    with record(trace) as recorder:
        for window, batches in microbatches():
            before, received = [variable.numpy() for variable in model.trainable_variables], []
            for images, labels in batches:
                received.append(gradients(tf.constant(images), tf.constant(labels)))
                state = acc.update(received[-1], state, weight=len(images))
            combined = acc.value(state)
            optimizer.apply(combined, model.trainable_variables)
            after = [variable.numpy() for variable in model.trainable_variables]
            recorder(
                window,
                gradients={str(i): dict(zip(names, grads, strict=True)) for i, grads in enumerate(received)},
                combined=dict(zip(names, combined, strict=True)),
                updates=dict(zip(names, [new - old for new, old in zip(after, before, strict=True)], strict=True)),
                params=dict(zip(names, after, strict=True)),
            )


class Classifier(nn.Module):
    """The ported model."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        return nn.Dense(10, name="logits")(nn.tanh(nn.Dense(32, name="hidden")(images)))


def flax_run(trace: Path, params: Any, optimizer: optax.GradientTransformation, weighted: bool) -> None:
    """The run of the port, with an optimizer, and with or without weights."""
    acc = gc.accumulate(gc.reductions.mean(), every=len(SIZES))
    window_state, state = acc.init(params), optimizer.init(params)

    @jax.jit
    def gradients(params: Any, images: jax.Array, labels: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits: Any = Classifier().apply({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return jax.grad(loss)(params)

    with record(trace) as recorder:
        for window, batches in microbatches():
            received = []
            for images, labels in batches:
                received.append(gradients(params, images, labels))
                window_state = acc.update(received[-1], window_state, weight=len(images) if weighted else 1)
            combined = acc.value(window_state)
            updates, state = optimizer.update(combined, state, params)
            params = optax.apply_updates(params, updates)
            named = {str(i): grads for i, grads in enumerate(received)}
            recorder(window, gradients=named, combined=combined, updates=updates, params=params)


def keras_epsilon(count: jax.Array) -> jax.Array:
    """optax's epsilon, added after the bias correction, that equals Keras' 1e-7, added before it."""
    return 1e-7 / jnp.sqrt(1 - 0.999 ** (count + 1).astype(jnp.float32))


def main() -> None:
    keras.utils.set_random_seed(0)
    hidden, logits = keras.layers.Dense(32, "tanh", name="hidden"), keras.layers.Dense(10, name="logits")
    model = keras.Sequential([keras.Input((64,)), hidden, logits])
    # Both runs start from the same weights, under each framework's names.
    params = {
        layer.name: {"kernel": jnp.asarray(kernel.numpy()), "bias": jnp.asarray(bias.numpy())}
        for layer in (hidden, logits)
        for kernel, bias in [layer.trainable_variables]
    }
    ported = optax.adam(RATE)
    fixed = optax.inject_hyperparams(optax.adam)(learning_rate=RATE, eps=keras_epsilon)
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "keras"
        keras_run(old, model)
        for name, optimizer, weighted in (
            ("as ported", ported, False),
            ("with the microbatches' weights", ported, True),
            ("with the epsilon of Keras", fixed, True),
        ):
            new = Path(folder) / name.replace(" ", "_")
            flax_run(new, params, optimizer, weighted)
            divergence = first_divergence(old, new, allowed=ALLOWED)
            print(f"{name}: {divergence or f'{WINDOWS} windows agree'}")
        rows = diff_steps(old, new).steps[WINDOWS - 1].rows
        trained = [row.difference for row in rows if row.difference.name.startswith("params")]
        print(f"the trained parameters differ by up to {max((leaf.relative for leaf in trained), default=0):.0e}")


if __name__ == "__main__":
    main()
