"""What `StepReport.allowing` accepts: statistics or states by design, but no other defect beside them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from gradcombine.verify.check import inner
from gradcombine.verify.check.standard import Standard
from tests.verify.steps.dividing import jitted, parts

pytestmark = [pytest.mark.needs("jax", "optax"), pytest.mark.usefixtures("as_users_do")]

RNG = np.random.default_rng(0)
FEATURES = 20
PARAMS = {
    "b": np.ones(3, np.float32),
    "h": np.float32(RNG.normal(size=(3, 3))),
    "w": np.float32(RNG.normal(size=(20, 3))),
}
BATCH = {"x": np.float32(RNG.normal(size=(8, FEATURES))), "y": np.float32(RNG.normal(size=(8, 3)))}
RUNNING = {"mean": jnp.zeros(FEATURES), "variance": jnp.ones(FEATURES)}


def loss_of(p: Any, part: Any) -> Any:
    """Mean squared error behind a batch normalization, and the statistics and the correct signs of its batch."""
    mean, variance = part["x"].mean(0), part["x"].var(0)
    scores = ((part["x"] - mean) / jnp.sqrt(variance + 1e-3) @ p["w"] + p["b"]) @ p["h"]
    correct = (scores * part["y"] > 0).sum()
    return jnp.mean((scores - part["y"]) ** 2), ({"mean": mean, "variance": variance}, correct)


def summed(p: Any, batch: Any, k: int, fault: str) -> tuple[Any, Any, list[Any], Any]:
    """Gradients, the loss, the statistics of each microbatch, and the number of correct signs; one of them wrong."""
    results = [jax.value_and_grad(loss_of, has_aux=True)(p, part) for part in parts(batch, k)]
    losses, aux, each = [x for (x, _), _ in results], [x for (_, x), _ in results], [g for _, g in results]
    grads = jax.tree.map(lambda *x: sum(x) / k, *each)
    if fault == "bias":
        grads["b"] *= k
    if fault == "layer":
        grads["h"] = each[-1]["h"]
    if fault == "sum":
        grads = jax.tree.map(lambda x: k * x, grads)
    loss = {"loss": sum(losses), "last": losses[-1]}.get(fault, sum(losses) / k)
    count = aux[-1][1] if fault == "count" else sum(x for _, x in aux)
    return grads, loss, [x for x, _ in aux], count


FAULTS = {"loss": Cause.SUM, "last": Cause.LOST, "bias": Cause.SUM, "layer": Cause.LOST}


@pytest.mark.sampled
@pytest.mark.parametrize("fault", [*FAULTS, ""])
def test_statistics_hide_no_other_defect_of_gradients(fault: str) -> None:
    def make_step(k: int) -> Any:
        return jax.jit(lambda p, batch: summed(p, batch, k, fault)[:2])

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,))
    assert report.cause is FAULTS.get(fault, Cause.STATISTICS), str(report)
    assert report.allowing("statistics").passes is (not fault)


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["count", ""])
def test_statistics_hide_no_wrong_count(fault: str) -> None:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads, _, _, count = summed(p, batch, k, fault)
        return grads, count

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)
    assert report.allowing("statistics").verdict is (Verdict.CANNOT_TELL if fault else Verdict.PASSES)


def with_running(optimizer: Any, fault: str, microbatches: tuple[int, ...] = (2,)) -> StepReport:
    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        grads, loss, statistics, _ = summed(state["params"], batch, k, fault)
        running = state["running"]
        for x in statistics:
            running = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, running, x)
        if fault == "running":
            running = jax.tree.map(lambda x: k * x, running)
        updates, inner = optimizer.update(grads, state["inner"], state["params"])
        return {"inner": inner, "params": optax.apply_updates(state["params"], updates), "running": running}, loss

    params = jax.tree.map(jnp.asarray, PARAMS)
    state = {"inner": optimizer.init(params), "params": params, "running": RUNNING}
    return check_step(make_step, state, BATCH, microbatches=microbatches, returns="params")


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["", "loss", "last", "bias", "running", "sum"])
@pytest.mark.parametrize("name", ["adam", "sgd", "clipped"])
def test_running_statistics_beside_an_optimizer_hide_no_other_defect(name: str, fault: str) -> None:
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    report = with_running({"sgd": optax.sgd(0.1), "adam": optax.adam(0.01), "clipped": clipped}[name], fault)
    cause = {"running": None, "": Cause.STATISTICS, "last": Cause.LOST}.get(fault, Cause.SUM)
    assert cause is None or report.cause is cause, str(report)
    assert report.allowing("statistics").passes is (not fault)


@pytest.mark.full
def test_few_of_the_cuts_beside_running_statistics_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is predicted from about 40 cuts; each takes many runs to measure, for all divisions together."""
    measured: list[Any] = []

    def standard(subject: Any, unit: Any) -> Any:
        measured.append(subject)
        return Standard(subject, unit)

    monkeypatch.setattr(inner, "Standard", standard)
    assert with_running(optax.adam(0.01), "bias", (2, 4)).cause is Cause.SUM
    assert 0 < len(measured) <= inner.CUTS + 1


