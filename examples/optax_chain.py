"""Trains a small network on scikit-learn's digits with an optax chain and microbatches of different sizes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from gradcombine.integrations.optax import accumulate_and_apply

SIZES = (5, 17, 10, 32)
"""Sizes of a window's microbatches, 64 examples in all, as for data of variable length."""


def init(key: jax.Array) -> dict[str, jax.Array]:
    first, second = jax.random.split(key)
    w1 = jax.random.normal(first, (64, 32)) / 8
    w2 = jax.random.normal(second, (32, 10)) / 32**0.5
    return {"w1": w1, "b1": jnp.zeros((1, 32)), "w2": w2, "b2": jnp.zeros((1, 10))}


def loss(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main() -> None:
    digits = load_digits()
    images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target, jnp.int32)
    order = np.random.default_rng(0).permutation(len(images))
    params = init(jax.random.key(0))

    # quickstart: begin
    # Clipping and Adam run once per window of four microbatches, on the gradient over all its examples.
    tx = accumulate_and_apply(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)), every=4)
    state = tx.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, images, labels, last):
        grads = jax.grad(loss)(params, images, labels)
        return tx.apply(grads, state, params, weight=len(images), flush=last)

    # quickstart: end
    print(f"before      loss {loss(params, images, labels):.3f}")
    for epoch in range(5):
        start, microbatch = 0, 0
        while start < len(images):
            rows = order[start : start + SIZES[microbatch % 4]]
            start, microbatch = start + len(rows), microbatch + 1
            # The data ends within a window: flush applies the partial window, divided by its number of examples.
            params, state = step(params, state, images[rows], labels[rows], start == len(images))
        print(f"epoch {epoch}     loss {loss(params, images, labels):.3f}   {int(state.inner[1][0].count)} updates")


if __name__ == "__main__":
    main()
