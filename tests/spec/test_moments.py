"""Mean and variance in one pass, in every mode: the bits of the rounded formula, and its error bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings

import gradcombine as gc
from gradcombine import reductions
from tests.spec import exact, modes
from tests.spec.data import FLOATS, SHAPES, contributions, deal, first
from tests.spec.programs import Single, rows
from tests.spec.selection import FULL, REPLICAS, pairwise, traced_quickly

MOMENTS = reductions.moments()
Spread = partial(Single, MOMENTS)


class Part(NamedTuple):
    """A partial result of one element in rational numbers; empty if its weight is 0."""

    total: Fraction
    squares: Fraction
    weight: Fraction


def join(a: Part, b: Part) -> Part:
    """The merge of Chan, Golub and LeVeque, rounded to float32 after each operation."""
    if not a.weight or not b.weight:
        return a if a.weight else b
    r = exact.round_to
    apart = r(r(a.total / a.weight) - r(b.total / b.weight))
    share = r(r(a.weight * b.weight) / r(a.weight + b.weight))
    squares = r(r(a.squares + b.squares) + r(r(apart**2) * share))
    return Part(r(a.total + b.total), squares, r(a.weight + b.weight))


def rounded(terms: Sequence[tuple[Fraction, Fraction]], order: str, blocks: int) -> tuple[Fraction, Fraction]:
    """Expected mean and variance with rounding: in ``order`` within each block, in the canonical tree over blocks."""
    r = exact.round_to
    whole = exact.fold(join, [Part(r(x * w), Fraction(0), w) for x, w in terms], order, blocks)
    return r(whole.total / (whole.weight or 1)), r(whole.squares / (whole.weight or 1))


def true_moments(terms: Sequence[tuple[Fraction, Fraction]]) -> tuple[Fraction, Fraction]:
    """Mean and variance without rounding."""
    weight = sum(w for _, w in terms)
    if not weight:
        return Fraction(0), Fraction(0)
    mean = sum(w * x for x, w in terms) / weight
    return mean, sum(w * (x - mean) ** 2 for x, w in terms) / weight


def bound(terms: Sequence[tuple[Fraction, Fraction]], dtype: str = "float32") -> float:
    """Error bound of a variance, for any order.

    Each difference of two means is off by at most 2 n u max|x| + u |d|. Its square counts W_a W_b / (W_a + W_b) times;
    by p (1 - p) <= H(p) / 4 these shares sum to at most W log2(n) / 4 over any tree of merges.
    """
    present = [x for x, w in terms if w]
    n, u = len(present), 2.0 ** -exact.PRECISION[dtype]
    if n < 2:
        return 0.0
    variance, largest = float(true_moments(terms)[1]), float(max(map(abs, present)))
    first = n * u * (8 * variance + 2 * largest * math.sqrt(math.log2(n) * variance))
    return first + (n * u * largest) ** 2 * math.log2(n)


def columns(values: np.ndarray, weights: np.ndarray) -> list[list[tuple[Fraction, Fraction]]]:
    """The terms of each element as (value, weight). A value of weight 0 may be NaN."""
    exactly = [Fraction(float(w)) for w in weights]
    flat = values.reshape(len(values), -1)
    return [[(Fraction(float(x)) if w else Fraction(0), w) for x, w in zip(c, exactly, strict=True)] for c in flat.T]


def check(result: Any, data: Any, order: str, blocks: int = 1) -> None:
    """Asserts the bits of the rounded formula, that the mean has those of `mean`, and the variance's error bound."""
    assert result["none"] is None
    for leaf, shape in SHAPES.items():
        values, weights = data["values"][leaf], data["weights"]
        terms = columns(values, weights)
        expected = np.float32([[float(x) for x in rounded(c, order, blocks)] for c in terms]).T.reshape(2, *shape)
        received = result[leaf]
        assert received.mean.dtype == received.variance.dtype == np.float32
        np.testing.assert_array_equal(exact.bits(received.variance), exact.bits(expected[1]), err_msg=leaf, strict=True)
        np.testing.assert_array_equal(received.mean, expected[0], err_msg=leaf, strict=True)
        of_mean = exact.elementwise("mean", values, weights, order, blocks)
        np.testing.assert_array_equal(received.mean, of_mean, err_msg=leaf, strict=True)
        for variance, column in zip(received.variance.ravel(), terms, strict=True):
            assert abs(Fraction(float(variance)) - true_moments(column)[1]) <= bound(column)


@pairwise(2, "mode", "place")
@traced_quickly(("jax_jit", "time", "tree"), ("tf_function", "list", "sequential"))
@pytest.mark.parametrize(
    ("place", "order"),
    [
        ("list", "sequential"),
        pytest.param("list", "tree", marks=FULL),
        ("time", "tree"),
        pytest.param("time", "sequential", marks=FULL),
    ],
)
@settings(max_examples=6)
@given(data=contributions(5, FLOATS))
def test_list_and_time_have_the_bits_of_the_rounded_rule(mode: modes.Mode, place: str, order: str, data: Any) -> None:
    (result,) = mode.run(Spread(place, order), [data])
    check(result, data, order)


@pairwise(2, "replicated", "replicas", "place")
@traced_quickly(("jax_shard_map",))
@pytest.mark.parametrize(("place", "order"), [("time x replicas", "tree"), ("list x replicas", "sequential")])
@pytest.mark.parametrize("replicas", REPLICAS)
@settings(max_examples=4)
@given(data=contributions(8, FLOATS))
def test_replicas_have_the_bits_of_a_list(
    replicated: modes.Mode, replicas: int, place: str, order: str, data: Any
) -> None:
    """Order "tree" is independent of the number of replicas; order "sequential" is a chain on each of them."""
    data = first(data, max(4, replicas))
    (listed,) = modes.get("numpy").run(Spread("list", "tree"), [data])
    for result in replicated.run(Spread(place, order), deal(data, replicas)):
        check(result, data, order, 1 if order == "tree" else replicas)
        for leaf in SHAPES if order == "tree" else ():
            for received, expected in zip(result[leaf], listed[leaf], strict=True):
                np.testing.assert_array_equal(exact.bits(received), exact.bits(expected))


