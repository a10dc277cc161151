"""Weights of every integer dtype and size, beyond the range of float32, and invalid ones known only at run time."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import in_modes

SUM, MEAN = reductions.sum("exact"), reductions.mean("exact")
QUICK, DISTINCT = (
    ("numpy", "jax_jit", "tf_eager"),
    ("numpy", "jax_eager", "jax_jit", "tf_eager", "tf_function", "tf_xla"),
)
X = np.float32([[1, 0.25, 1.1, -3e-30], [0.5, 1, -0.3, 2.0**-149]])

WEIGHTS = {
    "uint8": np.uint8([200, 255]),
    "uint16": np.uint16([65535, 3]),
    "uint32": np.uint32([3 * 10**9, 10**9]),
    "uint64": np.uint64([2**64 - 1, 3]),
    "int64": np.int64([2**62 + 1, 3]),
    "sum above float32": np.float32([3e38, 3e38]),
    "subnormal": np.float32([1e-40, 3e-40]),
    "subnormal and large": np.float32([1e-40, 3e38]),
    "float16": np.float16([6e-8, 2]),
}
TO_TRACE = ("uint32", "sum above float32", "subnormal and large")
"""Weights for which the quick suite traces programs: integers and floats."""


def nearest(column: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Expected sum, which may exceed the range of float32, and mean."""
    scales = [Fraction(w.item()) for w in weights]
    products = [Fraction(float(x)) * w for x, w in zip(column, scales, strict=True)]
    if weights.dtype.kind == "f":
        products = [exact.round_to(p) for p in products]
    total = sum(products, Fraction(0))
    over = abs(total) >= 2**128
    mean = float(exact.round_gradually(total / exact.round_to(sum(scales))))
    return np.copysign(np.inf, float(total)) if over else float(exact.round_gradually(total)), mean


def weighed(env: modes.Env, data: Any) -> Any:
    return [gc.combine(reduction, rows(data["x"]), rows(data["weights"])) for reduction in (SUM, MEAN)]


@pytest.mark.parametrize(
    ("kind", "name"),
    in_modes({kind: QUICK if kind in TO_TRACE else ("numpy", "tf_eager") for kind in WEIGHTS}, DISTINCT),
)
def test_sums_and_means_by_weights_of_any_type_and_size(name: str, kind: str) -> None:
    """Results are the floats nearest to the exact fractions, in every framework."""
    mode, weights = modes.get(name), WEIGHTS[kind]
    if mode.framework == "jax" and weights.dtype.itemsize == 8:
        # JAX has no 64-bit integers here, and raises for 64-bit arrays.
        weights = weights.astype(np.uint32)
    # Products of weights and values are floats too, within the same range.
    x = X[:, :2] if "float32" in kind or "subnormal" in kind else X
    ((total, mean),) = mode.run(weighed, [{"x": x, "weights": weights}])
    for column, *received in zip(x.T, total, mean, strict=True):
        assert [float(x) for x in received] == list(nearest(column, weights))


@pytest.mark.parametrize("weight", [2**31, 2**53 + 1, 2**60 + 2**7 + 1, 2**64 - 1, 10**60, 3 * 10**37])
def test_known_integers_multiply_exactly(weight: int) -> None:
    """A value of two bits is not rounded before the end, for any weight."""
    values = np.float32([3, -1e-30, 2.0**-149, 0])
    for value, received in zip(values, gc.combine(SUM, [values], [weight]), strict=True):
        wanted = Fraction(float(value)) * weight
        assert received == (
            np.copysign(np.inf, value) if abs(wanted) >= 2**128 else np.float32(exact.round_gradually(wanted))
        )
    total = sum(2 * weight - x for x in range(3))
    mean = gc.combine(MEAN, [np.float32([1.5])] * 3, [2 * weight - x for x in range(3)])
    assert mean[0] == 1.5 if total < 2**128 else np.isinf(mean[0])


