"""Exact and compensated sums have the same bits in every mode and order, and errors within their bounds."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine import reductions
from gradcombine.reductions.cell import parts
from tests.foreign_orders.data import assert_same_bits
from tests.spec import exact, modes
from tests.spec.data import CLOSE, SHAPES, contributions, deal
from tests.spec.programs import Combine, rows
from tests.spec.selection import among, in_modes, unrolled

NAMES = ("sum", "mean")


def true_value(name: str, data: Any, leaf: str) -> np.ndarray:
    """The exact result, rounded once; requires terms within nine exponents of each other, which lose no digit."""
    weights = [Fraction(float(w)) for w in data["weights"]]
    columns = data["values"][leaf].reshape(len(weights), -1).T

    def one(column: np.ndarray) -> float:
        products = [exact.term("sum", x, w)[0] for x, w in zip(column, weights, strict=True)]
        total = sum(products, Fraction(0))
        if name == "mean":
            total = total / exact.round_to(sum(weights, Fraction(0))) if any(weights) else Fraction(0)
        return float(exact.round_to(total))

    return np.float32([one(column) for column in columns]).reshape(SHAPES[leaf])


def check(results: Any, data: Any) -> None:
    for name in results:
        assert results[name]["none"] is None
        for leaf in SHAPES:
            expected = true_value(name, data, leaf)
            np.testing.assert_array_equal(results[name][leaf], expected, err_msg=f"{name} of {leaf}", strict=True)


def shuffled(data: Any, seed: int) -> Any:
    chosen = np.random.default_rng(seed).permutation(len(data["weights"]))
    values = {name: None if x is None else x[chosen] for name, x in data["values"].items()}
    return {"values": values, "weights": data["weights"][chosen]}


@pytest.mark.parametrize(("place", "name"), in_modes({"list": ("numpy",), "time": ("numpy", "jax_scan")}))
@settings(max_examples=6)
@given(data=contributions(4, CLOSE), seed=st.integers(0, 99))
def test_any_order_gives_the_correctly_rounded_sum(place: str, name: str, data: Any, seed: int) -> None:
    (results,) = modes.get(name).run(Combine(place, "sequential", NAMES, "exact"), [shuffled(data, seed)])
    check(results, data)


@pytest.mark.full
@pytest.mark.parametrize("name", among(("jax_shard_map_scan",), modes.REPLICATED))
@pytest.mark.parametrize("replicas", [2, 4])
@settings(max_examples=4)
@given(data=contributions(8, CLOSE), seed=st.integers(0, 99))
def test_any_division_over_replicas_gives_it_too(name: str, replicas: int, data: Any, seed: int) -> None:
    program = Combine("time x replicas", "sequential", NAMES, "exact")
    for results in modes.get(name).run(program, deal(shuffled(data, seed), replicas)):
        check(results, data)


class Stream:
    """The sum, the mean with traced integer weights, and the digits."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, env: modes.Env, data: Any) -> Any:
        total, mean = reductions.sum("exact"), reductions.mean("exact")
        states = total.init(data["x"][0]), mean.init(data["x"][0])
        for i in range(self.n):
            x = data["x"][i]
            states = total.update(states[0], x), mean.update(states[1], x, data["weights"][i])
        slots = states[0].value.slots
        return {"sum": total.finalize(states[0]), "mean": mean.finalize(states[1]), "slots": tuple(slots)}


WEIGHTS = np.int32([5000, 0, 2**20 + 1])
STREAM = Stream(len(WEIGHTS))


@pytest.mark.full
@unrolled
def test_all_modes_have_the_same_digits(mode: modes.Mode) -> None:
    """Holds for subnormal numbers and every exponent too, unlike plain sums."""
    for kind, x in exact.patterns(len(WEIGHTS), 512).items():
        data = {"x": x, "weights": WEIGHTS}
        (result,) = mode.run(STREAM, [data])
        (reference,) = modes.get("numpy").run(STREAM, [data])
        for key in ("sum", "mean"):
            np.testing.assert_array_equal(exact.bits(result[key]), exact.bits(reference[key]), kind)
        for word, expected in zip(result["slots"], reference["slots"], strict=True):
            np.testing.assert_array_equal(word, expected, kind)


