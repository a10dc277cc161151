"""Each planted defect of accumulation in optax is named."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine import GradCombineError, reductions
from gradcombine.integrations.optax import accumulate
from gradcombine.verify import Cause, check_microbatches
from tests.verify.microbatches.problem import (
    ALIKE,
    EVERY,
    FULL,
    PARAMS,
    by_hand,
    check,
    last_only,
    optimizer,
    schedule,
    summed,
    weighted,
)

SGD = optax.sgd(0.1)


def narrow(dtype: str) -> Any:
    return lambda inner, k: accumulate(inner, k, reduction=reductions.mean(dtype=dtype))


def before(transformation: Any) -> Any:
    """Applies the transformation to the gradients of each microbatch, before accumulation."""
    return lambda inner, k: optax.chain(transformation, accumulate(inner, k))


def after(transformation: Any) -> Any:
    """Applies the transformation to the updates that come out of the accumulation."""
    return lambda inner, k: optax.chain(accumulate(inner, k), transformation)


def on_the_mean(transformation: Any) -> Any:
    return lambda inner, k: accumulate(optax.chain(transformation, inner), k)


def elementwise(function: Any) -> Any:
    return before(optax.stateless_with_tree_map(lambda g, _: function(g)))


def of_length(every: int) -> Any:
    return lambda inner, k: accumulate(inner, every)


def in_eighths(g: Any) -> Any:
    """Quantizes a gradient to eight bits: the error is about that of bfloat16."""
    unit = jnp.max(jnp.abs(g)) / 127
    return jnp.round(g / unit) * unit


multi_steps = optax.MultiSteps
LAST = {"arguments": last_only}
PARTIAL = {"arguments": last_only, "partial": True}

FAULTS = {
    "weights forgotten": (FULL, accumulate, {}, Cause.MEAN_OF_MEANS, 0),
    "weights forgotten by optax": (FULL, multi_steps, {}, Cause.MEAN_OF_MEANS, 0),
    "summed": (ALIKE, partial(multi_steps, use_grad_mean=False), {}, Cause.SUM, 0),
    "scaled by 1 / k": (ALIKE, before(optax.scale(0.25)), {}, Cause.SCALED, 0),
    "a loss that is a sum": (FULL, accumulate, {"arguments": weighted, "loss": summed}, Cause.COEFFICIENTS, 0),
    "clipping by norm": (ALIKE, before(optax.clip_by_global_norm(0.5)), {}, Cause.CHANGED_BEFORE, 0),
    "clipping by element": (ALIKE, before(optax.clip(0.1)), {}, Cause.CHANGED_BEFORE, 0),
    "normalized": (ALIKE, before(optax.normalize_by_update_norm()), {}, Cause.CHANGED_BEFORE, 0),
    "the mean clipped": (ALIKE, on_the_mean(optax.clip_by_global_norm(0.5)), {}, Cause.CHANGED_MEAN, 0),
    "the mean clipped by element": (ALIKE, on_the_mean(optax.clip(0.1)), {}, Cause.CHANGED_MEAN, 0),
    "decay before": (ALIKE, before(optax.add_decayed_weights(1e-2)), {}, Cause.ADDED, 0),
    "much decay before": (ALIKE, before(optax.add_decayed_weights(0.3)), {}, Cause.ADDED, 0),
    "little decay before, weighted": (
        FULL, before(optax.add_decayed_weights(1e-4)), {"arguments": weighted}, Cause.ADDED, 0,
    ),
    "decay of the mean": (ALIKE, on_the_mean(optax.add_decayed_weights(1e-2)), {}, Cause.ADDED, 0),
    "noise": (ALIKE, before(optax.add_noise(1e-3, 0.0, jax.random.key(0))), {}, Cause.ADDED, 0),
    "quantized": (ALIKE, elementwise(in_eighths), {}, Cause.UNEXPLAINED, 0),
    "rounded to bfloat16 before": (
        ALIKE, elementwise(lambda g: g.astype("bfloat16").astype(g.dtype)), {}, Cause.CHANGED_BEFORE, 0,
    ),
    "scaled by the sign": (ALIKE, elementwise(lambda g: g * jnp.where(g > 0, 1.01, 1)), {}, Cause.CHANGED_BEFORE, 0),
    "float16": (ALIKE, narrow("float16"), {}, Cause.PRECISION, 0),
    "float16 in optax": (ALIKE, partial(multi_steps, accumulator_dtype=jnp.float16), {}, Cause.PRECISION, 0),
    "decay outside": (ALIKE, after(optax.add_decayed_weights(-1e-2)), {}, Cause.MOVED, 0),
    "schedule outside": (ALIKE, after(optax.scale_by_schedule(schedule)), {}, Cause.CHANGED_AFTER, 0),
    "state kept at every microbatch": (ALIKE, partial(by_hand, kept=True), LAST, Cause.COUNTED, 0),
    "bfloat16": (ALIKE, narrow("bfloat16"), {}, Cause.PRECISION, 0),
    "bfloat16 in optax": (ALIKE, partial(multi_steps, accumulator_dtype=jnp.bfloat16), {}, Cause.PRECISION, 0),
    "a window too short": (ALIKE, of_length(2), {}, Cause.WINDOW, 0),
    "a window too long": (ALIKE, of_length(8), {}, Cause.WINDOW, 0),
    "no accumulation": (ALIKE, lambda inner, k: inner, {}, Cause.WINDOW, 0),
    "an accumulator that is not cleared": (ALIKE, partial(by_hand, cleared=False), LAST, Cause.LEAKS, 0),
    "partial dropped": (ALIKE, partial(by_hand, dropped=True), PARTIAL, Cause.PARTIAL_DROPPED, 2),
    "partial left in the accumulator": (ALIKE, partial(by_hand, stale=True), PARTIAL, Cause.LEAKS, 2),
    "partial goes on": (ALIKE, accumulate, {"partial": True}, Cause.LEAKS, 2),
    "partial divided by k": (ALIKE, partial(by_hand, divisor=EVERY), PARTIAL, Cause.PARTIAL_SCALED, 2),
    "a NaN stays": (ALIKE, multi_steps, {}, Cause.NAN_LEAKS, 1),
}  # fmt: skip


QUICK = (
    *("weights forgotten", "summed", "clipping by element", "decay outside", "a window too short"),
    *("state kept at every microbatch", "partial left in the accumulator", "a NaN stays"),
)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in FAULTS])
def test_a_planted_fault_is_named(name: str) -> None:
    batch, accumulating, options, cause, window = FAULTS[name]
    inner = optax.identity() if cause is Cause.CHANGED_AFTER else SGD
    report = check(batch, inner, accumulating, **options)
    assert not report.passes
    assert report.faults[0].cause is cause, str(report)
    assert window == 0 or f"window {window}" in report.faults[0].run
    assert str(cause) in str(report)


def test_all_causes_are_listed() -> None:
    report = check(FULL, SGD, partial(by_hand, dropped=True), **PARTIAL)
    assert [fault.cause for fault in report.faults] == [Cause.MEAN_OF_MEANS, Cause.PARTIAL_DROPPED]


def test_an_optimizer_that_runs_at_each_microbatch_is_the_only_cause() -> None:
    report = check(ALIKE, SGD, lambda inner, k: optax.chain(inner, optax.apply_every(k)))
    assert [fault.cause for fault in report.faults] == [Cause.COUNTED]


@pytest.mark.parametrize("partial", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_right_accumulation_passes(partial: bool) -> None:
    report = check(FULL, optimizer(), accumulate, arguments=weighted, partial=partial, microbatches=[2, 3, 4])
    assert report.passes, str(report)
    assert report.cause is None
    assert {run.name for run in report.runs} >= {"3 microbatches", "the accumulator with 3 microbatches"}
    assert all(run.invariance <= 1 for run in report.runs)
    assert report.not_asked == (() if partial else ("partial windows",))


@pytest.mark.full
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_every_right_form_of_the_mean_is_within_the_bound(order: Any) -> None:
    found = check(FULL, SGD, partial(accumulate, order=order), arguments=weighted)
    assert found.passes, str(found)
    # Welford's mean is correct except that a NaN leaks into the next window.
    assert [fault.cause for fault in check(ALIKE, SGD, multi_steps).faults] == [Cause.NAN_LEAKS]
    assert check(ALIKE, SGD, by_hand, arguments=last_only).passes


@pytest.mark.full
@pytest.mark.parametrize(("accumulating", "cause"), [(accumulate, None), (narrow("bfloat16"), Cause.PRECISION)])
def test_bfloat16_gradients_may_be_rounded_once(accumulating: Any, cause: Cause | None) -> None:
    params, batch = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (PARAMS, ALIKE))
    report = check(batch, SGD, accumulating, params=params)
    assert (report.passes, report.cause) == (cause is None, cause), str(report)


@pytest.mark.full
def test_tokens_weigh() -> None:
    rng = np.random.default_rng(1)

    def masked(params: Any, batch: Any) -> Any:
        errors = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])

    def by_tokens(batch: Any, last: bool) -> Any:
        return {"weight": batch["mask"].sum(), "flush": last}

    mask = (rng.random(16) < 0.6).astype(np.float32)
    mask[::4] = 1
    batch = ALIKE | {"mask": mask}
    tokens = check(batch, SGD, accumulate, loss=masked, arguments=by_tokens)
    assert tokens.passes, str(tokens)
    examples = check(batch, SGD, accumulate, loss=masked, arguments=weighted)
    assert examples.cause is Cause.MEAN_OF_MEANS, str(examples)


@pytest.mark.full
def test_examples_that_depend_on_each_other_are_found() -> None:
    def normalized_loss(params: Any, batch: Any) -> Any:
        made = batch["x"] @ params["w"] + params["b"]
        return jnp.mean(((made - made.mean()) / jnp.sqrt(made.var() + 0.1) - batch["y"]) ** 2)

    report = check(ALIKE, SGD, accumulate, loss=normalized_loss)
    assert report.cause is Cause.STATISTICS, str(report)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loss_of_its_own_precision_is_checked_in_float64(dtype: Any) -> None:
    def narrow(params: Any, batch: Any, of: Any = jnp.mean) -> Any:
        made = batch["x"].astype(dtype) @ params["w"].astype(dtype) + params["b"].astype(dtype)
        return of((made - batch["y"].astype(dtype)) ** 2)

    report = check(ALIKE, SGD, accumulate, loss=narrow)
    assert report.passes, str(report)
    assert check(ALIKE, SGD, accumulate, loss=partial(narrow, of=jnp.sum)).cause is Cause.SCALED


@pytest.mark.full
@pytest.mark.parametrize(("of", "cause"), [(jnp.mean, None), (jnp.sum, Cause.SCALED)])
def test_a_loss_that_python_computes_is_checked_in_its_own_precision(of: Any, cause: Cause | None) -> None:
    @jax.custom_vjp
    def by_python(x: Any) -> Any:
        made = jax.pure_callback(np.square, jax.ShapeDtypeStruct(x.shape, np.float32), x.astype(np.float32))
        return made.astype(x.dtype)

    by_python.defvjp(lambda x: (by_python(x), x), lambda x, g: (2 * g * by_python(x) / x,))

    def foreign(params: Any, batch: Any) -> Any:
        return of(by_python(batch["x"] @ params["w"] + params["b"] - batch["y"]))

    assert check(ALIKE, SGD, accumulate, loss=foreign).cause is cause


def test_leaves_without_a_gradient() -> None:
    params = PARAMS | {"unused": None}
    report = check(ALIKE, SGD, accumulate, params=params)
    assert report.passes, str(report)


@pytest.mark.parametrize(
    ("params", "received"),
    [
        ({"w": np.zeros(2, np.float32), b"k": np.zeros(2, np.float32)}, "ValueError"),
        ({"w": np.array({"w": 1.0}, object)}, "TypeError"),
        ({"w": [[[]]]}, ""),
    ],
    ids=["keys without an order", "objects", "none"],
)
def test_parameters_that_the_loss_cannot_take_are_refused(params: Any, received: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        return jnp.mean((x @ p["w"]) ** 2)

    batch = np.ones((4, 2), np.float32)
    with pytest.raises(GradCombineError, match=f"^check_microbatches: expected .*{received}"):
        check_microbatches(loss, params, batch, optax.sgd(0.1), optax.MultiSteps)


@pytest.mark.parametrize(
    ("batch", "inner", "accumulating", "options", "message"),
    [
        ({}, SGD, accumulate, {}, "a batch of two examples or more, received none"),
        (ALIKE, SGD, accumulate, {"microbatches": [32]}, "as many examples as parts: 32 microbatches"),
        (ALIKE, SGD, lambda inner, k: accumulate(SGD, k), {}, "inner transformation once, received 0 times"),
        (ALIKE, SGD, lambda inner, k: optax.chain(accumulate(inner, k), accumulate(inner, k)), {}, "received 2 times"),
        (ALIKE, SGD, lambda inner, k: 3, {}, "received AttributeError"),
        (ALIKE, "sgd", accumulate, {}, "an optax transformation or a Keras optimizer, received str"),
        (
            ALIKE,
            SGD,
            accumulate,
            {"loss": lambda params, batch: params["w"][0] * np.float32("nan")},
            "finite gradients",
        ),
    ],
)
def test_is_refused(batch: Any, inner: Any, accumulating: Any, options: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=f"^check_microbatches: .*{message}"):
        check(batch, inner, accumulating, **options)
