"""Shows that a port from TensorFlow to JAX combines gradients to the same bits, and how it might not."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from gradcombine.verify import compare


def recorded() -> tuple[list[dict[str, np.ndarray]], list[int]]:
    """Stands in for the recorded gradients of eight microbatches, with their token counts."""
    rng = np.random.default_rng(0)
    gradients = [{"kernel": rng.normal(size=(64, 10)).astype(np.float32), "bias": None} for _ in range(8)]
    return gradients, rng.integers(1, 500, 8).tolist()


def main() -> None:
    gradients, tokens = recorded()
    # quickstart: begin
    # The original: TensorFlow, all eight microbatches at once.
    listed = [{"kernel": tf.constant(g["kernel"]), "bias": None} for g in gradients]
    old = gc.combine(reductions.mean(), listed, weights=tokens, order="tree")

    # The port: JAX, one microbatch after another.
    acc = gc.accumulate(reductions.mean(), every=8, order="tree")
    state = acc.init(gradients[0])
    for gradient, count in zip(gradients, tokens, strict=True):
        state = acc.update({"kernel": jnp.asarray(gradient["kernel"]), "bias": None}, state, weight=count)
    new = acc.value(state)

    print("same bits:", compare(new["kernel"], old["kernel"]).equal_bits)
    unweighted = gc.mean(gradients)  # a port that ignores the token counts
    print(f"without token counts: off by up to {np.abs(unweighted['kernel'] - old['kernel']).max():.2f}")
    # quickstart: end


if __name__ == "__main__":
    main()