@pytest.mark.parametrize("weight", [10**400, 10**60, 1e60])
def test_weights_above_the_range_count_as_infinite(weight: Any) -> None:
    values = np.float32([1, -1, 0])
    if weight != 10**60:
        np.testing.assert_array_equal(gc.combine(SUM, [values], [weight]), [np.inf, -np.inf, 0])
    np.testing.assert_array_equal(gc.combine(MEAN, [values], [weight]), [np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(gc.mean([values], weights=[weight]), [np.nan] * 3)


def test_a_sum_of_weights_that_overflows_or_vanishes_makes_a_mean_nan() -> None:
    """Division by infinity would give 0."""
    for precision in ("fast", "compensated"):
        mean = gc.combine(reductions.mean(precision), [np.float32([1e-9])] * 2, [3e38, 3e38])
        assert np.isnan(mean).all()
    assert np.isnan(gc.combine(reductions.moments(), [np.float32([1e-9])] * 2, [3e38, 3e38]).mean).all()
    assert np.isnan(gc.combine(MEAN, [np.float32([3])], [1e-60])).all()


REFUSED = {
    "negative": np.float32([-1, 3]),
    "negative integer": np.int32([-1, 3]),
    "smallest integer": np.int8([-128, 3]),
    "infinite": np.float16([np.inf, 3]),
    "NaN": np.float32([np.nan, 3]),
}
PRECISIONS = ("fast", "compensated", "exact")


def sums(env: modes.Env, data: Any) -> Any:
    return [gc.combine(reductions.sum(p), rows(data["x"]), rows(data["weights"])) for p in PRECISIONS]


def means(env: modes.Env, data: Any) -> Any:
    chosen = [*map(reductions.mean, PRECISIONS), reductions.moments()]
    *values, moments = (gc.combine(r, rows(data["x"]), rows(data["weights"])) for r in chosen)
    return [*values, *moments]


QUICK_REFUSED = {
    ("negative", sums): ("tf_function",),
    ("NaN", sums): ("tf_function",),
    ("negative integer", means): ("jax_jit",),
}
"""Weight dtypes; each one traces a different program."""
TRACED = ("jax_jit", "jax_scan", "tf_function", "tf_xla")


@pytest.mark.parametrize(
    ("kind", "program", "name"), in_modes(dict.fromkeys(product(REFUSED, (sums, means)), ()) | QUICK_REFUSED, TRACED)
)
def test_a_traced_weight_that_would_be_refused_gives_nan(kind: str, program: Any, name: str) -> None:
    """Holds in every precision: at run time it is too late for an error."""
    (results,) = modes.get(name).run(program, [{"x": X[:, :2], "weights": REFUSED[kind]}])
    for result in results:
        assert np.isnan(result).all()


def test_integers_are_multiplied_modulo_their_width() -> None:
    values = np.int32([3, -(2**30)])
    expected = [(int(v) * (2**32 + 2**31 + 5) + 2**31) % 2**32 - 2**31 for v in values]
    np.testing.assert_array_equal(gc.combine(reductions.sum(), [values], [2**32 + 2**31 + 5]), expected)
    np.testing.assert_array_equal(gc.combine(reductions.sum(), [values], [np.array(2**31 + 5, np.uint32)]), expected)


@pytest.mark.parametrize(
    "start",
    [
        lambda like: reductions.sum("exact").init(like),
        lambda like: reductions.mean("exact", output_dtype="float32").init(like),
        lambda like: reductions.adasum().init(like),
    ],
)
def test_long_doubles_are_refused_where_bits_are_decoded(start: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected .* at most 64 bits, received (float|longd)"):
        start({"w": np.longdouble([1])})
    with pytest.raises(gc.GradCombineError, match=r"adasum: expected .* at most 64 bits"):
        reductions.adasum(np.longdouble)


def test_means_of_long_doubles_add_their_weights_in_long_doubles() -> None:
    weights = [1, np.longdouble(0.1)]
    mean = gc.combine(reductions.mean(), [np.longdouble([3])] * 2, weights)
    assert abs(mean[0] - 3) <= 4 * np.finfo(np.longdouble).eps


@pytest.mark.full
@pytest.mark.needs("jax")
def test_a_masked_contribution_divides_by_nothing() -> None:
    """Under an eager vmap, a weight of 0 is unknown: no quotient is NaN before it is masked."""
    import jax

    def variance(weights: Any) -> Any:
        return gc.combine(reductions.moments(), [X[0, :2], X[1, :2]], [weights[0], weights[1]]).variance

    with jax.debug_nans(True):
        received = jax.vmap(variance)(np.float32([[0, 2], [0, 0], [1, 1]]))
    np.testing.assert_array_equal(received, np.float32([[0, 0], [0, 0], [0.0625, 0.140625]]))


FLOATS = ("bfloat16", "float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e5m2")
FLOATS += ("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
MEANS = {np.nan: np.nan, np.inf: np.nan, -1: np.nan, 0: 8, 0.5: 6, 1: 5, 2: 4}
"""The mean of 2 with this weight and 8 with weight 1."""


@pytest.mark.sampled
@pytest.mark.needs("jax")
@pytest.mark.parametrize("name", FLOATS)
def test_traced_weights_of_narrow_floats(name: str) -> None:
    """Narrow floats differ in whether they have zeros, signs and infinities."""
    import jax

    dtype = np.dtype(name)
    with np.errstate(all="ignore"):
        held = [w for w in MEANS if np.array_equal(float(np.array(w).astype(dtype)), w, equal_nan=True)]
    mean = jax.vmap(lambda weight: gc.mean([np.float32(2), np.float32(8)], [weight, 1]))
    np.testing.assert_array_equal(mean(np.array(held).astype(dtype)), [MEANS[w] for w in held])
    assert {0.5, 1, 2} <= set(held)


@pytest.mark.sampled
@pytest.mark.needs("jax")
@pytest.mark.parametrize("weight", [2**31, 2**31 + 1, 2**32 - 1, 2**40, 3 * 2**40])
def test_a_known_integer_that_may_be_left_out_stays_whole(weight: int) -> None:
    """The exact mean of contributions 1 and 0 depends on every unit of a weight."""
    import jax

    mean = reductions.zeroed(MEAN)
    received = jax.jit(lambda a, b: gc.combine(mean, [a, b], [weight, 3]))(np.float32([1]), np.float32([0]))
    assert float(received[0]) == exact.round_to(Fraction(weight, weight + 3))


@pytest.mark.needs("jax")
def test_an_integer_that_no_array_holds_is_an_error() -> None:
    import jax

    with pytest.raises(gc.GradCombineError, match=r"an integer weight below 2\*\*32 or exact in float32"):
        jax.jit(lambda x: gc.combine(reductions.zeroed(MEAN), [x], [2**40 + 1]))(np.float32([1]))


@pytest.mark.parametrize("framework", ["numpy", pytest.param("jax", marks=pytest.mark.needs("jax"))])
@pytest.mark.parametrize("weight", [3.0, 3], ids=str)
def test_a_numpy_scalar_in_an_array_is_a_number(framework: str, weight: float) -> None:
    """In JAX, an array of 64 bits would need jax_enable_x64."""
    leaf: Any = np.float32([1, 2])
    if framework == "jax":
        import jax.numpy as jnp

        leaf = jnp.asarray(leaf)
    result = gc.combine(reductions.sum(), [leaf, leaf], [np.asarray(weight), np.asarray(weight)])
    np.testing.assert_array_equal(result, [6, 12])
    with pytest.raises(gc.GradCombineError, match=r"a weight of shape \(\), received one of shape \(1,\)"):
        gc.combine(reductions.sum(), [leaf], [[np.ones(1)][0]])
