"""Losses with several denominators: correct against float64, with the same bits as in the other frameworks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.reductions import Ratio
from gradcombine.verify.compare.ulp import equal_bits
from tests.integrations.tensorflow.strategies import mirrored, per_replica, subtract
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("jax", "tensorflow")

TERMS = {"ce": "tokens", "z": "tokens", "balance": "microbatches"}


def loss_over(w: Any, b: Any) -> Any:
    def loss(x: Any, mask: Any) -> Any:
        values = {
            "ce": tf.reduce_sum(w * x * mask + b * mask),
            "z": tf.reduce_sum(b * x * x * mask),
            "balance": w * b * tf.reduce_max(x),
        }
        return values, {"tokens": tf.reduce_sum(mask), "microbatches": 1}

    return loss


def data(parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Integer data in microbatches of two rows; half of the tokens count."""
    rng = np.random.default_rng(parts)
    x = rng.integers(-8, 9, (parts, 2, 4)).astype(np.float32)
    return x, rng.permutation(np.arange(8 * parts) % 2).reshape(x.shape).astype(np.float32)


@pytest.mark.parametrize(
    ("k", "replicas", "totals"), cases([(1, 1, None)], (1, 2, 4, 8, 16), (1, 2, 4, 8), (None, "given"), pairwise=True)
)
def test_a_window_is_the_formula(k: int, replicas: int, totals: Any) -> None:
    x, mask = (a.reshape(k, replicas, 2, 4) for a in data(k * replicas))
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        w, b, unused = tf.Variable(2.0), tf.Variable(-3.0), tf.Variable(1.0)
        step = AccumulatedStep(loss_over(w, b), [w, unused, b], subtract, every=k, terms=TERMS, totals=totals)
    tokens, microbatches = mask.sum(dtype=np.float64), k * replicas
    known = {"tokens": tf.constant(tokens, tf.float32), "microbatches": tf.constant(microbatches)}
    given = {"totals": known} if totals else {}
    run = tf.function(step) if replicas > 1 else step
    for i in range(k):
        rows = [per_replica(strategy, a[i].__getitem__) for a in (x, mask)]
        applied, outputs, metrics = run(*rows, **given)
        assert bool(applied) == (i == k - 1) and outputs is None
    x, mask = x.astype(np.float64), mask.astype(np.float64)
    sums, squares, top = (x * mask).sum() / tokens, (x * x * mask).sum() / tokens, x.max((2, 3)).sum() / microbatches
    assert [v.numpy() for v in (w, unused, b)] == [2 - (sums - 3 * top), 1, -3 - (1 + squares + 2 * top)]
    assert {name: float(value) for name, value in metrics.value.items()} == {
        "ce": 2 * sums - 3,
        "z": -3 * squares,
        "balance": -6 * top,
    }
    assert {name: float(value) for name, value in metrics.weight.items()} == {
        "tokens": tokens,
        "microbatches": microbatches,
    }


PRECISIONS = {
    "tree": (lambda: (reductions.mean(), reductions.sum()), "tree"),
    "exact": (lambda: (reductions.mean("exact"), reductions.sum("exact")), "sequential"),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "totals"), cases([("tree", None)], PRECISIONS, (None, "given")))
def test_the_bits_are_those_of_jax_and_of_the_algebra(name: str, totals: Any) -> None:
    make, order = PRECISIONS[name]
    mean, total = make()
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((6, 1, 4)).astype(np.float32) for _ in range(2))
    tokens, pairs = np.float32([3, 0, 7, 1, 5, 9]).reshape(6, 1), np.float32([1, 2, 0, 0, 1, 3]).reshape(6, 1)
    terms, start = {"ce": "tokens", "preference": "pairs"}, np.zeros((2, 4), np.float32)
    given = {"totals": {"tokens": tokens.sum(), "pairs": pairs.sum()}} if totals else {}
    combined: dict[str, Any] = {"order": order, "reduction": total if totals else mean}
    settings: dict[str, Any] = {"terms": terms, "totals": totals} | combined

    # One row per microbatch and separate parameters per term make each gradient a single product in any framework.
    def in_jax(w: Any, x: Any, y: Any, tokens: Any, pairs: Any) -> LossOutput:
        values = {"ce": jnp.sum(w[:1] * x), "preference": jnp.sum(w[1:] * y)}
        return LossOutput(values, {"tokens": tokens.sum(), "pairs": pairs.sum()})

    flat = [a.reshape(6, *a.shape[2:]) for a in (x, y, tokens, pairs)]
    _, received = jax.jit(value_and_grad(Loss(in_jax, terms=terms, totals=totals), 6, **combined))(
        start, *flat, **given
    )

    w = tf.Variable(start)

    def in_tensorflow(x: Any, y: Any, tokens: Any, pairs: Any) -> Any:
        values = {"ce": tf.reduce_sum(w[:1] * x), "preference": tf.reduce_sum(w[1:] * y)}
        return values, {"tokens": tf.reduce_sum(tokens), "pairs": tf.reduce_sum(pairs)}

    step = AccumulatedStep(in_tensorflow, [w], lambda gradients, _: w.assign(gradients[0]), every=6, **settings)
    for row in zip(x, y, tokens, pairs, strict=True):
        step(*map(tf.constant, row), **given)
    assert equal_bits(np.asarray(received), w.numpy())
    none = np.zeros_like(x[0])
    if totals is None:
        listed = [
            {"tokens": Ratio(np.concatenate([a, none]), s.item()), "pairs": Ratio(np.concatenate([none, b]), p.item())}
            for a, b, s, p in zip(x, y, tokens, pairs, strict=True)
        ]
        assert equal_bits(gc.combine(reductions.ratios(["tokens", "pairs"], mean), listed, order=order), w.numpy())
    rows = [(x[:, 0], tokens), (y[:, 0], pairs)]
    expected = [(a.astype(np.float64) * (n > 0)).sum(0) / n.sum(dtype=np.float64) for a, n in rows]
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("totals", [None, "given"])
def test_a_partial_window_is_saved_flushed_and_divided(totals: Any, jit_compile: bool, tmp_path: Any) -> None:
    x, mask = data(3)
    given = {"totals": {"tokens": tf.constant(mask.sum()), "microbatches": tf.constant(3)}} if totals else {}

    def made() -> Any:
        w, b = tf.Variable(2.0), tf.Variable(-3.0)
        return w, AccumulatedStep(loss_over(w, b), [w, b], subtract, every=9, terms=TERMS, totals=totals)

    w, step = made()
    run = tf.function(step, jit_compile=jit_compile)
    for row in zip(x[:2], mask[:2], strict=True):
        run(*map(tf.constant, row), **given)
    path = tf.train.Checkpoint(step=step).save(str(tmp_path / "saved"))
    w, step = made()
    tf.train.Checkpoint(step=step).restore(path).assert_consumed()
    applied, _, metrics = step(x[2], mask[2], **given)
    assert not applied and float(metrics.value["ce"]) == 0
    applied, metrics = step.flush()
    x, mask = x.astype(np.float64), mask.astype(np.float64)
    sums, top = (x * mask).sum() / mask.sum(), x.max((1, 2)).mean()
    assert applied
    np.testing.assert_allclose([w.numpy(), metrics.value["ce"]], [2 - sums + 3 * top, 2 * sums - 3], rtol=1e-6)


