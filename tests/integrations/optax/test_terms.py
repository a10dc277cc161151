"""Gradients with several denominators in an optax chain equal those of JAX's train_step, also over replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, grads_by_denominator, train_step, value_and_grad
from gradcombine.integrations.optax import accumulate, accumulate_and_apply, skip_not_finite
from gradcombine.verify.compare.ulp import equal_bits
from tests.spec.selection import FULL

TERMS = {"ce": "tokens", "z": "tokens", "preference": "sequences"}
PARAMS = {"w": jnp.float32([1, -2, 3, 0.5])}
X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
TOKENS, SEQUENCES = np.float32([3, 1, 4, 1, 0, 9]), np.float32([1, 0, 0, 2, 0, 1])


def loss(params: Any, x: Any, tokens: Any, sequences: Any) -> LossOutput:
    w = params["w"]
    values = {"ce": jnp.sum(w * x), "z": jnp.sum(w * w), "preference": jnp.sum(jnp.sin(w) * x)}
    return LossOutput(values, {"tokens": tokens, "sequences": sequences})


GRADS = jax.jit(grads_by_denominator(loss, TERMS))
ROWS = list(zip(X, TOKENS, SEQUENCES, strict=True))


def formula() -> np.ndarray:
    w, x = np.float64(PARAMS["w"]), X.astype(np.float64)
    ce = (x + 2 * w)[TOKENS > 0].sum(0) / TOKENS.sum(dtype=np.float64)
    return ce + (np.cos(w) * x)[SEQUENCES > 0].sum(0) / SEQUENCES.sum(dtype=np.float64)


@pytest.mark.full
@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
def test_a_window_is_the_formula_and_that_of_the_step(order: Any) -> None:
    tx = accumulate(optax.sgd(1.0), 6, denominators=["tokens", "sequences"], order=order)
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    for row in ROWS:
        output, grads = GRADS(PARAMS, *row)
        updates, state = update(grads, state, PARAMS, weight=output.weight)
    assert bool(state.applied)
    np.testing.assert_allclose(-updates["w"], formula(), rtol=1e-5)
    step = train_step(Loss(loss, terms=TERMS, batch_argnums=(1, 2, 3)), optax.sgd(1.0), every=6, order=order)
    held = step.init(PARAMS, *ROWS[0])
    for row in ROWS:
        params, held, metrics = step(jax.tree.map(jnp.copy, PARAMS), held, *row)
    assert bool(metrics.applied) and float(metrics.weight["tokens"]) == TOKENS.sum()
    assert equal_bits(params["w"], PARAMS["w"] + updates["w"])


@pytest.mark.full
def test_known_totals_are_a_sum() -> None:
    totals = {"tokens": TOKENS.sum(), "sequences": SEQUENCES.sum()}
    tx = accumulate(optax.sgd(1.0), 6, reduction=reductions.sum())
    state = tx.init(PARAMS)

    def batched(params: Any, x: Any, tokens: Any, sequences: Any) -> LossOutput:
        return loss(params, x[0], tokens[0], sequences[0])

    function = jax.jit(value_and_grad(Loss(batched, terms=TERMS, totals="given"), 1))
    for row in ROWS:
        _, grads = function(PARAMS, *(a[None] for a in row), totals=totals)
        updates, state = tx.update(grads, state, PARAMS)
    np.testing.assert_allclose(-updates["w"], formula(), rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("apply", [False, True])
def test_skipped_flushed_narrow_and_over_replicas(apply: bool) -> None:
    settings = {"denominators": ["tokens", "sequences"], "over": gc.jax_axis("d"), "skip": skip_not_finite()}
    tx = (accumulate_and_apply if apply else accumulate)(optax.sgd(1.0), 99, **settings)

    def window(rows: Any) -> Any:
        state, params = tx.init(PARAMS), PARAMS
        for i in range(4):  # the last microbatch is skipped and flushes
            output, grads = grads_by_denominator(loss, TERMS)(PARAMS, *(a[i] for a in rows))
            grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), grads)
            if i % 2 == 0:
                grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
            run = tx.apply if apply else tx.update
            params, state = run(grads, state, params if apply else PARAMS, weight=output.weight, flush=i == 3)
        return params, state.applied

    bad = np.full(4, np.nan, np.float32)
    rows = [np.stack([np.stack([*X[:3], bad]), np.stack([*X[3:], X[0]])])]
    rows += [np.stack([[*a[:3], 1], [*a[3:], 1]]).astype(np.float32) for a in (TOKENS, SEQUENCES)]
    with jax.numpy_dtype_promotion("standard"):  # optax adds narrow updates to wide parameters
        result, applied = jax.vmap(window, axis_name="d")(rows)
    assert applied.all()
    moved = np.asarray(result["w"]) - (np.asarray(PARAMS["w"]) if apply else 0)
    for replica in moved.astype(np.float64):
        np.testing.assert_allclose(-replica, formula(), rtol=3e-2)


def test_refused() -> None:
    tx = accumulate(optax.sgd(1.0), 2, denominators=["tokens", "sequences"])
    state, grads, weight = tx.init(PARAMS), {"tokens": PARAMS, "sequences": PARAMS}, {"tokens": 1, "sequences": 1}
    refused = [
        (lambda: tx.update(grads, state, weight=3), "a weight of each denominator, as a dict of"),
        (lambda: tx.update(grads, state, weight={"tokens": 1}), "leaf ['sequences']"),
        (lambda: tx.update(grads, state, weight=weight | {"tokens": -1}), "leaf ['tokens']: expected a finite weight"),
        (lambda: tx.update(PARAMS, state, weight=weight), "gradients of each denominator"),
        (lambda: accumulate(optax.sgd(1.0), 2, denominators=[]), "names of denominators"),
        (lambda: accumulate(optax.sgd(1.0), 2, denominators="tokens"), "names of denominators"),
        (lambda: accumulate(optax.sgd(1.0), 2, denominators=["n"], reduction=reductions.max()), "a mean"),
    ]
    for call, message in refused:
        with pytest.raises(gc.GradCombineError) as caught:
            call()
        assert message in str(caught.value)
        assert str(caught.value).startswith("accumulate")
