"""Adasum in every mode: the bits of its rounded formula where dot products are exact, elsewhere its error bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import gradcombine as gc
from tests.spec import exact, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, WEIGHTS, contributions, deal
from tests.spec.programs import Single, rows
from tests.spec.selection import traced_quickly

ADASUM = gc.reductions.adasum()
ORDERS = ("sequential", "tree")
Vector = tuple[Fraction, ...]


Adaptive = partial(Single, ADASUM)
PAIRWISE = Adaptive("list", "tree")


def everywhere(env: modes.Env, data: Any) -> Any:
    """Combines in a list and over time in both orders, in one program."""
    return {f"{place} {order}": Adaptive(place, order)(env, data) for place in ("list", "time") for order in ORDERS}


def vector(values: Any) -> Vector:
    return tuple(Fraction(float(x)) for x in np.ravel(values))


def power_of_two(a: Vector) -> Fraction:
    return Fraction(2) ** (math.frexp(float(sum(map(abs, a))))[1] - 1)


def exact_dot(a: Vector, b: Vector) -> Fraction:
    """The dot product: rounded for one element; for several, all partial sums must be exact."""
    if len(a) == 1:
        return exact.round_to(a[0] * b[0])
    products = [x * y for x, y in zip(a, b, strict=True)]
    grid = min((abs(p) for p in products if p), default=Fraction(1))
    unit = Fraction(2) ** (math.frexp(float(grid))[1] - 24)
    assert all((p / unit).denominator == 1 for p in products)
    unit = math.gcd(*(int(p / unit) for p in products)) * unit
    assert not unit or sum(map(abs, products)) / unit <= 2**24
    return sum(products, Fraction(0))


def rounded(a: Vector, b: Vector) -> Vector:
    """adasum(a, b), rounded to float32 after each operation."""
    if not any(a) or not any(b):
        return a if any(a) else b
    r = exact.round_to
    units = power_of_two(a), power_of_two(b)
    scaled = [tuple(x / unit for x in v) for v, unit in zip((a, b), units, strict=True)]
    dot = exact_dot(*scaled)
    shares = [r(dot / exact_dot(v, v)) * other / 2 for v, other in zip(scaled, reversed(units), strict=True)]
    left, right = ([r(x * share) for x in v] for v, share in zip(scaled, shares, strict=True))
    return tuple(r(r(x - p) + r(y - q)) for x, p, y, q in zip(a, left, b, right, strict=True))


def expected_of(values: Sequence[Any], weights: Sequence[Any], order: str, blocks: int = 1) -> np.ndarray:
    """Expected result: in ``order`` within each block, in the canonical tree over blocks."""
    shape = np.shape(values[0])
    nothing = (Fraction(0),) * math.prod(shape)
    vectors = [vector(x) if w else nothing for x, w in zip(values, weights, strict=True)]
    return np.float32([float(x) for x in exact.fold(rounded, vectors, order, blocks)]).reshape(shape)


def check(received: Any, expected: np.ndarray) -> None:
    """Asserts equal numbers, ignoring the sign of zeros."""
    assert (received.dtype, received.shape) == (np.float32, expected.shape)
    np.testing.assert_array_equal(received, expected)


@traced_quickly(("jax_jit",))
@settings(max_examples=4)
@given(data=contributions(3, FLOATS))
def test_one_element_has_the_bits_of_the_rounded_rule(mode: modes.Mode, data: Any) -> None:
    only = {"values": {"scalar": data["values"]["scalar"], "none": None}, "weights": data["weights"]}
    (results,) = mode.run(everywhere, [only])
    for where, result in results.items():
        assert result["none"] is None
        check(result["scalar"], expected_of(only["values"]["scalar"], data["weights"], where.split()[1]))


@settings(max_examples=6)
@given(data=contributions(2, EXACT, EXACT_WEIGHTS))
def test_exact_dot_products_give_the_same_bits_everywhere(mode: modes.Mode, data: Any) -> None:
    (result,) = mode.run(PAIRWISE, [data])
    for leaf in ("w", "scalar"):
        check(result[leaf], expected_of(data["values"][leaf], data["weights"], "tree"))


def both_orders(env: modes.Env, data: Any) -> Any:
    return {order: Adaptive("list", order)(env, data) for order in ORDERS}


# Parallel, then orthogonal: each merge result but the last has exact dot products with the following terms.
PARALLEL_PAIRS = np.float32([[2, 0, 2], [2, 0, 2], [0, 4, 0], [0, 8, 0]])


def test_four_vectors(mode: modes.Mode) -> None:
    """Parallel vectors are averaged, orthogonal ones added; a chain differs from a tree."""
    data = {"values": {"w": PARALLEL_PAIRS}, "weights": np.float32([1, 3, 0.5, 1])}
    (results,) = mode.run(both_orders, [data])
    ruled = {order: expected_of(PARALLEL_PAIRS, np.ones(4), order) for order in ORDERS}
    assert ruled["tree"].tolist() == [2, 6, 2] != ruled["sequential"].tolist()
    for order, result in results.items():
        check(result["w"], ruled[order])


@traced_quickly(("jax_shard_map",))
def test_replicas_are_merged_in_the_tree(replicated: modes.Mode) -> None:
    """Holds for order "sequential" as well."""
    data = {"values": {"w": PARALLEL_PAIRS}, "weights": np.ones(4, np.float32)}
    for result in replicated.run(Adaptive("replicas", "sequential"), deal(data, 4)):
        check(result["w"], np.float32([2, 6, 2]))


@traced_quickly(("jax_shard_map",))
@settings(max_examples=4)
@given(data=contributions(4, FLOATS))
def test_time_and_replicas(replicated: modes.Mode, data: Any) -> None:
    """Order "tree" is independent of the number of replicas; order "sequential" is a chain on each of them."""
    only = {"values": {"scalar": data["values"]["scalar"]}, "weights": data["weights"]}
    for order, blocks in (("tree", 1), ("sequential", 2)):
        expected = expected_of(only["values"]["scalar"], only["weights"], order, blocks)
        for result in replicated.run(Adaptive("time x replicas", order), deal(only, 2)):
            check(result["scalar"], expected)


def true_adasum(a: Vector, b: Vector) -> list[Fraction]:
    dot, a_norm, b_norm = (sum(x * y for x, y in zip(v, w, strict=True)) for v, w in ((a, b), (a, a), (b, b)))
    return [(1 - dot / (2 * a_norm)) * x + (1 - dot / (2 * b_norm)) * y for x, y in zip(a, b, strict=True)]


def bound(a: Vector, b: Vector, dtype: str = "float32") -> list[float]:
    """The documented error bound of each element, for dot products summed in any order."""
    u, n = 2.0 ** -exact.PRECISION[dtype], len(a)
    g = n * u / (1 - n * u)
    factor = (1 + (1 + g) * (1 + u) / (1 - g) - 1) * (1 + u) ** 3 - 1
    ratio = math.sqrt(sum(x * x for x in b) / sum(x * x for x in a))
    return [
        factor * (abs(x) + abs(y) + (abs(x) * ratio + abs(y) / ratio) / 2)
        for x, y in zip(map(float, a), map(float, b), strict=True)
    ]


@pytest.mark.parametrize("exponent", [0, 60, -60])
def test_the_error_keeps_its_bound(mode: modes.Mode, exponent: int) -> None:
    """Holds where squares overflow or underflow in float32; b is a thousand times as long as a."""
    rng = np.random.default_rng(0)
    values = np.float32(rng.normal(size=(2, 7, 33)) * [[[1]], [[1000]]] + 0.5) * np.float32(2.0**exponent)
    (result,) = mode.run(PAIRWISE, [{"values": {"w": values}, "weights": np.ones(2, np.float32)}])
    a, b = map(vector, values)
    for received, exactly, allowed in zip(vector(result["w"]), true_adasum(a, b), bound(a, b), strict=True):
        assert abs(received - exactly) <= allowed


def of_no_effect(env: modes.Env, data: Any) -> Any:
    """Finalizes two states that must be equal."""
    values, weights = rows(data["values"]), rows(data["weights"])
    a, b = (ADASUM.update(ADASUM.init(values[0]), value, weight) for value, weight in zip(values, weights, strict=True))
    both = ADASUM.merge(a, b)
    zero = {name: None if x is None else x * np.float32(0) for name, x in values[0].items()}
    pairs = {
        "zeros leave the other": (ADASUM.update(both, zero, 1), both),
        "the weight's size": (ADASUM.update(a, values[1], 7), ADASUM.update(a, values[1], 1)),
    }
    return {law: [ADASUM.finalize(state) for state in pair] for law, pair in pairs.items()}


@traced_quickly(("jax_jit",))
@settings(max_examples=5)
@given(data=contributions(2, FLOATS, WEIGHTS))
def test_zeros_and_the_size_of_a_weight_change_nothing(mode: modes.Mode, data: Any) -> None:
    clean = {"w": np.nan_to_num(data["values"]["w"]), "none": None}
    (result,) = mode.run(of_no_effect, [{"values": clean, "weights": data["weights"]}])
    for law, (left, right) in result.items():
        assert left["none"] is right["none"] is None
        np.testing.assert_array_equal(exact.bits(left["w"]), exact.bits(right["w"]), err_msg=law)


SPECIAL = {
    "zeros": ([0, 0], [-0.0, 3], [-0.0, 3]),
    "zeros after": ([-0.0, np.inf], [0, 0], [-0.0, np.inf]),
    "subnormals count as zeros": ([1e-40, 0], [1, 2], [1, 2]),
    "infinity": ([np.inf, 1], [1, 2], [np.nan, np.nan]),
    "nan": ([1, 2], [1, np.nan], [np.nan, np.nan]),
    "overflow of the sum": ([3e38, 3e38], [1, 2], [np.nan, np.nan]),
    "far apart": ([2.0**-60, 0], [0, 2.0**60], [2.0**-60, 2.0**60]),
    "opposite": ([1, -2], [-1, 2], [0, 0]),
}


@pytest.mark.parametrize("case", SPECIAL)
def test_special_values(mode: modes.Mode, case: str) -> None:
    *values, expected = (np.float32(x) for x in SPECIAL[case])
    data = {"values": {"w": np.stack(values)}, "weights": np.ones(2, np.float32)}
    (result,) = mode.run(PAIRWISE, [data])
    np.testing.assert_array_equal(exact.bits(result["w"]), exact.bits(expected))


@traced_quickly(("jax_jit", "bfloat16"), ("tf_function", "float16"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_accumulate_in_float32(mode: modes.Mode, dtype: str) -> None:
    """The square of 300 would round in bfloat16 and overflow in float16."""
    values = np.array([[300, 0], [300, 300]]).astype(dtype)
    (result,) = mode.run(PAIRWISE, [{"values": {"w": values}, "weights": np.ones(2, np.float32)}])
    assert result["w"].dtype == dtype
    expected = [float(exact.round_to(x, dtype)) for x in rounded(*map(vector, values))]
    np.testing.assert_array_equal(np.float64(result["w"]), expected)


ON_A_NARROW_WIRE = gc.reductions.adasum(wire=gc.wires.cast("bfloat16"))


def test_float64_keeps_its_own_width() -> None:
    a, b = np.float64([3, 1e-9]), np.float64([4, 0])
    received, vectors = vector(gc.combine(ADASUM, [a, b])), (vector(a), vector(b))
    for x, exactly, allowed in zip(received, true_adasum(*vectors), bound(*vectors, "float64"), strict=True):
        assert abs(x - exactly) <= allowed


@traced_quickly(("jax_shard_map",))
def test_a_narrow_wire(replicated: modes.Mode) -> None:
    """257 needs nine bits, and bfloat16 has eight: the ranks exchange (256, 0), which is orthogonal to (0, 2)."""
    data = {"values": {"w": np.float32([[257, 0], [0, 2]])}, "weights": np.ones(2, np.float32)}
    for result in replicated.run(Single(ON_A_NARROW_WIRE, "replicas", "tree"), deal(data, 2)):
        check(result["w"], np.float32([256, 2]))


@pytest.mark.parametrize("dtype", [np.int32, np.complex64])
def test_only_real_floats(dtype: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=r"adasum: leaf \['n'\]: expected a dtype that is float"):
        gc.combine(ADASUM, [{"n": np.ones(2, dtype)}])
