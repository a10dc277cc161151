"""Steps that return new parameters, whose size may not show that of the gradients; and other causes of a wrong size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps.defects import pieces
from tests.verify.steps.dividing import eager, jitted
from tests.verify.steps.test_small import gradient, weighted

RNG = np.random.default_rng(5)
W = np.float32([1, 2, 3, 4, 5])
MATRIX = RNG.normal(size=(5, 3)).astype(np.float32)
BATCH = {
    "x": RNG.normal(size=(8, 5)).astype(np.float32),
    "y": RNG.normal(size=8).astype(np.float32),
    "real": np.ones(8, np.float32),
}
BATCHES = {
    "8 examples": BATCH,
    "4 examples": {name: x[:4] for name, x in BATCH.items()},
    "padding": BATCH | {"real": np.float32([1, 1, 1, 0, 1, 1, 1, 0])},
}
SEVERAL = BATCH | {"y": RNG.normal(size=(8, 3)).astype(np.float32), "real": np.ones((8, 1), np.float32)}


def trusted(w: Any, g: Any) -> Any:
    """LAMB's first update."""
    update = np.sign(g) + w / 8
    return update * np.linalg.norm(w) / np.linalg.norm(update)


def unit(g: Any) -> Any:
    return g / max(np.linalg.norm(g), np.finfo(g.dtype).tiny)


def orthogonal(g: Any) -> Any:
    """Muon's first update of a matrix."""
    u, _, v = np.linalg.svd(g, full_matrices=False)
    return (u @ v).astype(g.dtype)


def updated(update: Callable[[Any, Any], Any], total: Callable[[Any, Any, int], Any], rate: float = 0.1) -> Any:
    return lambda k: lambda w, batch: w - update(w, total(w, batch, k)) * w.dtype.type(rate)


def added(w: Any, batch: Any, k: int) -> Any:
    return sum(gradient(w, x) for x in pieces(batch, k))


def rescaled(w: Any, batch: Any, k: int) -> Any:
    return weighted(w, batch, k) * w.dtype.type(0.4 if k > 1 else 1)


