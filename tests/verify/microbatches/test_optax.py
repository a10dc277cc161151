"""Each way in which microbatches go wrong in optax is planted, and named."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.optax import accumulate
from gradcombine.verify import Cause, Verdict, check_microbatches
from tests.verify.microbatches.problem import (
    ALIKE,
    ALIKE_PARTIAL,
    EVERY,
    FULL,
    PARAMS,
    PARTIAL,
    by_hand,
    check,
    last_only,
    optimizer,
    right,
    schedule,
    summed,
    weighted,
)

SGD = optax.sgd(0.1)


def bf16(inner: Any) -> Any:
    return accumulate(inner, EVERY, reduction=reductions.mean(dtype="bfloat16"))


def clipped(inner: Any) -> Any:
    return optax.chain(optax.clip_by_global_norm(0.5), right(inner))


def clipped_by_element(inner: Any) -> Any:
    return optax.chain(optax.clip(0.1), right(inner))


def normalized(inner: Any) -> Any:
    return optax.chain(optax.normalize_by_update_norm(), right(inner))


def decayed(inner: Any) -> Any:
    return optax.chain(right(inner), optax.add_decayed_weights(-1e-2))


def scheduled(inner: Any) -> Any:
    return optax.chain(right(inner), optax.scale_by_schedule(schedule))


def scaled(inner: Any) -> Any:
    return optax.chain(optax.scale(0.25), right(inner))


def clipped_mean(clip: Any) -> Any:
    return lambda inner: accumulate(optax.chain(clip, inner), EVERY)


def decayed_before(rate: float, wrap: Any = right) -> Any:
    return lambda inner: optax.chain(optax.add_decayed_weights(rate), wrap(inner))


def noisy(inner: Any) -> Any:
    return optax.chain(optax.add_noise(1e-3, 0.0, jax.random.key(0)), right(inner))


def elementwise(function: Any, wrap: Any = right) -> Any:
    return lambda inner: optax.chain(optax.stateless_with_tree_map(lambda g, _: function(g)), wrap(inner))


def in_eighths(g: Any) -> Any:
    """What a quantization to eight bits makes of a gradient: within what bfloat16 would do, and of its scale."""
    unit = jnp.max(jnp.abs(g)) / 127
    return jnp.round(g / unit) * unit


def multi_steps(inner: Any, **options: Any) -> Any:
    return optax.MultiSteps(inner, EVERY, **options)


FAULTS = {
    "weights forgotten": (FULL, right, {}, Cause.MEAN_OF_MEANS, 0),
    "weights forgotten by optax": (FULL, multi_steps, {}, Cause.MEAN_OF_MEANS, 0),
    "summed": (ALIKE, partial(multi_steps, use_grad_mean=False), {}, Cause.SUM, 0),
    "scaled by 1 / k": (ALIKE, scaled, {}, Cause.SCALED, 0),
    "a loss that is a sum": (FULL, right, {"arguments": weighted, "loss": summed}, Cause.LOSS, 0),
    "clipping by norm": (ALIKE, clipped, {}, Cause.CHANGED_BEFORE, 0),
    "clipping by element": (ALIKE, clipped_by_element, {}, Cause.CHANGED_BEFORE, 0),
    "normalized": (ALIKE, normalized, {}, Cause.COEFFICIENTS, 0),
    "the mean clipped": (ALIKE, clipped_mean(optax.clip_by_global_norm(0.5)), {}, Cause.CHANGED_MEAN, 0),
    "the mean clipped by element": (ALIKE, clipped_mean(optax.clip(0.1)), {}, Cause.CHANGED_MEAN, 0),
    "decay before": (ALIKE, decayed_before(1e-2), {}, Cause.ADDED, 0),
    "much decay before": (ALIKE, decayed_before(0.3), {}, Cause.ADDED, 0),
    "little decay before, weighted": (FULL, decayed_before(1e-4), {"arguments": weighted}, Cause.ADDED, 0),
    "decay of the mean": (ALIKE, clipped_mean(optax.add_decayed_weights(1e-2)), {}, Cause.ADDED, 0),
    "noise": (ALIKE, noisy, {}, Cause.ADDED, 0),
    "quantized": (ALIKE, elementwise(in_eighths), {}, Cause.UNKNOWN, 0),
    "rounded to bfloat16 before": (ALIKE, elementwise(lambda g: g.astype("bfloat16").astype(g.dtype)), {},
                                   Cause.UNKNOWN, 0),
    "scaled by the sign": (ALIKE, elementwise(lambda g: g * jnp.where(g > 0, 1.01, 1)), {}, Cause.UNKNOWN, 0),
    "float16": (ALIKE, lambda inner: accumulate(inner, EVERY, reduction=reductions.mean(dtype="float16")), {},
                Cause.PRECISION, 0),
    "float16 in optax": (ALIKE, partial(multi_steps, accumulator_dtype=jnp.float16), {}, Cause.PRECISION, 0),
    "decay outside": (ALIKE, decayed, {}, Cause.MOVED, 0),
    "schedule outside": (ALIKE, scheduled, {}, Cause.CHANGED_AFTER, 0),
    "state kept at every microbatch": (ALIKE, partial(by_hand, kept=True), {"arguments": last_only}, Cause.COUNTED, 0),
    "bfloat16": (ALIKE, bf16, {}, Cause.PRECISION, 0),
    "bfloat16 in optax": (ALIKE, partial(multi_steps, accumulator_dtype=jnp.bfloat16), {}, Cause.PRECISION, 0),
    "a window too short": (ALIKE, lambda inner: accumulate(inner, 2), {}, Cause.WINDOW, 0),
    "a window too long": (ALIKE, lambda inner: accumulate(inner, 8), {}, Cause.WINDOW, 0),
    "no accumulation": (ALIKE, lambda inner: inner, {}, Cause.WINDOW, 0),
    "partial dropped": (
        ALIKE_PARTIAL, partial(by_hand, dropped=True), {"arguments": last_only}, Cause.PARTIAL_DROPPED, 2,
    ),
    "partial left in the accumulator": (
        ALIKE_PARTIAL, partial(by_hand, stale=True), {"arguments": last_only}, Cause.PARTIAL_LEAKS, 2,
    ),
    "partial goes on": (ALIKE_PARTIAL, right, {}, Cause.PARTIAL_LEAKS, 2),
    "partial in the middle": ([ALIKE[0], ALIKE[1][:2], ALIKE[2]], right, {}, Cause.PARTIAL_LEAKS, 1),
    "partial divided by k": (
        ALIKE_PARTIAL, partial(by_hand, divisor=EVERY), {"arguments": last_only}, Cause.PARTIAL_SCALED, 2,
    ),
    "a NaN stays": (ALIKE, multi_steps, {}, Cause.NAN_LEAKS, 1),
}  # fmt: skip


QUICK = (
    *("weights forgotten", "summed", "clipping by element", "decay outside", "a window too short"),
    *("state kept at every microbatch", "partial left in the accumulator", "a NaN stays"),
)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in FAULTS])
def test_a_planted_fault_is_named(name: str) -> None:
    windows, accumulating, options, cause, window = FAULTS[name]
    inner = optax.identity() if cause is Cause.CHANGED_AFTER else SGD
    report = check(windows, inner, accumulating, **options)
    assert not report.passes
    assert (report.faults[0].cause, report.faults[0].window) == (cause, window), str(report)
    assert str(cause) in str(report)


def test_a_partial_window_leaks_only_where_the_next_one_depends_on_it() -> None:
    """The next window is wrong as well, but by weights that are forgotten."""
    report = check(PARTIAL, SGD, partial(by_hand, dropped=True), arguments=last_only)
    assert [fault.cause for fault in report.faults] == [Cause.MEAN_OF_MEANS, Cause.PARTIAL_DROPPED]


@pytest.mark.parametrize(
    "windows",
    [
        pytest.param(FULL, marks=pytest.mark.full),
        PARTIAL,
        pytest.param([FULL[0], FULL[1][:2], FULL[2]], marks=pytest.mark.full),
    ],
)
def test_a_right_accumulation_passes(windows: Any) -> None:
    report = check(windows, optimizer(), right, arguments=weighted)
    assert report.passes, str(report)
    assert report.cause is None
    assert len(report.windows) == (4 if windows is PARTIAL else 3)
    assert all(window.share is not None and window.share <= 1 for window in report.windows)
    assert str(report).startswith(f"microbatches equal one batch: {len(report.windows)} windows")


@pytest.mark.full
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_every_right_form_of_the_mean_is_within_the_bound(order: Any) -> None:
    found = check(FULL, SGD, lambda inner: accumulate(inner, EVERY, order=order), arguments=weighted)
    assert found.passes, str(found)
    # Welford's mean: right, but for a NaN, which is the next fault.
    assert [fault.cause for fault in check(ALIKE, SGD, multi_steps).faults] == [Cause.NAN_LEAKS]
    assert check(ALIKE, SGD, by_hand, arguments=last_only).passes


@pytest.mark.full
@pytest.mark.parametrize(("accumulating", "cause"), [(right, None), (bf16, Cause.PRECISION)])
def test_bfloat16_gradients_may_be_rounded_once(accumulating: Any, cause: Cause | None) -> None:
    narrow = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    batches = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), ALIKE)
    report = check(batches, SGD, accumulating, params=narrow)
    assert (report.passes, report.cause) == (cause is None, cause)


def test_tokens_weigh() -> None:
    rng = np.random.default_rng(1)

    def masked(params: Any, batch: Any) -> Any:
        errors = (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2
        return jnp.sum(errors * batch["mask"]) / jnp.sum(batch["mask"])

    def with_mask(batch: Any) -> Any:
        mask = (rng.random(len(batch["y"])) < 0.6).astype(np.float32)
        mask[0] = 1
        return batch | {"mask": mask}

    windows = [[with_mask(batch) for batch in window] for window in ALIKE]
    tokens = check(windows, SGD, right, loss=masked, arguments=weighted, weights=lambda batch: batch["mask"].sum())
    assert tokens.passes, str(tokens)
    examples = check(windows, SGD, right, loss=masked, arguments=weighted)
    assert examples.cause is Cause.LOSS
    assert "their coefficients in it are " in str(examples)


@pytest.mark.full
def test_examples_that_depend_on_each_other_are_found() -> None:
    def normalized_loss(params: Any, batch: Any) -> Any:
        made = batch["x"] @ params["w"] + params["b"]
        return jnp.mean(((made - made.mean()) / jnp.sqrt(made.var() + 0.1) - batch["y"]) ** 2)

    report = check(ALIKE, SGD, right, loss=normalized_loss)
    assert report.cause is Cause.LOSS
    assert "batch normalization" in str(report)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_loss_of_its_own_precision_is_checked_in_float64(dtype: Any) -> None:
    def narrow(params: Any, batch: Any, of: Any = jnp.mean) -> Any:
        made = batch["x"].astype(dtype) @ params["w"].astype(dtype) + params["b"].astype(dtype)
        return of((made - batch["y"].astype(dtype)) ** 2)

    report = check(ALIKE, SGD, right, loss=narrow)
    assert report.passes and report.full_batch is not None, str(report)
    assert check(ALIKE, SGD, right, loss=partial(narrow, of=jnp.sum)).cause is Cause.LOSS


def test_a_loss_that_python_computes_cannot_be_told() -> None:
    @jax.custom_vjp
    def by_python(x: Any) -> Any:
        return jax.pure_callback(np.square, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    by_python.defvjp(lambda x: (by_python(x), x), lambda x, g: (2 * g * by_python(x) / x,))

    def foreign(params: Any, batch: Any) -> Any:
        return jnp.mean(by_python(batch["x"] @ params["w"] + params["b"] - batch["y"]))

    report = check(ALIKE, SGD, right, loss=foreign)
    assert report.verdict is Verdict.CANNOT_TELL and report.full_batch is None and not report.passes
    assert "not checked, since pure_callback computes in float32" in str(report)


def test_leaves_without_a_gradient() -> None:
    params = PARAMS | {"unused": None}
    report = check(ALIKE, SGD, right, params=params)
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

    windows = [[np.ones((2, 2), np.float32)] * 2]
    with pytest.raises(gc.GradCombineError, match=f"^check_microbatches: expected .*{received}"):
        check_microbatches(loss, params, windows, optax.sgd(0.1), lambda inner: optax.MultiSteps(inner, 2))


def test_parameters_that_contain_themselves_are_refused_before_jax_sees_them() -> None:
    params: dict[str, Any] = {"w": np.zeros(2, np.float32)}
    params["self"] = params
    windows = [[np.ones((2, 2), np.float32)] * 2]
    for _ in range(2):
        with pytest.raises(gc.GradCombineError, match="check_microbatches"):
            check_microbatches(lambda p, x: x.mean(), params, windows, optax.sgd(0.1), lambda inner: inner)
    assert jnp.zeros(2).sum() == 0
