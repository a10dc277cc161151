"""Defects planted in a hand-written NumPy step are named; harmless reorderings are not accused."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps import by_hand, defects
from tests.verify.steps.dividing import eager

PARAMS = by_hand.params()


def check(make: Any, examples: int = 8, **options: Any) -> StepReport:
    batch = options.pop("batch", None) or by_hand.batch(examples)
    return check_step(partial(make, by_hand.sums), options.pop("params", PARAMS), batch, **options)


UNEVEN: dict[str, Any] = {"examples": 10, "microbatches": (4,)}
REAL = by_hand.batch()
WITH_PLACEHOLDERS = REAL | {"mask": REAL["mask"] * (np.arange(8) < 6)[:, None].astype(np.float32)}

DEFECTS: dict[str, tuple[Any, dict[str, Any], Cause, str]] = {
    "mean of means": (defects.mean_of_means, {}, Cause.MEAN_OF_MEANS, "they weigh from 0.24 to 0.76"),
    "sum of means": (defects.sum_of_means, {}, Cause.SUM, "2 times the mean"),
    "the rest dropped": (
        defects.drops_the_rest, UNEVEN, Cause.LOST, "examples 8, 9; the rest is divided by its own weight",
    ),
    "the last dropped": (
        defects.drops_the_last, {"microbatches": (4,)}, Cause.LOST, "examples 6, 7; the rest is divided by the weight",
    ),
    "only the last": (
        defects.only_the_last, {}, Cause.LOST, "examples 0, 1, 2, 3; the rest is divided by its own weight",
    ),
    "doubled": (defects.doubles, {}, Cause.DOUBLED, "example 3"),
    "zeros counted": (defects.pads_with_zeros, UNEVEN, Cause.PLACEHOLDERS, "the last microbatch is padded with 2 rows"),
    "trained on padding": (
        defects.trains_on_padding, {"batch": WITH_PLACEHOLDERS}, Cause.PLACEHOLDERS, "the contents of example 6",
    ),
    "clipped each": (defects.clips_each, {}, Cause.CHANGED_BEFORE, "a norm of 0.05"),
    "decay each": (defects.decays_each, {}, Cause.ADDED, "0.001 times the parameters"),
    "little decay each": (partial(defects.decays_each, rate=1e-5), {}, Cause.ADDED, "1e-05 times the parameters"),
    "penalty each": (defects.penalizes_each, {}, Cause.ADDED, "0.004 times the parameters"),
    "schedule each": (defects.scheduled_each, {}, Cause.BY_PLACE, "multiplied by 1, 0.5"),
    "moving average": (defects.averages_each, {"microbatches": (4,)}, Cause.BY_PLACE, "multiplied by"),
    "updates each": (defects.updates_each, {"returns": "params"}, Cause.MOVED_EACH, "2 updates"),
    "float16": (defects.narrow, {}, Cause.PRECISION, "within 16-bit rounding"),
    "bfloat16": (partial(defects.narrow, dtype=ml_dtypes.bfloat16), UNEVEN, Cause.PRECISION, "within 16-bit rounding"),
    "rows set": (defects.overwrites_rows, {}, Cause.SCATTER, "rows keep one contribution"),
    "a microbatch without tokens": (
        defects.weighted_means, {"batch": WITH_PLACEHOLDERS, "microbatches": (4,)}, Cause.NOT_FINITE, "[0]",
    ),
    "hidden state": (defects.Stateful, {}, Cause.STATE, ""),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_named(name: str) -> None:
    make, options, cause, detail = DEFECTS[name]
    report = check(make, **options)
    assert not report.passes
    assert report.cause is cause, str(report)
    assert detail in report.faults[0].detail
    assert str(cause) in str(report)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rounds", ["contributions", "sums"])
def test_16_bit_accumulators_of_four_numbers_are_named(rounds: str, dtype: Any) -> None:
    """Few elements are compared at several parameters; examples that are masked out have no result."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 3)), "y": rng.normal(size=16), "mask": np.arange(16) % 4 != 3}
    params = {"w": rng.normal(size=3), "b": rng.normal(size=())}

    def cast(x: Any, k: int) -> Any:
        return x if k == 1 else x.astype(dtype).astype(x.dtype)

    def make_step(k: int) -> Any:
        def step(p: Any, b: Any) -> Any:
            error = (b["x"] @ p["w"] + p["b"] - b["y"]) * b["mask"]
            total = {"w": np.zeros_like(p["w"]), "b": np.zeros_like(p["b"])}
            for rows in np.array_split(np.arange(len(error)), k):
                terms = {"w": error[rows] @ b["x"][rows], "b": error[rows].sum()}
                if rounds == "contributions":
                    terms = {name: cast(x, k) for name, x in terms.items()}
                total = {name: x + terms[name] for name, x in total.items()}
                if rounds == "sums":
                    total = {name: cast(x, k) for name, x in total.items()}
            return {name: x / b["mask"].sum() for name, x in total.items()}

        return step

    report = check_step(make_step, jax.tree.map(np.float32, params), jax.tree.map(np.float32, batch))
    assert report.cause is Cause.PRECISION, str(report)
    assert "within 16-bit rounding" in report.faults[0].detail