HIDING = {
    "nothing": lambda w, g: np.zeros_like(g),
    "adam": lambda w, g: np.sign(g),
    "adamw": lambda w, g: np.sign(g) + w / 8,
    "lamb": trusted,
    "clipped": lambda w, g: unit(g),
    "clipped and decayed": lambda w, g: unit(g) + w / 8,
}
SHOWING = {"sgd": lambda w, g: g, "decayed": lambda w, g: g + w / 8}


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_sum_that_an_update_hides_does_not_pass(name: str, batch: str) -> None:
    report = check_step(updated(HIDING[name], added), W, BATCHES[batch], microbatches=(2,), returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert any("the sizes of the gradients" in x or "a result that is 0" in x for x in report.not_checked)


def test_a_sum_that_is_made_orthogonal_does_not_pass() -> None:
    make = updated(lambda w, g: orthogonal(g), added)
    report = check_step(make, MATRIX, SEVERAL, microbatches=(2,), returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)


@pytest.mark.parametrize("name", ["adam", "clipped"])
@pytest.mark.parametrize("total", [added, weighted])
@pytest.mark.parametrize("has_same_end", [False, True])
def test_a_leaf_that_shows_its_size_says_nothing_of_another(has_same_end: bool, name: str, total: Any) -> None:
    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        other = p["b"]["w"] if has_same_end else p["b"]
        rate, reversed_x = p["w"].dtype.type(0.1), batch | {"x": batch["x"][:, ::-1]}
        moved = other - rate * weighted(other, reversed_x, k)
        new = p["w"] - rate * HIDING[name](p["w"], total(p["w"], batch, k))
        return {"b": {"w": moved} if has_same_end else moved, "w": new}

    params = {"b": {"w": W} if has_same_end else W, "w": W}
    report = check_step(make_step, params, BATCH, microbatches=(2,), returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert "the sizes of the gradients of leaf ['w']" in report.not_checked[0]


MOMENTS = {"none": 0, "some": 0.5}
"""An optimizer's moment at the start, times the signs of the parameters."""


@pytest.mark.parametrize("total", [added, weighted])
@pytest.mark.parametrize("path", [True, False])
@pytest.mark.parametrize("start", MOMENTS)
def test_a_moment_shows_the_size_of_a_leaf(start: str, path: bool, total: Any) -> None:
    """A state's moment is found by its path, or without one by the signs of eight elements or more."""
    w = W if path else np.concatenate([W, -W])
    batch = BATCH if path else BATCH | {"x": RNG.normal(size=(8, 10)).astype(np.float32)}

    @eager
    def make_step(state: Any, batch: Any, k: int) -> Any:
        w, m = (state[0]["w"], state[1]["mean"]["w"]) if path else state
        m = m * w.dtype.type(0.9) + total(w, batch, k) * w.dtype.type(0.1)
        new = w - HIDING["adamw"](w, m) * w.dtype.type(0.1)
        return ({"w": new}, {"mean": {"w": m}}) if path else (new, m)

    moment = np.float32(MOMENTS[start]) * np.sign(w)
    state = ({"w": w}, {"mean": {"w": moment}}) if path else (w, moment)
    report = check_step(make_step, state, batch, microbatches=(2,), returns="params")
    assert report.verdict is (Verdict.PASSES if total is weighted else Verdict.FAILS), str(report)


@pytest.mark.usefixtures("as_users_do")
@pytest.mark.parametrize(("total", "cause"), [("weighted", None), ("means", Cause.MEAN_OF_MEANS), ("added", Cause.SUM)])
def test_a_group_of_parameters_whose_optimizer_hides_a_factor(total: str, cause: Cause | None) -> None:
    import jax
    import optax

    groups = {"bias": optax.sgd(0.1), "matrix": optax.adam(0.01)}
    tx = optax.multi_transform(groups, {"w": "matrix", "z": "bias"})  # in another order than the leaves

    def loss(p: Any, batch: Any) -> Any:
        return (batch["real"] * (batch["x"] @ p["w"] + p["z"] - batch["y"]) ** 2).sum()

    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        grads, count = [jax.grad(loss)(p, x) for x in pieces(batch, k)], batch["real"].sum()
        counts = [k * x["real"].sum() if total == "means" else count for x in pieces(batch, k)]
        w = sum(g["w"] / n for g, n in zip(grads, counts, strict=True)) * (k if total == "added" else 1)
        updates, _ = tx.update({"w": w, "z": sum(g["z"] for g in grads) / count}, tx.init(p), p)
        return optax.apply_updates(p, updates)

    batch = BATCH | {"real": np.float32([1, 1, 1, 1, 1, 0, 0, 1])}
    params = {"w": W, "z": np.float32(0.1)}
    report = check_step(make_step, params, batch, microbatches=(2,), returns="params")
    assert report.cause is cause, str(report)
    assert report.passes is (cause is None)


def test_parameters_that_do_not_change_show_nothing_beside_a_loss() -> None:
    def make_step(k: int) -> Any:
        return lambda w, batch: (w.copy(), weighted(w, batch, k).sum())

    report = check_step(make_step, W, BATCH, returns="params")
    assert report.not_checked == ("a change of the parameters that is 0",)


@pytest.mark.parametrize("rate", [0.1, 1e-2, 1e-4])
@pytest.mark.parametrize("name", SHOWING)
@pytest.mark.parametrize("batch", BATCHES)
def test_sgd_shows_the_size_of_the_gradients(name: str, batch: str, rate: float) -> None:
    for total, passes in ((weighted, True), (added, False)):
        make = updated(SHOWING[name], total, rate)
        report = check_step(make, W, BATCHES[batch], microbatches=(2,), returns="params")
        assert report.passes is passes, str(report)
        assert report.verdict is not Verdict.CANNOT_TELL, str(report)


def test_a_step_that_copies_of_an_example_do_not_change_hides_no_size() -> None:
    """The examples are centered over the batch, so that all changes by copies are 0."""

    @eager
    def make_step(w: Any, batch: Any, k: int) -> Any:
        centered = batch | {name: batch[name] - batch[name].mean(0) for name in "xy"}
        return w - w.dtype.type(0.1) * weighted(w, centered | {"mask": batch["real"]}, k)

    batch = {"x": np.round(4 * BATCH["x"]), "y": np.round(4 * BATCH["y"]), "real": BATCH["real"]}
    report = check_step(make_step, W, batch, microbatches=(2,), returns="params")
    assert report.passes, str(report)


@pytest.mark.parametrize("rate", [1.0, 0.1, 1e-2])
@pytest.mark.parametrize("decay", [1e-1, 1e-4])
@pytest.mark.parametrize(("total", "cause"), [(added, Cause.SUM), (rescaled, Cause.SCALED)])
def test_a_factor_is_named_beside_weight_decay(rate: float, decay: float, total: Any, cause: Cause) -> None:
    make = updated(lambda w, g: g + w * w.dtype.type(decay), total, rate)
    report = check_step(make, W, BATCH, microbatches=(2,), returns="params")
    assert report.cause is cause, str(report)
    assert f"all but {-rate * decay:.3g} times the parameters" in str(report)


@pytest.mark.parametrize("rate", [1e-5, 1e-7])
def test_changes_that_parameters_round_away_do_not_pass(rate: float) -> None:
    exact = {name: x.astype(np.float64) for name, x in BATCH.items()}
    reference = W - rate * gradient(W.astype(np.float64), exact)
    report = check_step(updated(SHOWING["sgd"], added, rate), W, BATCH, returns="params", reference=reference)
    assert not report.passes, str(report)


@pytest.mark.parametrize("params", [np.zeros(5, np.float32), np.ones(5, np.float32), np.zeros(1, np.float32), W[:1]])
def test_a_sum_is_no_addition_of_new_parameters(params: Any) -> None:
    batch = BATCH | {"x": BATCH["x"][:, : len(params)]}
    report = check_step(updated(SHOWING["sgd"], added), params, batch, microbatches=(2,), returns="params")
    assert report.cause is Cause.SUM, str(report)


def of_layers(p: Any, batch: Any) -> tuple[Any, Any]:
    error = batch["x"] @ p["w"] + p["b"] - batch["y"]
    n = p["w"].dtype.type(len(error))
    return (error * error).sum() / n, {"w": 2 * batch["x"].T @ error / n, "b": 2 * error.sum(0) / n}


CLIPS: dict[str, Callable[[Any], Any]] = {
    "by norm": lambda g: {name: x / np.sqrt(sum((y * y).sum() for y in g.values())) for name, x in g.items()},
    "by each norm": lambda g: {name: unit(x) for name, x in g.items()},
    "by value": lambda g: {name: np.clip(x, x.dtype.type(-0.1), x.dtype.type(0.1)) for name, x in g.items()},
}


@pytest.mark.parametrize(("returns", "decay"), [("gradients", 0), ("params", 0), ("params", 0.125)])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping_at_each_microbatch_is_named_beside_a_loss(name: str, returns: str, decay: float) -> None:
    @eager
    def make_step(p: Any, batch: Any, k: int) -> Any:
        values, grads = zip(*(of_layers(p, x) for x in pieces(batch, k)), strict=True)
        clipped = [CLIPS[name](g) for g in grads]
        mean = {leaf: sum(g[leaf] for g in clipped) / x.dtype.type(k) for leaf, x in p.items()}
        new = {leaf: x - mean[leaf] - x * x.dtype.type(decay) for leaf, x in p.items()}
        result = new if returns == "params" else mean
        return result, sum(values) / values[0].dtype.type(k)

    report: StepReport = check_step(
        make_step, {"w": MATRIX, "b": np.ones(3, np.float32)}, SEVERAL, microbatches=(2,), returns=returns
    )
    assert report.cause is Cause.CHANGED_BEFORE, str(report)
    assert not report.allowing("statistics").passes
