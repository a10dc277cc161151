"""Steps with a state: what is updated at each microbatch is named, and what rounding alone changes is not accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps import by_hand, defects
from tests.verify.steps.dividing import eager

Step = Callable[[Any, Any], Any]
BATCH = by_hand.batch()


def checked(make: Callable[[int], Step], **state: Any) -> StepReport:
    return check_step(make, {"params": by_hand.params(), **state}, BATCH, returns="params")


def updated(params: Any, grads: Any, rate: Any) -> Any:
    return [p - g * p.dtype.type(rate) for p, g in zip(params, grads, strict=True)]


def of_schedule(count: Any) -> float:
    return 0.1 / (1 + int(count))


@eager
def updates_each(state: Any, batch: Any, k: int) -> Any:
    """Updates the parameters at each microbatch, with a rate that depends on the number of updates."""
    params, count = state["params"], state["count"]
    for part in defects.pieces(batch, k):
        params = updated(params, defects.mean(by_hand.sums, params, part), of_schedule(count))
        count = count + np.int32(1)
    return {"params": params, "count": count}


@eager
def counts_each(state: Any, batch: Any, k: int) -> Any:
    """Updates the parameters once but counts microbatches."""
    grads = defects.right(by_hand.sums, k)(state["params"], batch)
    return {"params": updated(state["params"], grads, 0.1), "count": state["count"] + np.int32(k)}


@eager
def averages_each(state: Any, batch: Any, k: int) -> Any:
    """Updates a moving average of the lengths at each microbatch; the parameters are right."""
    grads = defects.right(by_hand.sums, k)(state["params"], batch)
    average = state["average"]
    for part in defects.pieces(batch, k):
        average = average * average.dtype.type(0.9) + average.dtype.type(0.1) * part["mask"].mean(0)
    return {"params": updated(state["params"], grads, 0.1), "average": average}


@eager
def scales_each(state: Any, batch: Any, k: int) -> Any:
    """Doubles a factor at each microbatch, as if each were a step without an overflow."""
    grads = defects.right(by_hand.sums, k)(state["params"], batch)
    return {
        "params": updated(state["params"], grads, 0.1),
        "scale": state["scale"] * state["scale"].dtype.type(2**k),
    }


def averaged_after(updates: int, state: Any, batch: Any, k: int, pull: float = 0.0) -> Any:
    """Counts in a mean of the parameters each microbatch; with the new parameters in the last ``updates``.

    The mean is a teacher if the loss pulls the parameters towards it.
    """
    old, mean, count = state["params"], state["mean"], state["count"]
    towards = updated(old, [p - m for p, m in zip(old, mean, strict=True)], pull)
    new = updated(towards, defects.right(by_hand.sums, k)(old, batch), 0.1)
    for i in range(k):
        params, count = new if i >= k - updates else old, count + np.int32(1)
        mean = [m + (p - m) / p.dtype.type(count) for m, p in zip(mean, params, strict=True)]
    return {"params": new, "mean": mean, "count": count}


mean_each, mean_of_old = (eager(partial(averaged_after, updates)) for updates in (4, 1))
teacher = eager(partial(averaged_after, 1, pull=0.05))
MEAN = [0.5 * x for x in by_hand.params()]


@pytest.mark.parametrize(
    ("make", "state", "cause", "detail"),
    [
        (updates_each, {"count": np.int32(3)}, Cause.MOVED_EACH, "2 updates in sequence"),
        (counts_each, {"count": np.int32(3)}, Cause.COUNTED, "an integer in the result is 5 instead of 4"),
        (averages_each, {"average": np.ones(by_hand.LENGTH, np.float32)}, Cause.ADVANCED, "['average'] is updated 2"),
        (scales_each, {"scale": np.full(3, 16, np.float32)}, Cause.ADVANCED, "leaf ['scale'] is updated 2 times"),
        (mean_each, {"mean": MEAN, "count": np.int32(3)}, Cause.ADVANCED, "leaf ['mean'][0] is updated 2 times"),
        (mean_of_old, {"mean": MEAN, "count": np.int32(3)}, Cause.ADVANCED, "leaf ['mean'][0] is updated 2 times"),
        (teacher, {"mean": MEAN, "count": np.int32(3)}, Cause.ADVANCED, "leaf ['mean'][0] is updated 2 times"),
    ],
)
def test_what_is_updated_at_each_microbatch_is_named(
    make: Callable[[int], Step], state: dict[str, Any], cause: Cause, detail: str
) -> None:
    report = checked(make, **state)
    assert report.cause is cause, str(report)
    assert detail in report.faults[0].detail


def keeps_the_best(k: int, combine: Any, updates: int = 1) -> Step:
    """Keeps the least size of a gradient, which is infinite at the start; a mask takes a token out of the softmax."""

    def step(state: Any, batch: Any) -> Any:
        params, best = state["params"], state["best"]
        for part in defects.pieces(batch, updates):
            masked = [*params[:2], params[2] + state["mask"]]
            grads = combine(by_hand.sums, k // updates)(masked, part)
            best = np.minimum(best, np.abs(grads[1]).mean())
            params = updated(params, grads, 0.1)
        return {"params": params, "best": best, "mask": state["mask"]}

    return step


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda k: keeps_the_best(k, defects.right), None),
        (lambda k: keeps_the_best(k, defects.mean_of_means), Cause.MEAN_OF_MEANS),
        (lambda k: keeps_the_best(k, defects.right, updates=k), Cause.MOVED_EACH),
    ],
)
@pytest.mark.parametrize("least", [-np.inf, np.finfo(np.float32).min])
def test_a_state_may_be_infinite(make: Callable[[int], Step], cause: Cause | None, least: float) -> None:
    best, mask = np.array(np.inf, np.float32), np.zeros(by_hand.VOCABULARY, np.float32)
    mask[0] = least  # no example has token 0
    report = checked(make, best=best, mask=mask)
    assert report.cause is cause, str(report)


def has_momentum(k: int, each: bool) -> Step:
    """Moves along a momentum, which decays once, or at each microbatch."""

    def step(state: Any, batch: Any) -> Any:
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        decay = 0.9 ** (k if each else 1)
        momentum = [m * m.dtype.type(decay) + g for m, g in zip(state["momentum"], grads, strict=True)]
        return {"params": updated(state["params"], momentum, 0.1), "momentum": momentum}

    return step


def has_average(k: int, each: bool) -> Step:
    """Averages the parameters over the steps, once, or at each microbatch."""

    def step(state: Any, batch: Any) -> Any:
        params, average = state["params"], state["average"]
        for _ in range(k - 1 if each else 0):
            average = [a + (p - a) * p.dtype.type(0.1) for a, p in zip(average, params, strict=True)]
        params = updated(params, defects.right(by_hand.sums, k)(params, batch), 0.1)
        average = [a + (p - a) * p.dtype.type(0.1) for a, p in zip(average, params, strict=True)]
        return {"params": params, "average": average}

    return step


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize(
    ("make", "state", "cause", "detail"),
    [
        (has_momentum, {"momentum": [0 * x for x in by_hand.params()]}, Cause.ADDED, "['momentum'][0] by -0.09 times"),
        (has_average, {"average": by_hand.params()}, Cause.ADVANCED, "leaf ['average'][0] is updated 2 times"),
    ],
)
def test_a_second_step_shows_the_decay_of_a_state_that_the_first_one_hides(
    make: Any, state: dict[str, Any], cause: Cause, detail: str, each: bool
) -> None:
    report = checked(partial(make, each=each), **state)
    assert report.cause is (cause if each else None), str(report)
    assert not each or (report.faults[0].run == "2 microbatches in the second step" and detail in str(report.faults[0]))


def test_a_number_that_a_step_returns_as_an_array_stays_a_setting() -> None:
    """As in a jitted function; a second step starts from the first one's result."""

    @eager
    def step(state: Any, batch: Any, k: int) -> Any:
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        return {"params": updated(state["params"], grads, state["rate"]), "rate": np.float32(state["rate"])}

    report = checked(step, rate=0.5)
    assert report.passes, report


