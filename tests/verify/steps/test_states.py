"""Steps with a state: what is updated at each microbatch is named, and what rounding alone changes is not accused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, check_step
from tests.verify.steps import by_hand, defects

Step = Callable[[Any, Any], Any]
BATCH = by_hand.batch()


def checked(make: Callable[[int], Step], **state: Any) -> StepReport:
    return check_step(make, {"params": by_hand.params(), **state}, BATCH, returns="params")


def updated(params: Any, grads: Any, rate: Any) -> Any:
    return [p - g * p.dtype.type(rate) for p, g in zip(params, grads, strict=True)]


def of_schedule(count: Any) -> float:
    return 0.1 / (1 + int(count))


def updates_each(k: int) -> Step:
    """Updates the parameters at each microbatch, with a rate that depends on the number of updates."""

    def step(state: Any, batch: Any) -> Any:
        params, count = state["params"], state["count"]
        for part in defects.pieces(batch, k):
            params = updated(params, defects.mean(by_hand.sums, params, part), of_schedule(count))
            count = count + np.int32(1)
        return {"params": params, "count": count}

    return step


def counts_each(k: int) -> Step:
    """Updates the parameters once but counts microbatches."""

    def step(state: Any, batch: Any) -> Any:
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        return {"params": updated(state["params"], grads, 0.1), "count": state["count"] + np.int32(k)}

    return step


def averages_each(k: int) -> Step:
    """Updates a moving average of the lengths at each microbatch; the parameters are right."""

    def step(state: Any, batch: Any) -> Any:
        grads = defects.right(by_hand.sums, k)(state["params"], batch)
        average = state["average"]
        for part in defects.pieces(batch, k):
            average = average * average.dtype.type(0.9) + average.dtype.type(0.1) * part["mask"].mean(0)
        return {"params": updated(state["params"], grads, 0.1), "average": average}

    return step


@pytest.mark.parametrize(
    ("make", "state", "cause", "detail"),
    [
        (updates_each, {"count": np.int32(3)}, Cause.MOVED_EACH, "2 updates in sequence"),
        (counts_each, {"count": np.int32(3)}, Cause.COUNTED, "an integer in the result is 5 instead of 4"),
        (averages_each, {"average": np.ones(by_hand.LENGTH, np.float32)}, Cause.ADVANCED, "['average'] is updated 2"),
    ],
)
def test_what_is_updated_at_each_microbatch_is_named(
    make: Callable[[int], Step], state: dict[str, Any], cause: Cause, detail: str
) -> None:
    report = checked(make, **state)
    assert report.cause is cause, str(report)
    assert detail in report.faults[0].detail


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
