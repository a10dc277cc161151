"""Defects planted in a small Keras transformer on TensorFlow are named, and correct steps are not accused."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.verify import Cause, StepReport, check_step
from tests.verify.steps import defects
from tests.verify.steps.dividing import eager

pytestmark = pytest.mark.full

VOCABULARY, WIDTH, LENGTH = 12, 8, 6
LENGTHS = np.array([6, 6, 5, 6, 3, 2, 3, 2])


@cache
def problem() -> tuple[Any, list[Any], dict[str, Any]]:
    """Returns the model, its variables, and a batch of sentences of different lengths."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH)(tokens)
    x = x + keras.layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = x + keras.layers.Dense(WIDTH, "gelu")(keras.layers.LayerNormalization()(x))
    model = keras.Model(tokens, keras.layers.Dense(VOCABULARY)(x))
    rng = np.random.default_rng(0)
    batch = {
        "tokens": tf.constant(rng.integers(1, VOCABULARY, (8, LENGTH)), tf.int32),
        "mask": tf.constant((np.arange(LENGTH) < LENGTHS[:, None]).astype(np.float32)),
    }
    return model, [tf.convert_to_tensor(x.value) for x in model.trainable_variables], batch


@cache
def gradients(batch_norm: bool = False) -> Any:
    """Returns ``(params, batch) -> (gradients of the summed loss, number of tokens)``."""
    model = problem()[0]

    @tf.function(reduce_retracing=True)
    def differentiated(params: Any, tokens: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            logits, _ = model.stateless_call(params, model.non_trainable_variables, tokens)
            if batch_norm:
                logits = logits - tf.reduce_mean(logits, axis=(0, 1))
                logits = logits / tf.sqrt(tf.reduce_mean(logits**2, axis=(0, 1)) + 0.1)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits[:, :-1])
            loss = tf.reduce_sum(losses * tf.cast(mask[:, 1:], losses.dtype))
        return tape.gradient(loss, params), tf.reduce_sum(mask[:, 1:])

    def sums(params: Any, batch: Any) -> Any:
        grads, tokens = differentiated(params, batch["tokens"], batch["mask"])
        return [tf.convert_to_tensor(x) for x in grads], tf.cast(tokens, grads[-1].dtype)

    return sums


@eager
def as_rows(params: Any, batch: Any, k: int) -> Any:
    """A step whose gradient of the embedding is a tf.IndexedSlices, as GradientTape returns it."""
    model = problem()[0]
    total, tokens = 0.0, tf.reduce_sum(batch["mask"][:, 1:])
    with tf.GradientTape() as tape:
        tape.watch(params)
        for part in defects.pieces(batch, k):
            logits, _ = model.stateless_call(params, model.non_trainable_variables, part["tokens"])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(part["tokens"][:, 1:], logits[:, :-1])
            total += tf.reduce_sum(losses * tf.cast(part["mask"][:, 1:], losses.dtype))
        loss = total / tf.cast(tokens, total.dtype)
    return tape.gradient(loss, params)


@defects.of_sums
def clipped(sums: Any, params: Any, batch: Any, k: int) -> Any:
    made = [tf.clip_by_global_norm(defects.mean(sums, params, part), 0.05)[0] for part in defects.pieces(batch, k)]
    return [x / k for x in defects.added(made)]


def decayed(sums: Any, k: int) -> Any:
    return lambda params, batch: [
        g + 1e-4 * k * p for g, p in zip(defects.right(sums, k)(params, batch), params, strict=True)
    ]


def narrow(sums: Any, k: int) -> Any:
    def step(params: Any, batch: Any) -> Any:
        made = [sums(params, part) for part in defects.pieces(batch, k)]
        total = defects.added([[tf.cast(x, tf.bfloat16) for x in g] for g, _ in made])
        return [tf.cast(x, p.dtype) / sum(w for _, w in made) for x, p in zip(total, params, strict=True)]

    return step if k > 1 else defects.right(sums, k)


def check(make: Any, batch_norm: bool = False, **options: Any) -> StepReport:
    _, params, batch = problem()
    return check_step(partial(make, gradients(batch_norm)), params, batch, **{"microbatches": (4,)} | options)


@pytest.mark.parametrize(
    ("make", "options", "cause"),
    [
        (defects.mean_of_means, {}, Cause.MEAN_OF_MEANS),
        (defects.sum_of_means, {}, Cause.SUM),
        (defects.drops_the_last, {}, Cause.LOST),
        (defects.drops_the_rest, {"microbatches": (3,)}, Cause.LOST),
        (defects.doubles, {}, Cause.DOUBLED),
        (defects.updates_each, {"returns": "params"}, Cause.MOVED_EACH),
        (defects.scheduled_each, {}, Cause.BY_PLACE),
        (clipped, {}, Cause.CHANGED_BEFORE),
        (decayed, {}, Cause.ADDED),
        (narrow, {}, Cause.PRECISION),
        (defects.Stateful, {}, Cause.STATE),
        (defects.weighted_means, {"batch_norm": True}, Cause.STATISTICS),
    ],
)
def test_a_planted_defect_is_named(make: Any, options: dict[str, Any], cause: Cause) -> None:
    report = check(make, **options)
    assert report.cause is cause, str(report)


@pytest.mark.parametrize("make", [defects.right, defects.backwards, defects.in_a_tree, defects.weighted_means])
@pytest.mark.parametrize("microbatches", [(2, 4), (3,), (8,)])
def test_orders_and_sizes_are_not_accused(make: Any, microbatches: tuple[int, ...]) -> None:
    report = check(make, microbatches=microbatches)
    assert report.passes and report.reference == "the same step in float64", str(report)


def test_gradients_as_rows_are_not_accused() -> None:
    _, params, batch = problem()
    report = check_step(as_rows, params, batch, microbatches=(4,))
    assert report.passes and report.reference == "the same step in float64", str(report)
