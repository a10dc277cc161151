"""Defects planted in a trainer of a token-weighted language model, and harmless changes to it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, check_step
from tests.verify.steps import language_model as lm
from tests.verify.steps.dividing import jitted

pytestmark = pytest.mark.usefixtures("as_users_do")

PARAMS, BATCH = lm.problem()
TX = {"adamw": optax.adamw(0.1), "sgd": optax.sgd(0.1)}
CLIP = optax.clip_by_global_norm(0.05)


@cache
def warm(tx: Any) -> Any:
    """Optimizer state after three updates."""
    rng, state = np.random.default_rng(5), tx.init(PARAMS)
    for _ in range(3):
        grads = jax.tree.map(lambda x: (0.01 * rng.normal(size=x.shape)).astype(np.float32), PARAMS)
        _, state = jax.jit(tx.update)(grads, state, PARAMS)
    return jax.tree.map(np.asarray, state)


@jax.jit
def terms(params: Any, batch: Any) -> Any:
    made = lm.Model().sums(params, batch)
    return made | {"aux": (lm.scaled(made["aux"][0], lm.AUX), made["aux"][1])}


def check(trainer: lm.Trainer, dtype: Any, tx: Any, **options: Any) -> Any:
    trainer = trainer._replace(model=trainer.model._replace(dtype=dtype))
    division = {"microbatches": (4,), "devices": (1,)}
    if trainer.exchange is not None:
        division = {"microbatches": (1,), "devices": (4,)}
    return check_step(partial(trainer.step, tx, warm(tx)), PARAMS, BATCH, returns="params", **division, **options)


def means(parts: list[Any], aux: float) -> list[Any]:
    return [lm.both([part], aux) for part in parts]


def clipped(grads: Any) -> Any:
    return CLIP.update(grads, CLIP.init(grads))[0]


def in_bfloat16(parts: list[Any], k: int, aux: float) -> Any:
    total = lm.scaled(parts[0]["ce"][0], 0.0)
    for x in parts if k > 1 else []:
        total = jax.tree.map(lambda a, b: (a + b).astype(jnp.bfloat16).astype(jnp.float32), total, x["ce"][0])
    return lm.both(parts, aux) if k == 1 else lm.scaled(total, 1 / sum(x["ce"][1] for x in parts))


def lost(parts: list[Any], k: int, aux: float) -> Any:
    return lm.both(parts, 0.0 if k > 1 else aux)


def by_tokens(parts: list[Any], k: int, aux: float) -> Any:
    tokens = lm.total(parts, "ce")[1]
    ce, (sums, count) = lm.over(lm.total(parts, "ce")), lm.total(parts, "aux")
    return lm.plus(ce, lm.scaled(lm.over((sums, count), tokens if k > 1 else None), aux))


def summed(local: Any, aux: float) -> Any:
    return lm.both([jax.lax.psum(local, "data")], aux)


T = lm.Trainer
DEFECTS: dict[str, tuple[Cause, lm.Trainer]] = {
    "mean of means": (Cause.MEAN_OF_MEANS, T(combine=lambda x, k, aux: lm.scaled(lm.plus(*means(x, aux)), 1 / k))),
    "sum of means": (Cause.SUM, T(combine=lambda x, k, aux: lm.plus(*means(x, aux)))),
    "divided twice": (Cause.SCALED, T(combine=lambda x, k, aux: lm.scaled(lm.both(x, aux), 1 / k))),
    "a factor": (Cause.SCALED, T(combine=lambda x, k, aux: lm.scaled(lm.both(x, aux), 0.37 if k > 1 else 1.0))),
    "last microbatch dropped": (Cause.LOST, T(combine=lambda x, k, aux: lm.both(x[: max(1, k - 1)], aux))),
    "first microbatch twice": (Cause.DOUBLED, T(combine=lambda x, k, aux: lm.both(x[:1] * (k > 1) + x, aux))),
    "labels rolled over a microbatch": (Cause.NEIGHBOURS, T(model=lm.Model(rolled=True))),
    "one key for all microbatches": (Cause.KEY, T(model=lm.Model(keys="place"))),
    "an update each": (Cause.MOVED_EACH, T(each=True)),
    "decay each": (Cause.MOVED, T(decay=0.01)),
    "clipping each": (
        Cause.CHANGED_BEFORE,
        T(combine=lambda x, k, aux: lm.scaled(lm.plus(*map(clipped, means(x, aux))), 1 / k)),
    ),
    "aux lost": (Cause.DENOMINATOR, T(combine=lost, aux=lm.AUX)),
    "aux by tokens": (Cause.DENOMINATOR, T(combine=by_tokens, aux=lm.AUX)),
    "mean of means of two terms": (
        Cause.DENOMINATOR,
        T(combine=lambda x, k, aux: lm.scaled(lm.plus(*means(x, aux)), 1 / k), aux=lm.AUX),
    ),
    "no exchange": (Cause.NOT_EXCHANGED, T(exchange=lambda local, aux: lm.both([local], aux))),
    "mean of the devices' means": (
        Cause.MEAN_OF_MEANS,
        T(exchange=lambda local, aux: jax.lax.pmean(lm.both([local], aux), "data")),
    ),
    "narrow accumulator": (Cause.PRECISION, T(combine=in_bfloat16)),
}


def weighted(parts: list[Any], k: int, aux: float) -> Any:
    tokens = sum(x["ce"][1] for x in parts)
    return lm.plus(*(lm.scaled(lm.both([x], aux), x["ce"][1] / tokens) for x in parts))


def welford(parts: list[Any], k: int, aux: float) -> Any:
    mean, seen = lm.both(parts[:1], aux), parts[0]["ce"][1]
    for x in parts[1:]:
        seen += x["ce"][1]
        step = lm.scaled(lm.plus(lm.both([x], aux), lm.scaled(mean, -1.0)), x["ce"][1] / seen)
        mean = lm.plus(mean, step)
    return mean


def pairwise(parts: list[Any], k: int, aux: float) -> Any:
    while len(parts) > 1:
        parts = [jax.tree.map(jnp.add, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return lm.both(parts, aux)


def accumulated(parts: list[Any], k: int, aux: float) -> Any:
    acc = gc.accumulator(lm.over(parts[0]["ce"]), every=k)
    state = acc.init()
    for x in parts:
        state = acc.update(lm.over(x["ce"]), state, weight=x["ce"][1])
    return acc.value(state)


def one_by_one(function: Any, parts: Any) -> Any:
    made = [function(jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(len(parts["id"]))]
    return jax.tree.map(lambda *x: jnp.stack(x), *made)


HARMLESS: dict[str, lm.Trainer] = {
    "reverse order": T(combine=lambda x, k, aux: lm.both(x[::-1], aux)),
    "weighted means": T(combine=weighted),
    "divided first": T(
        combine=lambda x, k, aux: lm.plus(*(lm.over(y["ce"], sum(z["ce"][1] for z in x)) for y in x)),
    ),
    "Welford's mean": T(combine=welford),
    "added in pairs": T(combine=pairwise),
    "two terms": T(aux=lm.AUX),
    "strided": T(divide=lm.strided),
    "all microbatches at once": T(loop=lambda function, parts: jax.vmap(function)(parts)),
    "unrolled": T(loop=one_by_one),
    "rematerialized": T(loop=lambda function, parts: jax.lax.map(jax.checkpoint(function), parts)),
    "one-hot embedding lookup": T(model=lm.Model(onehot=True)),
    "a key for each sentence": T(model=lm.Model(keys="id")),
    "clipping of the mean": T(combine=lambda x, k, aux: clipped(lm.both(x, aux))),
    "exchanged": T(exchange=summed),
}
SETTINGS = {"float32-sgd": (jnp.float32, "sgd"), "bfloat16-adamw": (jnp.bfloat16, "adamw")}


UNNAMED = {
    # Adam's state changes within the window, or gradients and update are taken at different parameters.
    *("an update each-bfloat16-adamw", "decay each-bfloat16-adamw"),
    # The bfloat16 model itself rounds as much.
    "narrow accumulator-bfloat16-adamw",
}
"""Defects for which `check_step` has no name or that it attributes to rounding."""


def of(names: Iterable[str]) -> Any:
    quick = {"mean of means-bfloat16-adamw", "weighted means-float32-sgd"}
    cases = [(name, setting) for name in names for setting in SETTINGS if f"{name}-{setting}" not in UNNAMED]
    marked = [(case, [] if "-".join(case) in quick else [pytest.mark.full]) for case in cases]
    return pytest.mark.parametrize(("name", "setting"), [pytest.param(*case, marks=marks) for case, marks in marked])


@pytest.mark.full
@of(DEFECTS)
def test_a_planted_defect_is_named(name: str, setting: str) -> None:
    cause, trainer = DEFECTS[name]
    dtype, optimizer = SETTINGS[setting]
    report = check(trainer, dtype, TX[optimizer], terms=terms if trainer.aux else None)
    assert report.cause is cause, report


@of(HARMLESS)
def test_a_harmless_change_passes(name: str, setting: str) -> None:
    dtype, optimizer = SETTINGS[setting]
    report = check(HARMLESS[name], dtype, TX[optimizer])
    assert report.passes, report


@pytest.mark.full
def test_terms_that_are_not_those_of_the_step_are_refused() -> None:
    trainer = lm.Trainer(aux=lm.AUX)

    def make_step(k: int) -> Any:
        return jax.jit(lambda params, batch: trainer.gradient(params, batch, k))

    def without_factor(params: Any, batch: Any) -> Any:
        return lm.Model().sums(params, batch)

    assert check_step(make_step, PARAMS, BATCH, microbatches=(4,), terms=terms).passes
    with pytest.raises(GradCombineError, match=r"leaf \['(embed|gate|hidden)'\].*one batch: ce, aux"):
        check_step(make_step, PARAMS, BATCH, microbatches=(4,), terms=without_factor)


def test_labels_rolled_over_rows_are_no_random_key() -> None:
    def gradient(w: Any, batch: Any) -> Any:
        labels = jax.numpy.roll(batch["x"].ravel(), -1).reshape(batch["x"].shape)
        return {"w": ((batch["x"] * w["w"] - labels) * batch["x"]).mean()[None]}

    @jitted
    def make_step(w: Any, batch: Any, k: int) -> Any:
        return lm.scaled(lm.plus(*(gradient(w, {"x": x}) for x in jax.numpy.split(batch["x"], k))), 1 / k)

    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    report = check_step(make_step, {"w": np.ones(1, np.float32)}, {"x": x})
    assert report.cause is Cause.NEIGHBOURS, report


def test_a_missing_exchange_is_named() -> None:
    def make_step(k: int, devices: int = 1) -> Any:
        def step(w: Any, batch: Any) -> Any:
            x = batch["x"][: 8 // devices]
            return {"w": (x * (x @ w["w"])[:, None]).mean(0)}

        return jax.jit(step)

    x = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    report = check_step(make_step, {"w": np.ones(5, np.float32)}, {"x": x}, microbatches=(1,), devices=(2,))
    assert report.cause is Cause.NOT_EXCHANGED, report


def test_parameters_of_another_shape_are_named() -> None:
    params = {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}

    def step(p: Any, batch: Any) -> Any:
        return {"a": p["a"], "b": batch["x"].mean(0) + p["b"][:1]}

    with pytest.raises(GradCombineError, match=r"\['b'\]"):
        check_step(lambda k: step, params, {"x": np.ones((8, 2), np.float32)}, returns="params")