def test_a_second_step_that_is_not_finite_is_named() -> None:
    @eager
    def make(state: Any, batch: Any, k: int) -> Any:
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        factor = state["scale"] if k > 1 else state["scale"] * 0  # infinite once the scale is 1
        with np.errstate(divide="ignore"):
            rate = 0.1 / (1 - factor)
        return {"params": updated(state["params"], grads, rate), "scale": state["scale"] * 0 + 1}

    report = checked(make, scale=np.zeros(1, np.float32))
    assert (report.cause, report.faults[0].run) == (Cause.NOT_FINITE, "2 microbatches in the second step"), str(report)


def test_a_second_step_in_narrow_floats_that_is_not_compared_in_float64_does_not_pass() -> None:
    @eager
    def make(state: Any, rows: Any, k: int) -> Any:
        if state["count"] and rows.dtype == np.float64:
            raise ValueError("only the first step runs in float64")
        mean = sum(part.sum(axis=0) for part in np.array_split(rows, k)) / rows.dtype.type(len(rows))
        return {"w": state["w"] - mean, "count": state["count"] + np.int32(1)}

    rows = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float16)
    report = check_step(make, {"w": np.ones(16, np.float16), "count": np.int32(0)}, rows, returns="params")
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert any("which rounding hides" in x for x in report.not_checked)