HARMLESS = (
    *((make, options) for make in (defects.right, defects.backwards, defects.in_a_tree) for options in ({}, UNEVEN)),
    (defects.right, {"batch": WITH_PLACEHOLDERS}),
    (defects.weighted_means, UNEVEN),
)


@pytest.mark.parametrize(("make", "options"), HARMLESS)
def test_orders_of_additions_are_not_accused(make: Any, options: dict[str, Any]) -> None:
    report = check(make, **options)
    assert report.passes, str(report)
    assert all(run.accuracy is not None and run.accuracy < 0.5 for run in report.runs)


def broken(sums: Any, k: int) -> Any:
    if k > 1:
        raise TypeError("no microbatches")
    return defects.right(sums, k)


@defects.of_sums
def reshapes(sums: Any, p: Any, batch: Any, k: int) -> Any:
    np.reshape(batch["tokens"], (k, len(batch["tokens"]) // k, -1, 6))
    return defects.right(sums, k)(p, batch) if k == 1 else np.reshape(p[0], (k, 7))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (defects.right, {"batch": {"a": np.ones((4, 2)), "b": np.ones(3)}}, "4 examples along the first axis"),
        (defects.right, {"batch": {"a": np.float32(1)}}, "a batch of two examples or more, received none"),
        (
            lambda sums, k: lambda p, batch: [p[0] / 2],
            {"params": [0.5], "returns": "params"},
            r"leaf \[0\]: expected an array as a parameter that the step changes, received 0.5, then 0.25",
        ),
        (defects.right, {"microbatches": ()}, "numbers of microbatches"),
        (defects.right, {"microbatches": (1,), "devices": [1]}, "a division of the batch .* received one batch alone"),
        (defects.right, {"microbatches": (0,)}, "a number of microbatches"),
        (defects.right, {"microbatches": (9,)}, "at least as many examples as parts"),
        (defects.right, {"unit": 0}, r"a unit roundoff from 2\*\*-53 to below 1, such as 2\*\*-24, received 0"),
        (defects.right, {"unit": 1.0}, "a unit roundoff .* received 1.0"),
        (defects.right, {"unit": float("nan")}, "a unit roundoff .* received nan"),
        (defects.right, {"returns": "loss"}, "returns to be 'gradients' or 'params'"),
        (lambda sums, k: 3, {}, "a step that takes 8 examples as one batch, received TypeError"),
        (lambda sums, k: lambda p, batch: [], {}, "a step that returns float arrays"),
        (lambda sums, k: lambda p, batch: [p[0] * np.float32("nan")], {}, "a step whose result is finite"),
        (lambda sums, k: lambda p, batch: p[:2], {"returns": "params"}, "the structure to have"),
        (lambda sums, k: lambda p, batch: p[:k], {}, "the structure to have"),
        (reshapes, {"microbatches": (3,)}, "takes 8 examples as 3 microbatches, received ValueError: cannot reshape"),
        (broken, {}, "make_step for 2 microbatches, received TypeError: no microbatches"),
    ],
)
def test_is_refused(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        check(make, **options)


def test_a_given_reference_tells_which_side_is_off() -> None:
    exact = defects.right(by_hand.sums, 1)([x.astype(np.float64) for x in PARAMS], by_hand.batch())
    report = check(lambda sums, k: defects.right(sums, k) if k > 1 else defects.only_the_last(sums, 2), reference=exact)
    one, *others = report.runs
    assert one.noises is not None and one.noises > 1e4
    assert all(run.noises is not None and run.noises < 8 for run in others)
    assert report.cause is Cause.INACCURATE


@pytest.mark.parametrize("unit", [2.0**-4, 2.0**-2, 0.5])
@pytest.mark.parametrize(("make", "cause"), [(defects.right, None), (defects.sum_of_means, Cause.SUM)])
def test_the_bound_of_a_coarse_unit_hides_no_defect(make: Any, cause: Cause | None, unit: float) -> None:
    """A sum of many terms of 8 bits may be all rounding, so float64 decides."""
    report = check(make, 16, unit=unit)
    assert report.cause is cause, str(report)
    assert report.verdict is (Verdict.PASSES if cause is None else Verdict.FAILS)
    assert all(run.invariance >= 0 for run in report.runs)


def test_a_step_that_is_worse_than_its_rounding_noise_is_inaccurate() -> None:
    """Adds a large number and subtracts it again: equal for every division of the batch, but far from float64."""

    def make_step(k: int) -> Any:
        del k
        large = np.float32(1e3)
        return lambda p, batch: batch.mean() * p + large - large

    report = check_step(make_step, np.linspace(0.5, 1, 64, dtype=np.float32), np.linspace(0, 1, 8, dtype=np.float32))
    assert report.cause is Cause.INACCURATE, str(report)


def test_random_numbers_of_a_step_for_one_size_of_the_batch() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(10, 3)).astype(np.float32), np.linspace(0.5, 1, 3, dtype=np.float32)

    def make_step(k: int) -> Any:
        def gradient(w: Any, x: Any) -> Any:
            x = x * (np.random.default_rng(0).random((len(x), 1)) < 0.5).astype(x.dtype)
            return x.T @ (x @ w - 1)

        parts = np.array_split(range(10), k)
        return lambda w, batch: sum(gradient(w, batch.reshape(10, 3)[rows]) for rows in parts) / np.float32(10)

    report = check_step(make_step, w, x, microbatches=(4,))
    assert report.cause is Cause.RANDOM, str(report)