SCALED = {
    "dynamic": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0, dynamic_growth_steps=1),
    "constant": lambda: keras.optimizers.SGD(0.5, loss_scale_factor=8.0),
}


@pytest.mark.parametrize(
    ("replicas", "totals", "name"),
    cases([(1, None, "dynamic"), (2, "given", "dynamic"), (1, "given", "constant")], (1, 2), (None, "given"), SCALED),
)
def test_the_loss_scale_of_an_optimizer_is_in_no_update_and_no_metric(replicas: int, totals: Any, name: str) -> None:
    """The scale doubles after each window."""
    x = np.float32([[1, 2], [6, 3], [2, 4], [1, 5]])[: 2 * replicas].reshape(2, replicas, 2)
    strategy = mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()
    with strategy.scope():
        w = tf.Variable(8.0)

        def loss(x: Any) -> Any:
            return {"fit": tf.reduce_sum(w * x), "decay": 1 * w}, {"tokens": 2, "microbatches": 1}

        terms = {"fit": "tokens", "decay": "microbatches"}
        step = tf.function(AccumulatedStep(loss, [w], SCALED[name](), every=2, terms=terms, totals=totals))
    known = {"tokens": tf.constant(4 * replicas), "microbatches": tf.constant(2 * replicas)}
    for before in (8, 6, 4):
        for k in range(2):
            rows = per_replica(strategy, x[k].__getitem__)
            applied, _, metrics = step(rows, **({"totals": known} if totals else {}))
        assert applied
        assert [float(metrics.value[term]) for term in terms] == [3 * before, before]
        assert w.numpy() == before - 0.5 * (3 + 1)


def test_refused() -> None:
    w, b = tf.Variable(2.0), tf.Variable(-3.0)

    def step(loss: Any = None, **settings: Any) -> AccumulatedStep:
        return AccumulatedStep(loss or loss_over(w, b), [w, b], subtract, every=2, **{"terms": TERMS, **settings})

    x, mask = (a[0] for a in data(1))
    refused = [
        (lambda: step(totals="counted"), "totals 'given' or None"),
        (lambda: step(terms=None, totals="given"), "terms, for totals"),
        (lambda: step(reduction=reductions.sum()), "a mean, from reductions.mean"),
        (lambda: step(reduction=reductions.mean(), totals="given"), "a sum, for terms"),
        (lambda: step(totals="given")(x, mask), "totals={...} in each call"),
        (lambda: step()(x, mask, totals={"tokens": 1, "microbatches": 1}), "totals={...} in each call"),
        (
            lambda: step(totals="given")(x, mask, totals={"tokens": 1}),
            "leaf ['microbatches']: expected a total of each",
        ),
        (lambda: step(lambda x, mask: ({"ce": w}, {}))(x, mask), "leaf ['z']: expected a value of each term"),
        (lambda: step(lambda x, mask: w)(x, mask), "a Ratio of each term, (values, weights) or (values, weights, outp"),
        (lambda: step(lambda x, mask: dict.fromkeys(TERMS, w * 1))(x, mask), "expected a weight of each denominator"),
        (
            lambda: step(lambda x, mask: {term: Ratio(w * 1, tf.shape(x)[:1]) for term in TERMS})(x, mask),
            "leaf ['tokens']: expected a weight of shape (), received one of shape (1,)",
        ),
    ]
    for call, message in refused:
        with pytest.raises(gc.GradCombineError) as caught:
            call()
        assert message in str(caught.value)
        assert str(caught.value).startswith("AccumulatedStep")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_microbatch_without_a_denominator_has_a_gradient_of_zeros(compiled: bool) -> None:
    w = tf.Variable(1.0)

    def loss(pairs: Any) -> Any:
        return {"pairwise": w * pairs}, {"pairs": pairs}

    step = AccumulatedStep(loss, [w], subtract, every=2, terms={"pairwise": "pairs"}, totals="given")
    run = tf.function(step) if compiled else step
    for pairs in (0.0, 4.0):
        run(tf.constant(pairs), totals={"pairs": tf.constant(4.0)})
    assert float(w) == 0
