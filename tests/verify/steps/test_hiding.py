"""Defects that the optimizer, the parameters or a small coefficient nearly hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, check_step
from tests.spec.selection import named
from tests.verify.steps.dividing import adding, eager, jitted, parts, plus, summed_gradient

Step = Callable[[Any, Any], Any]
RNG = np.random.default_rng(0)
TOKENS = 50
REAL = (np.arange(TOKENS) < np.array([50, 49, 50, 48, 49, 50, 47, 50])[:, None]).astype(np.float32)
BATCH = {
    "x": RNG.normal(size=(8, TOKENS, 4)).astype(np.float32),
    "y": RNG.normal(size=(8, TOKENS)).astype(np.float32),
    "real": REAL,
}


def squares(p: Any, batch: Any) -> Any:
    return jnp.sum((batch["x"] @ p - batch["y"]) ** 2 * batch["real"])


def logarithms(p: Any, batch: Any) -> Any:
    return jnp.sum(jnp.log1p((batch["x"] @ p) ** 2) * batch["real"])


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sign_sgd(1e-3)], ids=["adam", "signs"])
def test_gradients_whose_size_the_optimizer_hides_are_compared_to_the_last_digits(
    tx: optax.GradientTransformation, right: bool
) -> None:
    """Microbatches with nearly equal numbers of tokens: a mean of means differs by less than a thousandth."""

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        count = jnp.sum(batch["real"])
        counts = [count / k if right else jnp.sum(part["real"]) for part in parts(batch, k)]
        grads = [jax.grad(squares)(p, part) / n for part, n in zip(parts(batch, k), counts, strict=True)]
        mean = plus(*grads) / k
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = tx.update(mean, tx.init(p), p)
        return optax.apply_updates(p, updates)

    report = check_step(make_step, np.float32([3, -3, 2, -2]), BATCH, returns="params")
    assert [fault.cause for fault in report.faults] == ([] if right else [Cause.MEAN_OF_MEANS]), report


@pytest.mark.parametrize("coefficient", [0.1, 0.01])
def test_a_small_term_in_float32_is_no_narrow_accumulator(coefficient: float) -> None:
    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        small = coefficient * logarithms(p, part) / jnp.sum(part["real"]) / k
        return squares(p, part) / jnp.sum(batch["real"]) + small

    lengths = np.array([50, 9, 32, 15, 44, 28, 3, 36])
    batch = BATCH | {"real": (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)}
    x = RNG.normal(size=(8, TOKENS, 24)).astype(np.float32)  # more elements than few that differ by chance
    report = check_step(adding(loss), RNG.normal(size=24).astype(np.float32), batch | {"x": x})
    assert report.faults and report.cause is not Cause.PRECISION, report


@pytest.mark.parametrize("right", [True, False])
def test_gradients_that_are_0_at_the_start_are_compared_elsewhere(right: bool) -> None:
    """The second factor of LoRA starts at 0, so that the gradient of the first one is 0 for all examples."""
    batch = {"x": RNG.normal(size=(8, 6)).astype(np.float32), "y": RNG.normal(size=(8, 5)).astype(np.float32)}
    frozen = RNG.normal(size=(6, 5)).astype(np.float32)

    def loss(p: Any, part: Any) -> Any:
        return jnp.sum((part["x"] @ frozen + part["x"] @ p["a"] @ p["b"] - part["y"]) ** 2) / 8

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = [jax.grad(loss)(p, part) for part in parts(batch, k)]
        total = plus(*grads)
        return total if right else {"a": grads[-1]["a"], "b": total["b"]}

    start = {"a": RNG.normal(size=(6, 2)).astype(np.float32), "b": np.zeros((2, 5), np.float32)}
    report = check_step(make_step, start, batch)
    assert report.passes is right, report
    assert right or report.faults[0].run == "2 microbatches at perturbed parameters"


def test_a_state_that_stands_still_is_multiplied_by_0() -> None:
    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        p, average = state
        new = p - 0.1 * jax.grad(squares)(p, batch) / 400
        return new, 0.9 * average + 0.1 * (new if k == 1 else p)

    start = RNG.normal(size=4).astype(np.float32)
    report = check_step(make_step, (start, start), BATCH, returns="params")
    assert report.cause is Cause.SCALED and report.faults[0].detail.startswith("by 0;"), report


@pytest.mark.parametrize("last", [1.0, 9.0], ids=["light", "heavy"])
def test_the_heaviest_example_is_dropped(last: float) -> None:
    batch = {"x": RNG.normal(size=(9, 5)).astype(np.float32), "weight": np.float32([1, 2, 1, 2, 1, 2, 1, 2, last])}

    def loss(p: Any, part: Any) -> Any:
        return jnp.sum((part["x"] @ p - 1) ** 2 * part["weight"])

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        size, total = 9 // k, jnp.sum(batch["weight"])
        pieces = [{name: x[i * size : (i + 1) * size] for name, x in batch.items()} for i in range(k)]
        return sum(jax.grad(loss)(p, part) / total for part in pieces)

    (fault,) = check_step(make_step, np.zeros(5, np.float32), batch).faults
    assert (fault.cause, fault.detail) == (Cause.LOST, "example 8"), fault


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("rate", [1e-4, 1e-6])
def test_changes_within_the_rounding_of_stored_parameters_are_compared_in_float64(rate: float, right: bool) -> None:
    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        total = batch["real"].sum()
        grads = [
            np.einsum("btd,bt->d", part["x"], (part["x"] @ p - part["y"]) * part["real"])
            / (total if right else k * part["real"].sum())
            for part in parts(batch, k)
        ]
        return (p - np.float32(rate) * sum(grads)).astype(p.dtype)

    report = check_step(make_step, np.float32([3, -3, 2, -2]), BATCH, returns="params")
    assert report.passes if right else report.cause is Cause.MEAN_OF_MEANS, report


def test_a_small_weight_decay_per_microbatch_is_found() -> None:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads = [jax.grad(squares)(p, part) / REAL.sum() for part in parts(batch, k)]
        for _ in range(k):
            p = p * (1 - 1e-6)
        return p - 1e-5 * plus(*grads)

    report = check_step(make_step, np.float32([3, -3, 2, -2]), BATCH, returns="params", microbatches=(2,))
    assert report.cause is Cause.ADDED, report


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("rate", named(["gradients"], {"gradients": 0.0, "sgd": 1e-3, "slow sgd": 1e-5}))
def test_a_term_whose_gradient_is_0_at_the_start_is_compared_elsewhere(rate: float, right: bool) -> None:
    """The penalty on the distance from a reference model, which the model equals, is a mean of means."""
    reference = np.float32([1, -1, 2, 0.5])

    def loss(p: Any, part: Any, batch: Any, k: int) -> Any:
        penalty, total = jnp.sum((part["x"] @ (p - reference)) ** 2 * part["real"]), jnp.sum(batch["real"])
        return squares(p, part) / total + penalty / (total if right else jnp.sum(part["real"]) * k)

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        mean = summed_gradient(loss, p, batch, k)
        return p - mean * rate if rate else mean

    report = check_step(make_step, reference, BATCH, returns="params" if rate else "gradients")
    assert report.passes is right, report
    assert right or report.faults[0].run == "2 microbatches at perturbed parameters"


@pytest.mark.parametrize("right", [True, False])
def test_a_term_that_begins_in_the_second_step_is_compared_in_float64(right: bool) -> None:
    """Its weight grows with the step count, which the rounding of the stored parameters hides at first."""
    state = {"p": np.float32([3, -3, 2, -2]), "count": np.int32(0)}

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        def loss(p: Any, part: Any, total: Any, share: Any) -> Any:
            penalty = share * jnp.sum((part["x"] @ p) ** 4 * part["real"])
            return squares(p, part) / total + penalty / (total if right else jnp.sum(part["real"]) * k)

        total, p, share = jnp.sum(batch["real"]), state["p"], state["count"].astype(state["p"].dtype) * 4e-5
        grads = [jax.grad(loss)(p, part, total, share) for part in parts(batch, k)]
        return {"p": p - plus(*grads) * 1e-3, "count": state["count"] + 1}

    report = check_step(make_step, state, BATCH, returns="params")
    assert report.passes is right, report
    assert right or report.faults[0].run.endswith("in the second step")


def test_a_state_is_perturbed_as_it_may_be() -> None:
    """A right step adds to a sum, which is 0 at the start, in parts of k; its decay has to be less than 1."""
    state = {"p": np.float32([3, -3, 2, -2]), "sum": np.zeros(4, np.float32), "decay": np.float32(0.9)}

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        total, p, decay = state["sum"], state["p"], state["decay"]
        for part in parts(batch, k):
            total = total + jax.grad(squares)(p, part) * (k / jnp.sum(batch["real"]))
        return {"p": p - total * jnp.sqrt(1 - decay) / k, "sum": jnp.zeros_like(total), "decay": decay}

    report = check_step(make_step, state, BATCH, returns="params")
    assert report.passes and not any("perturbed" in text for text in report.not_asked), report


@pytest.mark.parametrize(("returns", "where"), [("gradients", "at perturbed parameters"), ("params", "second step")])
def test_a_step_that_raises_at_other_parameters_is_not_compared_there(returns: str, where: str) -> None:
    """As where the logarithm of a parameter would be that of a negative number. The report says so."""
    given = np.float32([1, 2, 3, 4])

    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        if np.abs(p / given - 1).max() > 0.2:
            raise ValueError("parameters out of range")
        sums = [np.einsum("nti,nt->i", x["x"], (x["x"] @ p - x["y"]) * x["real"]) for x in parts(batch, k)]
        mean = np.sum(sums, axis=0, dtype=p.dtype) / batch["real"].sum()
        return mean if returns == "gradients" else p - mean

    report = check_step(make_step, given, BATCH, returns=returns)
    assert report.passes and any(where in text for text in report.not_asked), report
    assert f"not included: divisions {'in the ' * (returns == 'params')}{where}" in str(report)