def test_a_step_that_does_not_take_its_own_result_is_compared_once() -> None:
    @eager
    def make(state: Any, batch: Any, k: int) -> Any:
        if state["count"].any():
            raise ValueError("it starts at 0")
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        return {"params": updated(state["params"], grads, 0.1), "count": state["count"] + np.int32(1)}

    assert checked(make, count=np.int32(0)).passes


ROWS = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


def quantizes(k: int, factor: float = 1, shift: int = 0) -> Step:
    """Stores rounded means as int8; the offset brings them so close to 0.5 that the order of additions decides.

    Args:
      factor: of the gradient, in a division.
      shift: added to what is stored, in a division.
    """

    def step(state: Any, rows: Any) -> Any:
        mean = sum(part.sum(axis=0) for part in np.array_split(rows, k)) / rows.dtype.type(len(rows))
        stored = np.round(mean + state["offset"]).astype(np.int8) + np.int8(shift if k > 1 else 0)
        rate = rows.dtype.type(0.1 * (factor if k > 1 else 1))
        return {"offset": state["offset"] - mean * rate, "stored": stored}

    return step


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({}, None), ({"shift": 1}, Cause.UNEXPLAINED), ({"shift": 5}, Cause.UNEXPLAINED), ({"factor": 2}, Cause.SUM)],
)
def test_quantized_numbers_may_differ_by_rounding_alone(changes: dict[str, Any], cause: Cause | None) -> None:
    offset = (0.5 - ROWS.astype(np.float64).mean(axis=0)).astype(np.float32)
    state = {"offset": offset, "stored": np.zeros(64, np.int8)}
    one, divided = (quantizes(k)(state, ROWS)["stored"] for k in (1, 4))
    assert np.any(one != divided)
    report = check_step(partial(quantizes, **changes), state, ROWS, returns="params")
    assert report.cause is cause, str(report)
    assert "shift" not in changes or "an integer in the result is" in report.faults[0].detail


def has_complex_parameters(k: int, each: bool, divided: bool) -> Step:
    """Decays complex weights and moves along the mean or the sum of the gradients, once or at each microbatch."""

    def step(w: Any, batch: Any) -> Any:
        real, grads = batch["x"].real.dtype.type, []
        for x, y in zip(np.split(batch["x"], k), np.split(batch["y"], k), strict=True):
            grads.append(x.conj().T @ (x @ w - y) / real(len(y)))
            w = w - real(0.1) * grads[-1] if each else w
        mean = sum(grads) / real(k if divided else 1)
        return w if each else real(0.99) * w - real(0.1) * mean

    return step


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"each": False, "divided": True}, None),
        ({"each": False, "divided": False}, Cause.SUM),
        ({"each": True, "divided": True}, Cause.MOVED_EACH),
    ],
)
def test_complex_parameters_are_checked_like_real_ones(changes: dict[str, bool], cause: Cause | None) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2, *shape)).astype(np.float32) for shape in ((8, 4), (8,)))
    w = np.array([1, 1j, -1, -1j], np.complex64)  # whose squares add up to 0
    batch = {"x": x[0] + np.complex64(1j) * x[1], "y": y[0] + np.complex64(1j) * y[1]}
    report = check_step(partial(has_complex_parameters, **changes), w, batch, returns="params")
    assert report.cause is cause, str(report)
    assert cause or report.passes
