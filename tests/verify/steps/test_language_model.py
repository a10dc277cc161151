"""Defects planted in a trainer of a token-weighted language model, and changes that do no harm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, check_step
from tests.verify.steps import language_model as lm

PARAMS, BATCH = lm.problem()


@pytest.fixture(autouse=True)
def _as_users_do() -> Iterator[None]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def warm(tx: Any) -> Any:
    """A state after three updates."""
    rng, state = np.random.default_rng(5), tx.init(PARAMS)
    for _ in range(3):
        grads = jax.tree.map(lambda x: (0.01 * rng.normal(size=x.shape)).astype(np.float32), PARAMS)
        _, state = tx.update(grads, state, PARAMS)
    return jax.tree.map(np.asarray, state)


def check(combine: Callable[[list[Any], int], Any], optimizer: str, **options: Any) -> Any:
    tx = optax.adamw(0.1) if optimizer == "adamw" else optax.sgd(0.1)
    state = warm(tx)

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> Any:
            grads = combine([lm.gradients(params, x) for x in lm.microbatches(batch, k)], k)
            if optimizer == "gradients":
                return grads
            updates, _ = tx.update(grads, state, params)
            return optax.apply_updates(params, updates)

        return jax.jit(step)

    returns = "gradients" if optimizer == "gradients" else "params"
    return check_step(make_step, PARAMS, BATCH, microbatches=(4,), returns=returns, **options)


def tokens_mean(parts: list[Any]) -> Any:
    return lm.both(parts, 0.0)


DEFECTS: dict[str, tuple[Cause, Callable[[list[Any], int], Any]]] = {
    "mean of means": (Cause.MEAN_OF_MEANS, lambda x, k: lm.scaled(lm.plus(*(tokens_mean([y]) for y in x)), 1 / k)),
    "sum of means": (Cause.SUM, lambda x, k: lm.plus(*(tokens_mean([y]) for y in x))),
    "divided twice": (Cause.SCALED, lambda x, k: lm.scaled(tokens_mean(x), 1 / k)),
    "last microbatch dropped": (Cause.LOST, lambda x, k: tokens_mean(x[: max(1, k - 1)])),
}

HARMLESS: dict[str, Callable[[list[Any], int], Any]] = {
    "reverse order": lambda x, k: tokens_mean(x[::-1]),
    "weighted means": lambda x, k: lm.plus(
        *(lm.scaled(tokens_mean([y]), y["ce"][1] / sum(z["ce"][1] for z in x)) for y in x)
    ),
    "divided first": lambda x, k: lm.plus(*(lm.over(y["ce"], sum(z["ce"][1] for z in x)) for y in x)),
}


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.full), "adamw"])
@pytest.mark.parametrize(
    "name", [x if x == "mean of means" else pytest.param(x, marks=pytest.mark.full) for x in DEFECTS]
)
def test_a_planted_defect_is_named(name: str, optimizer: str) -> None:
    cause, combine = DEFECTS[name]
    assert check(combine, optimizer).cause is cause


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_passes(name: str, optimizer: str) -> None:
    report = check(HARMLESS[name], optimizer)
    assert report.passes, report


def test_terms_beside_an_epsilon_are_taken_and_a_lost_one_is_named() -> None:
    def of(params: Any, batch: Any) -> Any:
        return lm.gradients(params, batch)

    def loses_aux(parts: list[Any], k: int) -> Any:
        return lm.both(parts) if k == 1 else lm.over(lm.total(parts, "ce"))

    def terms(params: Any, batch: Any) -> Any:
        made = of(params, batch)
        return made | {"aux": (lm.scaled(made["aux"][0], 0.1), made["aux"][1])}

    report = check(loses_aux, "gradients", terms=terms)
    assert report.cause is Cause.DENOMINATOR and "aux left out" in report.faults[0].detail, report
    with pytest.raises(GradCombineError, match=r"leaf \['gate'\].*one batch: ce, aux"):
        check(loses_aux, "gradients", terms=of)


def test_labels_rolled_over_rows_are_no_random_key() -> None:
    def gradient(w: Any, batch: Any) -> Any:
        labels = jax.numpy.roll(batch["x"].ravel(), -1).reshape(batch["x"].shape)
        return {"w": ((batch["x"] * w["w"] - labels) * batch["x"]).mean()[None]}

    def make_step(k: int) -> Any:
        def step(w: Any, batch: Any) -> Any:
            return lm.scaled(lm.plus(*(gradient(w, {"x": x}) for x in jax.numpy.split(batch["x"], k))), 1 / k)

        return jax.jit(step)

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
