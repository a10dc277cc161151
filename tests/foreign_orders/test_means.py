"""Means have the bits of optax.MultiSteps."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import foreign_orders
from gradcombine.backends.registry import resolve
from gradcombine.fused import multiply_add
from gradcombine.types import no_autograph
from tests.foreign_orders.data import assert_same_bits, normal
from tests.spec import modes
from tests.spec.selection import FULL, among, cases

SHAPES = [(513,), (33, 7), (1,), (), (2,), (17,)]


def multi_steps(values: list[Any], jit: bool, accumulator: Any = np.float32) -> Any:
    """The mean that the inner transformation receives."""
    import jax
    import optax

    with jax.numpy_dtype_promotion("standard"):
        transformation = optax.MultiSteps(optax.identity(), len(values), accumulator_dtype=accumulator)
        state, mean = transformation.init(values[0]), None
        update: Callable[..., Any] = jax.jit(transformation.update) if jit else transformation.update
        for value in values:
            mean, state = update(value, state, values[0])
    return mean


def of_multi_steps(values: list[Any], **settings: Any) -> Any:
    """The mean with the options that describe the XLA of the installed JAX."""
    import jax

    return foreign_orders.welford(values, divided=jax.__version_info__ < (0, 10), **settings)


@pytest.mark.needs("jax", "optax")
@pytest.mark.parametrize(
    ("k", "jit"),
    [
        (3, True),
        (7, True),
        *(pytest.param(k, True, marks=FULL) for k in (1, 2, 20)),
        *(pytest.param(k, False, marks=FULL) for k in (3, 7)),
    ],
)
def test_multi_steps(k: int, jit: bool) -> None:
    columns = [normal(k, shape, seed=i) for i, shape in enumerate(SHAPES)]
    values = [list(leaves) for leaves in zip(*columns, strict=True)]
    for received, expected in zip(multi_steps(values, jit), of_multi_steps(values), strict=True):
        assert_same_bits(received, expected)


@pytest.mark.full
@pytest.mark.needs("jax", "optax")
def test_multi_steps_without_compilation() -> None:
    import jax

    values = [[a, b] for a, b in zip(normal(20), normal(20, (1,)), strict=True)]
    with jax.disable_jit():
        found = multi_steps(values, jit=False)
    for received, expected in zip(found, of_multi_steps(values, fused=False), strict=True):
        assert_same_bits(received, expected)
    assert (found[0] != foreign_orders.welford(values)[0]).any()


CPUINFO = Path("/proc/cpuinfo")
FUSES_HALVES = CPUINFO.exists() and "avx512_fp16" in CPUINFO.read_text()
"""Whether the CPU has float16 multiply-adds, into which XLA then fuses float16 products and sums."""


def fused_in_halves(values: list[np.ndarray]) -> np.ndarray:
    """The mean of MultiSteps in float16 with each product fused into the following sum."""
    mean = np.zeros_like(values[0])
    for n, value in enumerate(values, start=1):
        reciprocal = np.float16(1 / np.float32(n))
        # A long double holds the product and the sum of numbers near 1 exactly.
        product = np.longdouble(value - mean) * np.longdouble(reciprocal)
        mean = np.asarray(mean + product).astype(np.float16)
    return mean


QUICK = [
    *(((300,), "float32", accumulator) for accumulator in ("bfloat16", "float16")),
    ((300,), "bfloat16", "float16"),
    ((1,), "bfloat16", "bfloat16"),
    ((1,), "float16", "bfloat16"),
]


@pytest.mark.needs("jax", "optax")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_multi_steps_of_narrow_floats(dtype: str) -> None:
    values = normal(20, dtype=dtype)
    assert_same_bits(multi_steps(values, jit=True), of_multi_steps(values))


@pytest.mark.needs("jax", "optax")
@pytest.mark.parametrize(
    ("shape", "dtype", "accumulator"),
    cases(QUICK, [(300,), (1,)], ("float32", "bfloat16", "float16"), ("bfloat16", "float16")),
)
def test_multi_steps_with_a_narrow_accumulator(shape: tuple[int, ...], dtype: str, accumulator: str) -> None:
    values = normal(7, shape, dtype=dtype)
    expected = of_multi_steps(values, accumulator=accumulator)
    if FUSES_HALVES and dtype == accumulator == "float16" and shape != (1,):
        expected = fused_in_halves(values)
    assert_same_bits(multi_steps(values, jit=True, accumulator=np.dtype(accumulator)), expected)


def test_welford_is_not_the_textbook_mean() -> None:
    values = normal(7)
    textbook = np.zeros_like(values[0])
    for n, value in enumerate(values, start=1):
        textbook = textbook + (value - textbook) / np.float32(n)
    received = foreign_orders.welford(values)
    others = [textbook, foreign_orders.welford(values, fused=False), gc.mean(values)]
    assert all((received != other).any() for other in others)
    np.testing.assert_allclose(received, gc.mean(values), rtol=1e-5, atol=1e-6)


def near_ties() -> tuple[np.ndarray, np.ndarray]:
    """x and y: x / 3 + y is next to a tie in the first third, cancels in the second, and is random in the last."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=3000).astype(np.float32)
    y = (rng.normal(size=3000) * 2.0 ** rng.integers(-30, 30, 3000)).astype(np.float32)
    # float32(1 / 3) * 3 is 1 + 2**-25: just above half a unit of y.
    x[:1000] = 3 * rng.choice([-1, 1], 1000)
    y[:1000] = (2**24 + 2 * rng.integers(0, 1000, 1000)) * rng.choice([-1, 1], 1000)
    y[1000:2000] = -x[1000:2000] * (np.float32(1) / np.float32(3))
    return x, y


@no_autograph
def fused(env: modes.Env, data: Any) -> Any:
    x, y = data
    return multiply_add(resolve(data), x, np.float32(1) / np.float32(3), y)


FUSING = ("numpy", "jax_jit", "tf_xla")


@pytest.mark.parametrize("name", among(FUSING, FUSING))
def test_the_fused_multiply_add_is_rounded_once(name: str) -> None:
    x, y = near_ties()
    third = np.float32(1) / np.float32(3)
    (received,) = modes.get(name).run(fused, [(x, y)])
    for got, a, b in zip(received, x, y, strict=True):
        exact = Fraction(float(a)) * Fraction(float(third)) + Fraction(float(b))
        neighbours = [np.nextafter(got, np.float32(side)) for side in (-np.inf, np.inf)]
        distance = abs(exact - Fraction(float(got)))
        assert all(distance <= abs(exact - Fraction(float(other))) for other in neighbours)


def test_infinities_and_nan_pass() -> None:
    values = [np.float32([1, np.inf, -np.inf, np.nan, 3]), np.float32([np.inf, np.inf, np.inf, 1, 5])]
    np.testing.assert_array_equal(foreign_orders.welford(values), np.float32([np.inf, np.nan, np.nan, np.nan, 4]))


def test_mean_of_means() -> None:
    values, weights = normal(6), [1, 2, 3, 4, 5, 6]
    expected = gc.mean([gc.mean(values[i : i + 2], weights[i : i + 2]) for i in (0, 2, 4)])
    received = foreign_orders.mean_of_means(values, 3, weights)
    assert_same_bits(received, expected)
    assert not np.allclose(received, gc.mean(values, weights))