def test_a_mask_of_infinities_counts_nothing() -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 3)).astype(np.float32), "mask": np.full((8, 2), -np.inf, np.float32)}

    def make_step(k: int) -> Any:
        def step(w: Any, batch: Any) -> Any:
            x = batch["x"] - batch["x"].mean(axis=0)
            gradient = x.T @ (x @ w) / np.float32(8)
            return gradient if k == 1 else gradient + np.float32(0.01) * np.sin(50 * gradient)

        return step

    report = check_step(make_step, np.linspace(0.5, 1, 3, dtype=np.float32), batch)
    assert report.cause is Cause.UNEXPLAINED, str(report)


def of_terms(params: Any, part: Any) -> dict[str, Any]:
    """Two terms: the cross entropy per token, and an L2 penalty on the first token's embedding per example."""
    rows = part["tokens"][:, 0]
    embedding_grad = np.zeros_like(params[0])
    np.add.at(embedding_grad, rows, params[0][rows] / 8)
    zeros = [np.zeros_like(x) for x in params[1:]]
    return {"words": by_hand.sums(params, part), "near": ([embedding_grad, *zeros], len(rows))}


def with_terms(divide: Any) -> Any:
    @eager
    def make_step(params: Any, batch: Any, k: int) -> Any:
        made = [of_terms(params, part) for part in defects.pieces(batch, k)]
        return divide(made) if k > 1 else divide_rightly(made)

    return make_step


