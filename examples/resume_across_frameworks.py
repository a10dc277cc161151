"""Interrupts a TensorFlow run on four replicas within a window, and finishes the window in JAX on two replicas."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.verify import compare

REPLICAS, EVERY, SAVED = 4, 8, 3
"""A window of eight microbatches on each of four replicas; the run stops after the third."""


def microbatch(rank: int, k: int) -> tuple[np.ndarray, np.float32]:
    """Stands in for the gradient of one microbatch, with its number of tokens."""
    rng = np.random.default_rng([rank, k])
    return rng.normal(size=(64, 10)).astype(np.float32), np.float32(rng.integers(1, 500))


def tensorflow_run(path: str) -> None:
    # The interrupted run: TensorFlow, four replicas, three of eight microbatches.
    mean, params = reductions.mean(precision="exact"), np.zeros((64, 10), np.float32)
    acc = gc.accumulate(mean, every=EVERY)
    update = tf.function(acc.update)
    states = [acc.init(tf.constant(params)) for _ in range(REPLICAS)]
    for k in range(SAVED):
        for rank in range(REPLICAS):
            gradient, tokens = microbatch(rank, k)
            states[rank] = update(tf.constant(gradient), states[rank], tf.constant(tokens))
    statefile.save_replicas(path, mean, states)


def jax_run(path: str) -> jax.Array:
    # The resumed run: JAX, two replicas, which take the missing microbatches in any order.
    mean, params = reductions.mean(precision="exact"), np.zeros((64, 10), np.float32)
    states = statefile.resize(mean, statefile.load_replicas(path, mean, like=params), 2)
    acc = gc.accumulate(mean, every=EVERY * REPLICAS // 2)
    over = gc.jax_axis("data")

    update = jax.jit(jax.vmap(acc.update))
    value = jax.jit(jax.vmap(lambda state: acc.value(gc.merge_replicas(mean, state, over)), axis_name="data"))

    missing = iter([microbatch(rank, k) for k in range(SAVED, EVERY) for rank in range(REPLICAS)])
    state, calls = jax.tree.map(lambda *parts: np.stack(parts), *states), 0
    for one, other in zip(missing, missing, strict=True):
        gradients, tokens = (np.stack(pair) for pair in zip(one, other, strict=True))
        state, calls = update(gradients, state, tokens), calls + 1
    print(f"{calls} more calls on two replicas; the window is full: {bool(jax.vmap(acc.ready)(state).all())}")
    return value(state)[0]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "window.npz")
        tensorflow_run(path)
        header = statefile.inspect(path)
        size = os.path.getsize(path)
        print(f"saved the states of {header.reduction!r} on {header.replicas} replicas, {size} bytes")
        resumed = jax_run(path)
    gradients, tokens = zip(*(microbatch(rank, k) for rank in range(REPLICAS) for k in range(EVERY)), strict=True)
    uninterrupted = gc.combine(reductions.mean(precision="exact"), gradients, weights=tokens)
    print("equal bits:", compare(resumed, uninterrupted).equal_bits)


if __name__ == "__main__":
    main()