@traced_quickly(("time",))
@pytest.mark.parametrize("place", ["list", "time"])
def test_exact_where_nothing_rounds(mode: modes.Mode, place: str) -> None:
    data = {"values": {"w": np.float32([6, 2, np.nan, 0, 4])}, "weights": np.float32([1, 1, 0, 2, 4])}
    (result,) = mode.run(Spread(place, "sequential"), [data])
    assert (result["w"].mean, result["w"].variance) == (3, 4)


@traced_quickly(("jax_jit",))
@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
def test_a_large_mean_does_not_swallow_the_variance(mode: modes.Mode, order: str) -> None:
    """With a standard deviation of a thousandth of the mean, E[x**2] - E[x]**2 would have no correct digit."""
    rng = np.random.default_rng(0)
    values, weights = np.float32(1e4 + rng.normal(size=(8, 4))), np.float32(rng.integers(1, 9, 8))
    (result,) = mode.run(Spread("time", order), [{"values": {"w": values}, "weights": weights}])
    total = weights.sum()
    naive = weights @ values**2 / total - (weights @ values / total) ** 2
    for received, wrong, terms in zip(result["w"].variance, naive, columns(values, weights), strict=True):
        expected = true_moments(terms)[1]
        assert abs(Fraction(float(received)) - expected) <= min(bound(terms), expected / 100)
        assert abs(Fraction(float(wrong)) - expected) >= expected


@traced_quickly(("3",))
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_not_finite_has_no_variance(mode: modes.Mode, n: int) -> None:
    values = np.float32([[np.inf, np.nan, 2], [1, 1, 2], [np.inf, 1, 2]])[:n]
    (result,) = mode.run(Spread("list", "sequential"), [{"values": {"w": values}, "weights": np.ones(n, np.float32)}])
    np.testing.assert_array_equal(result["w"].mean, np.float32([np.inf, np.nan, 2]))
    np.testing.assert_array_equal(result["w"].variance, np.float32([np.nan, np.nan, 0]))


def partly_none(env: modes.Env, data: Any) -> Any:
    acc = gc.accumulate(MOMENTS, every=4)
    state = acc.init({"w": data["w"][0], "never": data["w"][0], "none": None})
    trees = [{"w": w, "never": None, "none": None} for w in (None, data["w"][0], None, data["w"][1])]
    for value, weight in zip(trees, rows(data["weights"]), strict=True):
        state = acc.update(value, state, weight)
    half = MOMENTS.merge(*(MOMENTS.update(MOMENTS.init(trees[1]), tree, 1) for tree in trees[:2]))
    return {"time": acc.value(state), "merged": MOMENTS.finalize(half)}


def test_a_leaf_that_is_none_in_some_contributions_was_zero_there(mode: modes.Mode) -> None:
    """As in a mean: the moments of 0, 6, 0, 4 with weights 2, 1, 1, 4, and of 0, 6 with weights 1, 1."""
    (result,) = mode.run(partly_none, [{"w": np.float32([6, 4]), "weights": np.float32([2, 1, 1, 4])}])
    terms = [(Fraction(x), Fraction(w)) for x, w in ((0, 2), (6, 1), (0, 1), (4, 4))]
    mean, variance = true_moments(terms)
    assert result["time"]["none"] is None
    assert result["time"]["w"].mean == mean
    assert abs(Fraction(float(result["time"]["w"].variance)) - variance) <= bound(terms)
    assert tuple(result["time"]["never"]) == (0, 0)
    assert tuple(result["merged"]["w"]) == (3, 9)


def test_leaves_of_two_widths_keep_their_own_weights() -> None:
    """Weights that are rounded for a float32 leaf but not for a float64 leaf add no phantom zeros."""
    values = [{"wide": np.float64([1e4 + i % 3]), "narrow": np.float32([1e4 + i % 3])} for i in range(30)]
    result = gc.combine(MOMENTS, values, [np.float64(0.1)] * 30)
    terms = [(Fraction(10000 + i % 3), Fraction(1)) for i in range(30)]
    assert result["wide"].variance.dtype == np.float64
    assert abs(result["wide"].variance[0] - 2 / 3) <= bound(terms, "float64")
    assert abs(result["narrow"].variance[0] - 2 / 3) <= bound(terms)


INTO_FLOAT32 = Single(reductions.moments(output_dtype="float32"), "list", "sequential")


@traced_quickly(("float16", "False"), ("bfloat16", "True"))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_narrow_floats_accumulate_in_float32(mode: modes.Mode, dtype: str, wide: bool) -> None:
    values = np.array([[256], [258]]).astype(dtype)
    program = INTO_FLOAT32 if wide else Spread("list", "sequential")
    (result,) = mode.run(program, [{"values": {"w": values}, "weights": np.float32([1, 3])}])
    mean = Fraction(515, 2) if wide else exact.round_to(Fraction(515, 2), dtype)
    assert (Fraction(float(result["w"].mean[0])), result["w"].variance[0]) == (mean, 0.75)
    assert result["w"].mean.dtype == result["w"].variance.dtype == ("float32" if wide else dtype)


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
def test_only_real_floats_have_moments(dtype: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"moments: leaf \['n'\]: expected a dtype that is float"):
        gc.combine(MOMENTS, [{"n": np.ones(2, dtype)}])