def divide_rightly(made: list[Any], near_by: str = "near") -> Any:
    def mean(name: str, by: str) -> Any:
        return defects.over(defects.added([m[name][0] for m in made]), sum(m[by][1] for m in made))

    return defects.added([mean("words", "words"), mean("near", near_by)])


def divide_each(made: list[Any]) -> Any:
    return defects.over(defects.added([divide_rightly([m]) for m in made]), len(made))


def divide_near_each(made: list[Any]) -> Any:
    words = divide_rightly([m | {"near": ([0 * x for x in m["near"][0]], m["near"][1])} for m in made])
    near = [defects.over(m["near"][0], m["words"][1]) for m in made]
    return defects.added([words, defects.over(defects.added(near), len(made))])


@pytest.mark.parametrize(
    ("divide", "detail"),
    [
        (partial(divide_rightly, near_by="words"), "near divided by the weight of words"),
        (divide_each, "words divided by the weight of words in each microbatch, then averaged"),
        (divide_near_each, "near divided by the weight of words in each microbatch, then averaged"),
        (divide_rightly, None),
    ],
)
def test_a_term_divided_by_what_does_not_count_it(divide: Any, detail: str | None) -> None:
    report = check_step(with_terms(divide), PARAMS, by_hand.batch(), terms=of_terms)
    assert report.cause is (None if detail is None else Cause.DENOMINATOR), str(report)
    assert detail is None or report.faults[0].detail == detail


def test_a_term_that_counts_nothing_is_beside_another_one() -> None:
    def terms(params: Any, part: Any) -> dict[str, Any]:
        return of_terms(params, part) | {"none": ([np.zeros_like(x) for x in params], 0)}

    report = check_step(with_terms(partial(divide_rightly, near_by="words")), PARAMS, by_hand.batch(), terms=terms)
    assert report.faults[0].detail == "near divided by the weight of words", str(report)


def test_a_term_that_is_not_divided_has_the_weight_1() -> None:
    """Its sums over the microbatches are averaged, as the other term's means of equal microbatches are."""

    def terms(params: Any, part: Any) -> dict[str, Any]:
        made = of_terms(params, part)
        return {"near": made["near"], "words": (made["words"][0], 1)}

    @eager
    def make_step(params: Any, batch: Any, k: int) -> Any:
        made = [terms(params, part) for part in defects.pieces(batch, k)]
        means = [defects.added([defects.over(*m["near"]), m["words"][0]]) for m in made]
        return defects.over(defects.added(means), k)

    report = check_step(make_step, PARAMS, by_hand.batch(), terms=terms)
    assert report.cause is Cause.DENOMINATOR, str(report)
    assert report.faults[0].detail == "words divided by the weight of words in each microbatch, then averaged"


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (lambda params, part: {"words": by_hand.sums(params, part)}, "terms that add up to the gradient of one batch"),
        (lambda params, part: [1.0], "received AttributeError"),
        (lambda params, part: {"words": 3.0}, "received TypeError"),
        (lambda params, part: {"words": (params[:1], 1)}, "gradients of terms like those of the step"),
        (lambda params, part: {"words": (params, np.nan)}, "terms with finite weights, received words: nan"),
    ],
)
def test_terms_that_are_none_are_refused(terms: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        check_step(with_terms(divide_rightly), PARAMS, by_hand.batch(), terms=terms)