def folded(x: np.ndarray) -> Any:
    """The state after all rows of x, in order."""
    reduction = reductions.sum("exact")
    state = reduction.init(x[0])
    for row in x:
        state = reduction.update(state, row)
    return state


ALL = "all kinds side by side"


@pytest.mark.parametrize(
    ("n", "kind"),
    [
        *((n, kind) for n in (1, 2, 3, 16) for kind in exact.patterns(2, 2)),
        (64, ALL),
        (256, ALL),
        pytest.param(512, ALL, marks=pytest.mark.full),
        pytest.param(4096, ALL, marks=pytest.mark.slow),
    ],
)
def test_order_grouping_and_error_bound(n: int, kind: str) -> None:
    """Permutations and merge trees change no bit."""
    kinds, reduction = exact.patterns(n, 64 if n <= 64 else 8), reductions.sum("exact")
    x = np.concatenate(list(kinds.values()), axis=1) if kind == ALL else kinds[kind]
    exact.check_grouping(reduction, folded, x, seeds=range(3))


def summed(env: modes.Env, data: Any) -> Any:
    return gc.combine(reductions.sum("exact"), rows(data))


@unrolled
def test_specials(mode: modes.Mode) -> None:
    values, expected = exact.specials()
    (result,) = mode.run(summed, [values])
    np.testing.assert_array_equal(exact.bits(result), exact.bits(expected))


@unrolled
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_are_rounded_once(mode: modes.Mode, dtype: str) -> None:
    """The sum lies above a tie of the narrow format by less than float32 resolves."""
    precision = exact.PRECISION[dtype]
    values = [1.0, 2.0**-precision, 2.0**-14, 2.0**-14]
    wide = np.array([[v, -v] for v in values]).astype(dtype)
    (result,) = mode.run(summed, [wide])
    total = sum((Fraction(float(v)) for v in wide[:, 0]), Fraction(0))
    assert result.dtype == dtype
    expected = float(exact.round_to(total, dtype))
    np.testing.assert_array_equal(result.astype(np.float64), [expected, -expected])


@pytest.mark.full
@unrolled
def test_whole_weights_multiply_exactly(mode: modes.Mode) -> None:
    """Holds for token counts so large that float32 would round the weight, the product and the sum of weights."""
    x = np.float32([[1.1, -3.3e7], [2.7, 1.3], [-0.3, 7.7e-3]])
    for weights in ([3, 1, 5], [2**24 + 1, 3, 2**30 + 7], [4097, 4096, 2**31 - 1]):
        (result,) = mode.run(weighted_mean, [{"x": x, "weights": np.int32(weights)}])
        known = gc.combine(reductions.mean("exact"), list(x), weights)
        total = exact.round_to(Fraction(sum(weights)))
        for column, received, other in zip(x.T, result, known, strict=True):
            products = sum(Fraction(float(v)) * w for v, w in zip(column, weights, strict=True))
            assert float(received) == float(other) == float(exact.round_to(products / total))


def weighted_mean(env: modes.Env, data: Any) -> Any:
    return gc.combine(reductions.mean("exact"), rows(data["x"]), rows(data["weights"]))


