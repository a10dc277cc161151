"""Division of float32 on machines whose own division is inexact."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.backends import tensorflow_backend
from gradcombine.backends.jax_backend import BACKEND as JAX
from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.quotient import rounded_quotient

COUNT = 100_000
EDGES = np.float32([0, 1, 3, np.inf, np.nan, 1e-45, 1.1754942e-38, 1.1754944e-38, 3.4028235e38])
RANDOM = np.random.default_rng(0)


def any_floats() -> np.ndarray:
    return RANDOM.integers(-(2**31), 2**31, COUNT).astype(np.int32).view(np.float32)


def floats_from(low: float, high: float) -> np.ndarray:
    """Floats of both signs and of magnitudes from 2**low to 2**(high + 1)."""
    signs = RANDOM.choice([-1, 1], COUNT)
    return np.float32(signs * RANDOM.uniform(1, 2, COUNT) * 2 ** RANDOM.uniform(low, high, COUNT))


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "any": lambda: (any_floats(), any_floats()),
    "means": lambda: (floats_from(-4, 4), RANDOM.integers(1, 4096, COUNT).astype(np.float32)),
    "a scalar": lambda: (any_floats(), np.float32(7)),
    "one": lambda: (any_floats(), np.float32(1)),
    "subnormal dividends": lambda: (floats_from(-149, -126), floats_from(-40, 40)),
    "subnormal divisors": lambda: (floats_from(-149, -100), floats_from(-149, -126)),
    "subnormal quotients": lambda: (floats_from(-30, 0), floats_from(110, 126)),
    "ties": lambda: (np.float32(RANDOM.integers(1, 2**24, COUNT) * 2.0**-140), np.float32(2.0**9)),
    "overflow": lambda: (floats_from(100, 127), floats_from(-40, -20)),
    "edges": lambda: tuple(x.ravel() for x in np.meshgrid(EDGES, -EDGES)),
}


def inexact(x: Any, y: Any) -> Any:
    """Quotients that are off by up to 50 units in the last place, except zeros, infinities and NaN."""
    quotient = np.asarray(x / y)
    off = RANDOM.integers(-50, 51, quotient.shape).astype(np.int32)
    ordinary = np.isfinite(x) & np.isfinite(y) & (x != 0) & (y != 0)
    return np.where(ordinary, (quotient.view(np.int32) + off).view(np.float32), quotient)


def assert_rounded(quotient: Any, array: np.ndarray, divisor: Any) -> None:
    expected = np.where(np.isnan(array) | np.isnan(divisor), np.float32(np.nan), array / divisor)
    np.testing.assert_array_equal(np.isnan(quotient), np.isnan(expected))
    there = ~np.isnan(expected)
    np.testing.assert_array_equal(np.asarray(quotient)[there].view(np.int32), expected[there].view(np.int32))


@pytest.mark.parametrize("pair", PAIRS)
@np.errstate(all="ignore")
def test_an_inexact_division_is_corrected(pair: str) -> None:
    array, divisor = PAIRS[pair]()
    assert_rounded(rounded_quotient(NUMPY, array, divisor, inexact), array, divisor)


@pytest.mark.parametrize("pair", [name for name in PAIRS if name != "edges"])
@np.errstate(all="ignore")
def test_under_jit(pair: str) -> None:
    """XLA multiplies by the reciprocal of a scalar, and its CPU backend takes subnormal numbers for zero."""
    array, divisor = PAIRS[pair]()
    quotient = jax.jit(lambda array, divisor: rounded_quotient(JAX, array, divisor))(array, divisor)
    ordinary = np.isfinite(array) & np.isfinite(divisor) & (array != 0) & (divisor != 0)
    divisor = np.broadcast_to(divisor, array.shape)
    assert_rounded(np.asarray(quotient)[ordinary], array[ordinary], divisor[ordinary])


@pytest.mark.parametrize("compiled", [False, True])
def test_tensorflow_divides_in_float64_on_gpus(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorflow_backend, "_has_gpus", lambda: True)
    array, divisor = floats_from(-4, 4), np.float32(7)
    function = tf.function(tensorflow_backend.BACKEND.divide, jit_compile=compiled)
    given = tf.constant(array), tf.constant(divisor)
    operations = function.get_concrete_function(*given).graph.get_operations()
    assert "float64" in {x.dtype.name for op in operations for x in op.outputs}
    assert_rounded(function(*given).numpy(), array, divisor)
    gradient = tf.function(lambda x: tf.gradients(tensorflow_backend.BACKEND.divide(x, tf.constant(4.0)), x)[0])
    np.testing.assert_array_equal(gradient(tf.constant(array)), np.full(COUNT, 0.25))


@pytest.mark.parametrize("shape", [(3,), (), (0, 2)], ids=str)
def test_programs_for_gpus_correct_their_quotients(shape: tuple[int, ...]) -> None:
    """Programs for CPUs and TPUs do not, and neither do those of empty arrays."""
    array, divisor = jnp.ones(shape), jnp.float32(3)
    traced = jax.jit(JAX.divide).trace(array, divisor)
    corrected = {
        name: "shift_left" in traced.lower(lowering_platforms=(name,)).as_text()
        for name in ("cpu", "cuda", "rocm", "tpu")
    }
    assert corrected == {"cpu": False, "cuda": bool(array.size), "rocm": bool(array.size), "tpu": False}


def test_a_divisor_that_is_known_to_be_one_costs_nothing() -> None:
    compiled = jax.jit(lambda x: rounded_quotient(JAX, x, jnp.float32(1))).lower(jnp.ones(1000)).compile().as_text()
    assert not re.search(r"\b(divide|shift-left|bitcast-convert|select)\(", compiled)


def test_derivatives_are_those_of_the_division() -> None:
    def quotient(array: Any, divisor: Any) -> Any:
        return JAX.divide(array, divisor).sum()

    array, divisor = jnp.float32([3, 6]), jnp.float32(4)
    of_array, of_divisor = jax.jit(jax.grad(quotient, (0, 1)))(array, divisor)
    np.testing.assert_array_equal(of_array, [0.25, 0.25])
    assert of_divisor == -9 / 16
    assert jax.grad(jax.grad(quotient, 1), 1)(array, divisor) == 2 * 9 / 64
