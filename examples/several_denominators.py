"""A loss by tokens, one by sequences and one by microbatches, in one window: JAX, TensorFlow, and the mean of means."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.integrations.tensorflow import AccumulatedStep

K, ROWS, LENGTH, WORDS, EXPERTS = 4, 8, 12, 50, 4
"""Microbatches, and the sequences of each."""
TERMS = {"ce": "tokens", "preference": "pairs", "balance": "microbatches"}


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words; which are real, ever fewer from microbatch to microbatch; which sequences have a preference."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(1, LENGTH + 1, K * ROWS))[::-1]
    paired = rng.random(K * ROWS) < np.linspace(0.1, 0.9, K * ROWS)
    real = np.arange(LENGTH) < lengths[:, None]
    return rng.integers(0, WORDS, (K * ROWS, LENGTH)), real.astype(np.float32), paired.astype(np.float32)


def main() -> None:
    batch = data()
    rng = np.random.default_rng(1)
    start = {"table": rng.normal(0, 1, (WORDS, WORDS)), "router": rng.normal(0, 1, (WORDS, EXPERTS))}
    start = {name: x.astype(np.float32) for name, x in start.items()}

    # quickstart: begin
    def loss(params, words, real, paired):
        logits = params["table"][words[:, :-1]]
        of_next = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=-1)[..., 0]
        scores = jnp.sum(of_next * real[:, 1:], axis=1)  # how likely each sequence is
        used = jnp.mean(jax.nn.softmax(params["router"][words]), axis=(0, 1))  # how much each expert has to do
        terms = {
            "ce": -jnp.sum(scores),
            "preference": -jnp.sum(jax.nn.log_sigmoid(scores / LENGTH) * paired),
            "balance": EXPERTS * jnp.sum(used**2),
        }
        return LossOutput(terms, weight={"tokens": real[:, 1:].sum(), "pairs": paired.sum(), "microbatches": 1})

    # An accumulator for each denominator; or one for all, after a pass over the weights.
    unknown = jax.jit(value_and_grad(Loss(loss, terms=TERMS), K))
    counted = jax.jit(value_and_grad(Loss(loss, terms=TERMS, totals="counted"), K))
    # quickstart: end

    def in_one_piece(params: Any) -> Any:
        parts = [loss(params, *(x[i : i + ROWS] for x in batch)) for i in range(0, K * ROWS, ROWS)]
        return sum(
            sum(part.value[t] for part in parts) / sum(part.weight[d] for part in parts) for t, d in TERMS.items()
        )

    def mean_of_means(params: Any) -> Any:
        parts = [loss(params, *(x[i : i + ROWS] for x in batch)) for i in range(0, K * ROWS, ROWS)]
        return sum(part.value[t] / part.weight[d] for part in parts for t, d in TERMS.items()) / K

    whole, right = jax.value_and_grad(in_one_piece)(start)
    naive, wrong = jax.value_and_grad(mean_of_means)(start)
    output, first = unknown(start, *batch)
    _, second = counted(start, *batch)
    third = in_tensorflow(start, batch)
    by_term = ", ".join(f"{name} {float(value):.4f}" for name, value in output.value.items())
    print(f"{by_term}; the whole {float(sum(output.value.values())):.4f}")
    print(f"in one piece {float(whole):.4f}, mean of means {float(naive):.4f}")
    for name, gradient in {
        "JAX, totals unknown": first,
        "JAX, totals counted": second,
        "TensorFlow": third,
        "mean of means": wrong,
    }.items():
        print(f"{name:20} gradient off by {distance(gradient, right):.1e}")


def in_tensorflow(start: dict[str, np.ndarray], batch: tuple[np.ndarray, ...]) -> dict[str, Any]:
    """The gradient of the window, of four calls."""
    table, router = variables = [tf.Variable(start[name]) for name in ("table", "router")]

    def loss(words: Any, real: Any, paired: Any) -> Any:
        logits = tf.gather(table, words[:, :-1])
        of_next = tf.gather(tf.nn.log_softmax(logits), words[:, 1:], axis=-1, batch_dims=2)
        scores = tf.reduce_sum(of_next * real[:, 1:], axis=1)
        used = tf.reduce_mean(tf.nn.softmax(tf.gather(router, words)), axis=(0, 1))
        terms = {
            "ce": -tf.reduce_sum(scores),
            "preference": -tf.reduce_sum(tf.math.log_sigmoid(scores / LENGTH) * paired),
            "balance": EXPERTS * tf.reduce_sum(used**2),
        }
        return terms, {"tokens": tf.reduce_sum(real[:, 1:]), "pairs": tf.reduce_sum(paired), "microbatches": 1}

    found: list[Any] = []
    step = AccumulatedStep(loss, variables, lambda grads, _: found.extend(grads), every=K, terms=TERMS)
    for i in range(0, K * ROWS, ROWS):
        step(*(tf.constant(x[i : i + ROWS]) for x in batch))
    return dict(zip(("table", "router"), found, strict=True))


def distance(tree: dict[str, Any], other: dict[str, Any]) -> float:
    """The norm of the difference, relative to that of the second tree."""
    parts = [(np.float64(tree[name]) - np.float64(other[name]), np.float64(other[name])) for name in other]
    return float(np.sqrt(sum((a**2).sum() for a, _ in parts) / sum((b**2).sum() for _, b in parts)))


if __name__ == "__main__":
    main()