def test_more_than_the_digits_hold_is_nan_and_never_a_wrong_number() -> None:
    reduction = reductions.sum("exact")
    state = exact.at_once(reduction, reduction.init(np.float32([0])), [np.float32([1])] * 4095, [1] * 4095)
    state = reduction.update(state, np.float32([1]))
    assert reduction.finalize(state) == 4096
    assert np.isnan(reduction.finalize(reduction.update(state, np.float32([1]))))
    assert np.isnan(reduction.finalize(reduction.merge(state, state)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_wider_output_holds_the_rounded_float32(dtype: Any) -> None:
    total = gc.combine(reductions.sum("exact", output_dtype=dtype), [np.float32([0.1])] * 3)
    assert total.dtype == dtype
    assert total[0] == np.float32(exact.round_to(3 * Fraction(float(np.float32(0.1)))))


COMPENSATED = Combine("list", "sequential", NAMES, "compensated")


@unrolled
@settings(max_examples=8)
@given(data=contributions(6, CLOSE))
def test_compensated_sums_keep_to_their_bound(mode: modes.Mode, data: Any) -> None:
    """The error is at most u |S| + gamma**2 sum |x|, and every mode has the same bits."""
    (results,) = mode.run(COMPENSATED, [data])
    (reference,) = modes.get("numpy").run(COMPENSATED, [data])
    u, n = Fraction(1, 2**24), len(data["weights"])
    gamma = n * u / (1 - n * u)
    for leaf in SHAPES:
        for key in NAMES:
            np.testing.assert_array_equal(exact.bits(results[key][leaf]), exact.bits(reference[key][leaf]))
        columns = data["values"][leaf].reshape(n, -1).T
        for column, received in zip(columns, results["sum"][leaf].ravel(), strict=True):
            terms = [exact.term("sum", x, w)[0] for x, w in zip(column, data["weights"], strict=True)]
            total, size = sum(terms, Fraction(0)), sum(map(abs, terms), Fraction(0))
            assert abs(Fraction(float(received)) - total) <= u * abs(total) + gamma**2 * size


LEAVES = 70


@pytest.mark.full
@pytest.mark.parametrize("max_terms", [None, 1 << 20])
@pytest.mark.parametrize("make", [reductions.sum, reductions.mean])
def test_many_small_leaves_have_the_bits_and_states_of_each_alone(make: Any, max_terms: int | None) -> None:
    rng, special = np.random.default_rng(7), [np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-45, -3e-39, 3e38]
    dtypes = [np.dtype(x) for x in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64, ">f4")]
    shapes = [(), (1,), (0,), (2, 0), (3, 5), (17,), (4097,)]

    def leaf(i: int) -> np.ndarray | None:
        if i % 19 == 18:
            return None
        x = np.asarray(rng.normal(size=shapes[i % 7]) * 2.0 ** rng.integers(-40, 40))
        if i % 3 == 0 and x.size:
            x.flat[0] = special[i // 3 % 8]
        with np.errstate(over="ignore"):
            return x.astype(dtypes[i % 5])

    def grads(seed: int) -> list[Any]:
        made = [leaf(i) for i in range(LEAVES)]
        # Any leaf but the first may lack its gradient in one contribution.
        return [None if i and i % 23 == seed else x for i, x in enumerate(made)]

    red = make("exact") if max_terms is None else make("exact", max_terms=max_terms)
    like, terms, weights = [leaf(i) for i in range(LEAVES)], [grads(seed) for seed in range(5)], [1, 3, 0.5, 0, 1]

    def states(like: Any, terms: Any) -> list[Any]:
        one = red.update(red.update(red.init({"x": like, "empty": ()}), terms[0], weights[0]), terms[1], weights[1])
        many = exact.at_once(red, one, terms[2:], weights[2:])
        return [one, many, red.merge(one, many), red.clear(many)]

    trees = [{"x": x, "empty": ()} for x in terms]
    together, listed = states(like, trees), gc.combine(red, trees, weights)
    for i, x in enumerate(like):
        if x is None:
            continue
        column = [{"x": term[i], "empty": ()} for term in terms]
        alone = states(x, column)
        assert_same_bits(listed["x"][i], gc.combine(red, column, weights)["x"])
        for a, b in zip(together, alone, strict=True):
            assert type(a.value["x"][i]) is type(b.value["x"])
            assert a.count.tobytes() == b.count.tobytes()
            for pair in ((a.value["x"][i], b.value["x"]), (red.finalize(a)["x"][i], red.finalize(b)["x"])):
                for got, expected in zip(*map(parts, pair), strict=True):
                    assert_same_bits(got, expected)


@pytest.mark.needs("jax", "tensorflow")
def test_constants_of_a_program_keep_the_bits_of_exact_sums() -> None:
    """XLA simplifies ``(x + 1e8) - 1e8`` to ``x`` if the numbers are constants of the program."""
    import jax
    import tensorflow as tf

    large, half, one = np.float32([1e8]), np.float32([0.5]), np.float32([1])

    def total(x: Any) -> Any:
        return gc.combine(gc.reductions.sum("exact"), [x, large, half, -large])

    programs = (total, one), (jax.jit(total), one), (tf.function(total, jit_compile=True), tf.constant(one))
    for program, x in programs:
        np.testing.assert_array_equal(np.asarray(program(x)), one + half)
