"""Loss terms per token, per pair and per microbatch in one window: JAX, TensorFlow, and the mean of means."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.integrations.tensorflow import AccumulatedStep

K, ROWS, LENGTH, WORDS, EXPERTS = 4, 8, 12, 50, 4
"""Numbers of microbatches, sequences in each, words in a sequence, words in the vocabulary, and experts."""
TERMS = {"ce": "tokens", "preference": "pairs", "balance": "microbatches"}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words, the mask of unpadded words (fewer in each microbatch), and the mask of sequences with a preference."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(1, LENGTH + 1, K * ROWS))[::-1]
    paired = rng.random(K * ROWS) < np.linspace(0.1, 0.9, K * ROWS)
    mask = np.arange(LENGTH) < lengths[:, None]
    return rng.integers(0, WORDS, (K * ROWS, LENGTH)), mask.astype(np.float32), paired.astype(np.float32)


def main() -> None:
    batch = data()
    rng = np.random.default_rng(1)
    start = {"table": rng.normal(0, 1, (WORDS, WORDS)), "router": rng.normal(0, 1, (WORDS, EXPERTS))}
    start = {name: x.astype(np.float32) for name, x in start.items()}

    # quickstart: begin
    def loss(params, words, mask, paired):
        logits = params["table"][words[:, :-1]]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=-1)[..., 0]
        scores = jnp.sum(logp * mask[:, 1:], axis=1)  # log-likelihood of each sequence
        load = jnp.mean(jax.nn.softmax(params["router"][words]), axis=(0, 1))  # load of each expert
        terms = {
            "ce": -jnp.sum(scores),
            "preference": -jnp.sum(jax.nn.log_sigmoid(scores / LENGTH) * paired),
            "balance": EXPERTS * jnp.sum(load**2),
        }
        return LossOutput(terms, weight={"tokens": mask[:, 1:].sum(), "pairs": paired.sum(), "microbatches": 1})

    # One accumulator per denominator, or a single one after a pass over the weights.
    unknown = jax.jit(value_and_grad(Loss(loss, terms=TERMS), K))
    counted = jax.jit(value_and_grad(Loss(loss, terms=TERMS, totals="counted"), K))
    # quickstart: end

    def one_batch(params: Any) -> Any:
        parts = [loss(params, *(x[i : i + ROWS] for x in batch)) for i in range(0, K * ROWS, ROWS)]
        return sum(
            sum(part.value[t] for part in parts) / sum(part.weight[d] for part in parts) for t, d in TERMS.items()
        )

    def mean_of_means(params: Any) -> Any:
        parts = [loss(params, *(x[i : i + ROWS] for x in batch)) for i in range(0, K * ROWS, ROWS)]
        return sum(part.value[t] / part.weight[d] for part in parts for t, d in TERMS.items()) / K

    value, expected = jax.value_and_grad(one_batch)(start)
    unweighted, wrong = jax.value_and_grad(mean_of_means)(start)
    output, with_unknown = unknown(start, *batch)
    _, with_counted = counted(start, *batch)
    by_term = ", ".join(f"{name} {float(value):.4f}" for name, value in output.value.items())
    print(f"{by_term}; sum {float(sum(output.value.values())):.4f}")
    print(f"one batch {float(value):.4f}, mean of means {float(unweighted):.4f}")
    for name, gradient in {
        "JAX, totals unknown": with_unknown,
        "JAX, totals counted": with_counted,
        "TensorFlow": in_tensorflow(start, batch),
        "mean of means": wrong,
    }.items():
        print(f"{name:20} gradient off by {distance(gradient, expected):.1e}")


def in_tensorflow(start: dict[str, np.ndarray], batch: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """The gradient of the window in TensorFlow, from four calls."""
    table, router = variables = [tf.Variable(start[name]) for name in ("table", "router")]

    def loss(words: Any, mask: Any, paired: Any) -> Any:
        logits = tf.gather(table, words[:, :-1])
        logp = tf.gather(tf.nn.log_softmax(logits), words[:, 1:], axis=-1, batch_dims=2)
        scores = tf.reduce_sum(logp * mask[:, 1:], axis=1)
        load = tf.reduce_mean(tf.nn.softmax(tf.gather(router, words)), axis=(0, 1))
        terms = {
            "ce": -tf.reduce_sum(scores),
            "preference": -tf.reduce_sum(tf.math.log_sigmoid(scores / LENGTH) * paired),
            "balance": EXPERTS * tf.reduce_sum(load**2),
        }
        return terms, {"tokens": tf.reduce_sum(mask[:, 1:]), "pairs": tf.reduce_sum(paired), "microbatches": 1}

    applied: list[Any] = []
    step = AccumulatedStep(loss, variables, lambda grads, _: applied.extend(grads), every=K, terms=TERMS)
    for i in range(0, K * ROWS, ROWS):
        step(*(tf.constant(x[i : i + ROWS]) for x in batch))
    return dict(zip(("table", "router"), applied, strict=True))


def distance(tree: dict[str, Any], other: dict[str, Any]) -> float:
    """The norm of the difference, relative to the norm of the second tree."""
    parts = [(np.float64(tree[name]) - np.float64(other[name]), np.float64(other[name])) for name in other]
    return float(np.sqrt(sum((a**2).sum() for a, _ in parts) / sum((b**2).sum() for _, b in parts)))


if __name__ == "__main__":
    main()
