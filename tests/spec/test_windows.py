"""Windows over time: when they are full, how the next one begins, and reading a partial one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError
from tests.spec import modes
from tests.spec.programs import rows
from tests.spec.selection import FULL, unrolled

ORDERS = ("sequential", "tree")


class Trace:
    """Updates one by one; records ready, value, step and index after each."""

    def __init__(self, every: Any, order: Any, restart_after: int | None = None) -> None:
        self.every, self.order, self.restart_after = every, order, restart_after

    def __call__(self, env: modes.Env, data: Any) -> Any:
        bound = 4 if callable(self.every) else None
        acc = gc.accumulate(gc.reductions.mean(), self.every, order=self.order, max_every=bound)
        values, weights = rows(data["values"]), rows(data["weights"])
        state, seen = acc.init(values[0]), []
        for i, (value, weight) in enumerate(zip(values, weights, strict=True)):
            state = acc.update(value, state, weight)
            seen.append({"ready": acc.ready(state), "value": acc.value(state), "index": state.index})
            if i + 1 == self.restart_after:
                state = acc.restart(state)
                seen.append({"ready": acc.ready(state), "value": acc.value(state), "index": state.index})
        return seen


FIXED = {order: Trace(3, order) for order in ORDERS}
GROWING = {order: Trace(lambda index: index + 1, order) for order in ORDERS}
FLUSHED = {order: Trace(4, order, restart_after=3) for order in ORDERS}


def data(values: list[float], weights: list[float] | None = None) -> Any:
    column = np.float32(values)
    scales = np.ones(len(values), np.float32) if weights is None else np.float32(weights)
    return {"values": {"g": np.stack([column, column * 2], axis=1)}, "weights": scales}


def summary(seen: Any) -> list[tuple[bool, float, int]]:
    for entry in seen:
        np.testing.assert_array_equal(entry["value"]["g"][1], 2 * entry["value"]["g"][0])
    return [(bool(s["ready"]), float(s["value"]["g"][0]), int(s["index"])) for s in seen]


@unrolled
@pytest.mark.parametrize("order", ORDERS)
def test_a_full_window_stays_readable_and_the_next_update_starts_anew(mode: modes.Mode, order: str) -> None:
    (seen,) = mode.run(FIXED[order], [data([1, 3, 8, 10, 20])])
    assert summary(seen) == [(False, 1, 0), (False, 2, 0), (True, 4, 0), (False, 10, 1), (False, 15, 1)]


@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
@unrolled
def test_every_as_a_function_of_the_window_index(mode: modes.Mode, order: str) -> None:
    (seen,) = mode.run(GROWING[order], [data([1, 2, 4, 5, 6, 7])])
    expected = [(True, 1, 0), (False, 2, 1), (True, 3, 1), (False, 5, 2), (False, 5.5, 2), (True, 6, 2)]
    assert summary(seen) == expected


@unrolled
@pytest.mark.parametrize("order", ORDERS)
def test_a_nan_in_one_window_does_not_reach_the_next(mode: modes.Mode, order: str) -> None:
    (seen,) = mode.run(FIXED[order], [data([1, np.nan, np.inf, 10, 20])])
    assert [np.isnan(float(s["value"]["g"][0])) for s in seen] == [False, True, True, False, False]
    assert float(seen[4]["value"]["g"][0]) == 15


@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
@unrolled
def test_a_partial_window_is_divided_by_its_true_weight_and_then_dropped(mode: modes.Mode, order: str) -> None:
    (seen,) = mode.run(FLUSHED[order], [data([2, 6, 100, 7], [1, 3, 0, 2])])
    assert summary(seen) == [(False, 2, 0), (False, 5, 0), (False, 5, 0), (False, 0, 1), (False, 7, 1)]


@pytest.mark.parametrize(
    "every",
    [np.int32(2), np.int64(2), np.array(2), 2, pytest.param("jax", marks=pytest.mark.needs("jax"))],
)
def test_every_takes_any_integer(every: Any) -> None:
    if every == "jax":
        import jax.numpy as jnp

        every = jnp.asarray(2)
    acc = gc.accumulate(gc.reductions.sum(), every=every)
    state = acc.init(np.float32(0))
    assert [bool(acc.ready(state := acc.update(np.float32(1), state))) for _ in range(4)] == [False, True] * 2


@pytest.mark.parametrize("order", ORDERS)
def test_a_window_of_weight_0_has_the_empty_value(order: Any) -> None:
    acc = gc.accumulate(gc.reductions.mean(), every=2, order=order)
    state = acc.init(np.float32([7]))
    for _ in range(2):
        state = acc.update(np.float32([np.nan]), state, weight=0)
    assert bool(acc.ready(state))
    np.testing.assert_array_equal(acc.value(state), np.float32([0]))


@pytest.mark.needs("jax")
@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
def test_a_window_of_numpy_arrays_goes_on_in_jax(order: Any) -> None:
    """As for a state loaded from a file; the result has JAX's narrow dtype again."""
    import jax.numpy as jnp

    acc = gc.accumulate(gc.reductions.mean(), every=4, order=order)
    loaded = acc.update(np.ones(2, jnp.bfloat16), acc.init(np.ones(2, jnp.bfloat16)))
    result = acc.value(acc.update(jnp.full(2, 3, jnp.bfloat16), loaded))
    assert isinstance(result, jnp.ndarray)
    np.testing.assert_array_equal(np.asarray(result, np.float32), [2, 2])


def test_a_window_longer_than_all_of_these_is_refused_and_not_taken_for_over() -> None:
    old, new = (gc.accumulate(gc.reductions.sum(), every) for every in (8, 4))
    state = old.init(np.float32(0))
    for _ in range(6):
        state = old.update(np.float32(1), state)
    with pytest.raises(GradCombineError, match=r"\.step: expected a window of 4 microbatches or fewer .*, received 6"):
        new.update(np.float32(1), state)
    assert float(new.value(state)) == 6
    assert float(new.value(new.update(np.float32(1), new.restart(state)))) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_a_window_of_another_reduction_or_order_is_not_restarted(order: Any) -> None:
    window = gc.accumulate(gc.reductions.mean(), 4, order=order).init(np.float32(0))
    with pytest.raises(GradCombineError, match="expected a SumState, received MeanState"):
        gc.accumulate(gc.reductions.sum(), 4, order=order).restart(window)
    (other,) = set(ORDERS) - {order}
    with pytest.raises(GradCombineError, match=r"expected a state of . levels?, received"):
        gc.accumulate(gc.reductions.mean(), 4, order=other).restart(window)
