"""Terms added at each microbatch and the rounding of a narrow accumulator are told apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps import by_hand, defects

BFLOAT16, FLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
Floats = list[np.ndarray]
Add = Callable[[list[Floats], np.dtype], Floats]


def cast(grads: Floats, dtype: np.dtype) -> Floats:
    return [x.astype(dtype) for x in grads]


def shuffled(sums: list[Floats], dtype: np.dtype) -> Floats:
    """Adds in an order that `check_step` does not try."""
    return defects.in_order([sums[i] for i in np.random.default_rng(3).permutation(len(sums))], dtype)


def in_three(sums: list[Floats], dtype: np.dtype) -> Floats:
    return defects.added([defects.in_order(sums[i::3], dtype) for i in range(min(3, len(sums)))])


def as_stored(sums: list[Floats], dtype: np.dtype) -> Floats:
    """Rounds the sums but not the terms: ``acc = (acc + grad).astype(acc.dtype)``."""
    total = [np.zeros(x.shape, dtype) for x in sums[0]]
    for grads in sums:
        total = [(x.astype(FLOAT32) + y).astype(dtype) for x, y in zip(total, grads, strict=True)]
    return total


def check(make: Any, k: int) -> StepReport:
    return check_step(partial(make, by_hand.sums), by_hand.params(), by_hand.batch(max(16, k)), microbatches=(k,))


MANY = [2, 8, pytest.param(64, marks=pytest.mark.full)]


@pytest.mark.parametrize("k", MANY)
@pytest.mark.parametrize("add", [defects.in_order, shuffled, in_three, as_stored])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_narrow_accumulator_is_named_in_any_order(dtype: np.dtype, add: Add, k: int) -> None:
    report = check(partial(defects.narrow, add=add, dtype=dtype), k)
    assert report.cause is Cause.PRECISION, str(report)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_gradients_that_are_rounded_at_each_microbatch_are_no_statistics(dtype: np.dtype, k: int) -> None:
    """Those of one batch are rounded, too, as by a compression of the exchanges between devices."""

    def mean(made: list[tuple[Floats, Any]]) -> Floats:
        return defects.total([(cast(cast(grads, dtype), grads[0].dtype), tokens) for grads, tokens in made])

    report = check(defects.combining(mean), k)
    assert report.cause is Cause.PRECISION, str(report)
    assert not report.allowing("statistics").passes, str(report)


@defects.of_sums
def bends(sums: Any, params: Floats, batch: Any, k: int) -> Floats:
    """Multiplies the gradient by a smooth function of it and of k, as little as rounding to 16 bits: no known cause."""
    grads = defects.right(sums, k)(params, batch)
    return [g * (1 + 2.0**-9 * np.sin(k * np.arange(g.size).reshape(g.shape) + 20 * g)).astype(g.dtype) for g in grads]


@pytest.mark.parametrize("k", [2, 8])
def test_small_smooth_differences_are_not_blamed_on_an_accumulator(k: int) -> None:
    report = check(bends, k)
    assert report.cause is Cause.UNEXPLAINED, str(report)


def test_a_wide_accumulator_is_not_accused() -> None:
    assert check(partial(defects.narrow, add=shuffled, dtype=FLOAT32), 8).passes


@pytest.mark.parametrize("k", MANY)
@pytest.mark.parametrize("rate", [1e-1, 1e-3, 1e-5])
@pytest.mark.parametrize(
    ("of", "detail"),
    [
        (lambda p: p, "times the parameters"),
        (lambda p: p.astype(BFLOAT16), "times the parameters"),
        (lambda p: p * (p.ndim > 1), "times the parameters, in 2 of 3 leaves"),
        (np.sign, "up to"),
    ],
    ids=["decay", "of bfloat16", "of kernels", "of signs"],
)
def test_what_is_added_is_named_whatever_it_is(of: Any, detail: str, rate: float, k: int) -> None:
    report = check(partial(defects.decays_each, rate=rate, of=of), k)
    assert report.cause is Cause.ADDED, str(report)
    assert detail in report.faults[0].detail


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("factor", [0.5, 0.99, 0.999])
def test_a_schedule_is_named_however_slow(factor: float, k: int) -> None:
    report = check(partial(defects.scheduled_each, factor=factor), k)
    assert report.cause is Cause.BY_PLACE, str(report)


@defects.of_sums
def of_bfloat16(sums: Any, params: Floats, batch: Any, k: int, rate: float, narrow: bool = False) -> Floats:
    """Gradients of bfloat16 parameters, computed in float32 or wider; `narrow`: always in float32."""
    wide = [x.astype(FLOAT32 if narrow else np.promote_types(x.dtype, FLOAT32)) for x in params]
    made = defects.decays_each(sums, k, rate=rate)(wide, batch)
    return [x.astype(BFLOAT16 if narrow else p.dtype) for x, p in zip(made, params, strict=True)]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("rate", [0, 1e-2, 1e-4])
def test_little_is_found_or_said_to_be_hidden_beside_bfloat16(rate: float, narrow: bool) -> None:
    make = partial(of_bfloat16, by_hand.sums, rate=rate, narrow=narrow)
    report = check_step(make, cast(by_hand.params(), BFLOAT16), by_hand.batch(16), microbatches=(4,))
    assert report.cause is (Cause.ADDED if rate and not narrow else None), str(report)
    assert all(run.invariance <= 1 for run in report.runs)
    assert any("which rounding hides" in text for text in report.not_checked) is narrow
    in_float64 = Verdict.FAILS if rate else Verdict.PASSES
    assert report.verdict is (Verdict.CANNOT_TELL if narrow else in_float64)
    assert report.passes is (report.verdict is Verdict.PASSES)


def test_padding_is_compared_in_float64_beside_bfloat16() -> None:
    """Padding with so small a weight that bfloat16 rounding hides it."""
    params, batch = cast(by_hand.params(), BFLOAT16), by_hand.batch(16)

    def padded(rows: Any, more: int) -> Any:
        made = {name: np.concatenate([x, np.ones_like(x[:more])]) for name, x in rows.items()}
        return made | {"mask": np.concatenate([rows["mask"], np.zeros_like(rows["mask"][:more])])}

    def counting(sums: Any, k: int) -> Any:
        def step(p: Floats, rows: Any) -> Floats:
            made = of_bfloat16(sums, k, rate=0)(p, rows)
            extra = rows["tokens"].shape[0] > 16
            return [x * x.dtype.type(1 + extra * 2**-12) for x in made]

        return step

    report = check_step(partial(counting, by_hand.sums), params, batch, microbatches=(4,), pad=padded)
    assert report.cause is Cause.PLACEHOLDERS, str(report)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 8, 10, 21])
def test_the_signs_of_adams_first_step_confirm_no_cause(seed: int) -> None:
    """Clipped microbatches: rounding of weights that cancel, or repeated examples, would change a few signs alike."""
    rng, f = np.random.default_rng(seed), np.float32
    first, last = f(rng.uniform(-0.8, 0.8, (4, 5))), f(rng.uniform(-0.9, 0.9, (5, 1)))
    params, batch = [first, np.zeros(5, f), last, np.zeros(1, f)], {"x": f(rng.normal(size=(12, 4)))}
    batch["y"] = f(rng.normal(size=(12, 1)))

    def clipped(p: Any, x: Any, y: Any) -> Any:
        a = np.tanh(x @ p[0] + p[1])
        e = f(2) * (a @ p[2] + p[3] - y) / f(len(y))
        z = (e @ p[2].T) * (1 - a * a)
        grads = [x.T @ z, z.sum(0), a.T @ e, e.sum(0)]
        norm = np.sqrt(sum((g * g).sum() for g in grads))
        return [g * min(f(0.05) / norm, f(1)) for g in grads]

    def make_step(k: int) -> Any:
        def step(p: Any, batch: Any) -> Any:
            p = [f(x) for x in p]
            made = [clipped(p, f(x), f(y)) for x, y in zip(*(np.array_split(batch[n], k) for n in "xy"), strict=True)]
            means = [sum(g) / f(k) for g in zip(*made, strict=True)]
            return [x - f(0.01) * m / (abs(m) + f(1e-7)) for x, m in zip(p, means, strict=True)]

        return step

    report = check_step(make_step, params, batch, microbatches=(2,), returns="params")
    assert report.cause is Cause.UNEXPLAINED, str(report)