def test_running_statistics_outside_of_the_parameters_are_not_compared() -> None:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        running = RUNNING
        grads, _, statistics, _ = summed(p, batch, k, "")
        for x in statistics:
            running = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, running, x)
        return grads, running

    report = check_step(make_step, PARAMS, BATCH, microbatches=(2,))
    assert report.cause is Cause.STATISTICS, str(report)
    assert report.allowing("statistics").verdict is Verdict.CANNOT_TELL
    assert "['mean']" in report.not_checked[0]


@pytest.mark.sampled
@pytest.mark.parametrize("power", [2, 1])
def test_a_count_of_calls_in_the_state_is_predicted(power: int) -> None:
    """A layer counts its calls; any other number of them is not compared."""

    @jitted
    def make_step(state: Any, batch: Any, k: int) -> Any:
        grads = summed(state["params"], batch, k, "")[0]
        calls = state["calls"] + k**power
        return {"calls": calls, "params": jax.tree.map(lambda x, g: x - 0.1 * g, state["params"], grads)}

    state = {"calls": jnp.int32(3), "params": jax.tree.map(jnp.asarray, PARAMS)}
    report = check_step(make_step, state, BATCH, microbatches=(2,), returns="params")
    assert report.cause is Cause.STATISTICS, str(report)
    assert report.allowing("statistics").verdict is (Verdict.PASSES if power == 1 else Verdict.CANNOT_TELL)


def normalized(w: Any, u: Any) -> tuple[Any, Any]:
    """The new vector of a power iteration, and the weights divided by the spectral norm that it estimates."""
    v = w.T @ u / jnp.linalg.norm(w.T @ u)
    u = w @ v / jnp.linalg.norm(w @ v)
    return u, w / (u @ w @ v)


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["", "loss"])
@pytest.mark.parametrize("state", ["power iteration", "average"])
def test_a_state_by_design_hides_no_wrong_metric(state: str, fault: str) -> None:
    """The state is a JAX array: its float64 values must not be rounded between the microbatches."""

    def loss_of(p: Any, part: Any, u: Any) -> tuple[Any, Any]:
        u, w = normalized(p["w"], u) if state == "power iteration" else (u, p["w"])
        return jnp.mean((part["x"] @ w + p["b"] - part["y"]) ** 2), jax.lax.stop_gradient(u)

    @jitted
    def make_step(whole: Any, batch: Any, k: int) -> Any:
        p, u, losses, each = whole["params"], whole["u"], [], []
        for part in parts(batch, k):
            (loss, u), grads = jax.value_and_grad(loss_of, has_aux=True)(p, part, u)
            losses.append(loss)
            each.append(grads)
        new = jax.tree.map(lambda x, *g: x - 0.1 * sum(g) / k, p, *each)
        for _ in range(k if state == "average" else 0):
            u = 0.9 * u + 0.1 * new["w"][:, 0]
        return {"params": new, "u": u}, sum(losses) / (1 if fault else k)

    params = jax.tree.map(jnp.asarray, {"b": PARAMS["b"], "w": PARAMS["w"]})
    whole = {"params": params, "u": jnp.float32(RNG.normal(size=FEATURES))}
    report = check_step(make_step, whole, BATCH, microbatches=(2,), returns="params")
    assert fault or report.cause is Cause.ADVANCED, str(report)
    assert report.allowing("state").passes is (not fault)
