"""One window of padded sentences with other tools and with gradcombine: how far each gradient is from one batch.

Eight sentences in four microbatches of two, with 3 to 14 tokens each, so that the mean of the microbatches' means is
not the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine.integrations.jax import LossOutput, train_step, value_and_grad
from gradcombine.integrations.optax import MultiSteps, accumulate

K = 4
LENGTHS = np.array([2, 1, 7, 7, 3, 2, 1, 4])
WORDS = jnp.float32(np.random.default_rng(0).normal(size=(8, 7)))
REAL = jnp.float32(np.arange(7) < LENGTHS[:, None])
BATCH = {"words": WORDS, "real": REAL}
PARAMS = {"w": jnp.float32([0.5, -0.25])}


def summed(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """The loss summed over the unpadded tokens, and their number."""
    w, words = params["w"], batch["words"]
    return jnp.sum(batch["real"] * (w[0] * words + w[1] - jnp.sin(words)) ** 2), jnp.sum(batch["real"])


def mean_loss(params: Any, batch: Any) -> jax.Array:
    total, count = summed(params, batch)
    return total / count


def weighted_loss(params: Any, batch: Any) -> LossOutput:
    total, count = summed(params, batch)
    return LossOutput(total / count, weight=count)


def microbatches() -> list[Any]:
    return [jax.tree.map(lambda x, i=i: x[2 * i : 2 * i + 2], BATCH) for i in range(K)]


def stacked() -> Any:
    return jax.tree.map(lambda x: x.reshape(K, 2, -1), BATCH)


def update(tx: Any, weighted: bool) -> Any:
    """Runs a transformation for one window, and returns the gradient that it applied."""
    state, params = tx.init(PARAMS), PARAMS
    for batch in microbatches():
        grads = jax.grad(mean_loss)(PARAMS, batch)
        extra = {"weight": jnp.sum(batch["real"])} if weighted else {}
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda before, after: before - after, PARAMS, params)  # SGD with rate 1


def multi_steps() -> tuple[Any, Any]:
    theirs = update(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=K), weighted=False)
    ours = update(accumulate(optax.sgd(1.0), every=K), weighted=True)
    return theirs, ours


def same_as_multi_steps() -> tuple[Any, Any]:
    """To keep the old numbers at first: the same class name, states and bits."""
    theirs = update(optax.MultiSteps(optax.sgd(1.0), every_k_schedule=K), weighted=False)
    ours = update(MultiSteps(optax.sgd(1.0), every_k_schedule=K, compat=True), weighted=False)
    return theirs, ours


def microbatch() -> tuple[Any, Any]:
    mean = optax.microbatching.AccumulationType.MEAN
    theirs = optax.microbatching.microbatch(jax.grad(mean_loss), 1, microbatch_size=2, accumulator=mean)(PARAMS, BATCH)
    _, ours = value_and_grad(weighted_loss, microbatches=K)(PARAMS, BATCH)
    return theirs, ours


def scan() -> tuple[Any, Any]:
    def body(sums: Any, batch: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.grad(mean_loss)(PARAMS, batch)), None

    sums, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, PARAMS), stacked())
    theirs = jax.tree.map(lambda x: x / K, sums)
    _, ours = value_and_grad(weighted_loss, microbatches=K)(PARAMS, BATCH)
    return theirs, ours


def num_items_in_batch() -> tuple[Any, Any]:
    """Hugging Face's Trainer counts the window's tokens first and divides each sum by them, which is correct, too."""
    tokens = sum(jnp.sum(batch["real"]) for batch in microbatches())
    grads = [jax.grad(lambda p, b=batch: summed(p, b)[0] / tokens)(PARAMS) for batch in microbatches()]
    theirs = jax.tree.map(lambda *parts: sum(parts), *grads)
    ours = update(accumulate(optax.sgd(1.0), every=K), weighted=True)  # weights are summed along with the gradients
    return theirs, ours


def maxtext() -> tuple[Any, Any]:
    """With gradient_accumulation_steps=4, it adds gradients of sums and counts in a scan and divides once: correct."""

    def body(carry: Any, batch: Any) -> tuple[Any, None]:
        sums, tokens = carry
        (_, count), grads = jax.value_and_grad(summed, has_aux=True)(PARAMS, batch)
        return (jax.tree.map(jnp.add, sums, grads), tokens + count), None

    (sums, tokens), _ = jax.lax.scan(body, (jax.tree.map(jnp.zeros_like, PARAMS), jnp.float32(0)), stacked())
    theirs = jax.tree.map(lambda x: x / tokens, sums)
    step = train_step(weighted_loss, optax.sgd(1.0), microbatches=K)
    params, _, _ = step(jax.tree.map(jnp.copy, PARAMS), step.init(PARAMS), BATCH)  # parameters are donated
    ours = jax.tree.map(lambda a, b: a - b, PARAMS, params)
    return theirs, ours


METHODS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "optax.MultiSteps": multi_steps,
    "optax.MultiSteps, same numbers": same_as_multi_steps,
    "optax.microbatch": microbatch,
    "a hand-written scan": scan,
    "num_items_in_batch": num_items_in_batch,
    "MaxText": maxtext,
}


def main() -> None:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (PARAMS, BATCH))
        exact = np.asarray(jax.grad(mean_loss)(*jax.tree.map(jnp.asarray, wide))["w"])

    def error(gradient: Any) -> float:
        return float(np.abs(np.asarray(gradient["w"]).astype(np.float64) - exact).max() / np.abs(exact).max())

    print(f"{'distance from the gradient of one batch':<40}{'theirs':>10}{'ours':>10}")
    for name, run in METHODS.items():
        theirs, ours = run()
        print(f"{name:<40}{error(theirs):>10.0e}{error(ours):>10.0e}")


if __name__ == "__main__":
    main()
