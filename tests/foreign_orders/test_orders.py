"""Properties of every named order."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError, foreign_orders
from tests.foreign_orders.data import assert_same_bits, assert_same_sum, normal
from tests.spec.selection import cases

ORDERS = {**foreign_orders.SUMS, **foreign_orders.MEANS}
SAMPLE = [{"a": a, "b": [b, None]} for a, b in zip(normal(12), normal(12, (3, 40), seed=1), strict=True)]


@pytest.mark.parametrize(("one", "other"), list(combinations(ORDERS, 2)))
def test_orders_differ(one: str, other: str) -> None:
    assert (ORDERS[one](normal(12)) != ORDERS[other](normal(12))).any()


@pytest.mark.parametrize("name", foreign_orders.SUMS)
def test_sums_differ_from_the_canonical_tree_in_bits_only(name: str) -> None:
    received, canonical = foreign_orders.SUMS[name](normal(12)), gc.tree_sum(normal(12))
    assert (received != canonical).any()
    assert_same_sum(received, canonical, normal(12))


def assert_same_tree(received: Any, name: str) -> None:
    expected = ORDERS[name](SAMPLE)
    assert received["b"][1] is None
    assert_same_bits(received["a"], expected["a"])
    assert_same_bits(received["b"][0], expected["b"][0])


@pytest.mark.needs("jax")
@pytest.mark.parametrize("jit", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("name", ORDERS)
def test_jax_gives_the_same_bits(name: str, jit: bool) -> None:
    import jax
    import jax.numpy as jnp

    function = jax.jit(ORDERS[name]) if jit else ORDERS[name]
    assert_same_tree(function(jax.tree.map(jnp.asarray, SAMPLE)), name)


QUICK = [
    *((name, "eager") for name in ORDERS),
    *((name, "jit_compile") for name in ("left_chain", "addn_blocks", "ring")),
]


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(("name", "mode"), cases(QUICK, ORDERS, ("eager", "function", "jit_compile")))
def test_tensorflow_gives_the_same_bits(name: str, mode: str) -> None:
    import tensorflow as tf

    def function(values: Any) -> Any:
        return ORDERS[name](values)

    compiled = function if mode == "eager" else tf.function(function, jit_compile=mode == "jit_compile")
    assert_same_tree(compiled(tf.nest.map_structure(lambda x: x if x is None else tf.constant(x), SAMPLE)), name)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3)])
def test_one_tree_passes_through(name: str, shape: tuple[int, ...]) -> None:
    (value,) = normal(1, shape)
    assert_same_bits(ORDERS[name]([value]), value)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "expected a list of trees, received an empty list"),
        (np.ones((2, 2), np.float32), "expected a list of trees, received ndarray"),
        ([{"w": np.float32([1])}, {"v": np.float32([1])}], r"expected the structure"),
        ([{"w": np.float32([1])}, {"w": np.float32([1, 2])}], r"leaf \['w'\]: expected shape \(1,\) and dtype float32"),
        ([{"w": np.float32([1])}, {"w": np.float16([1])}], r"leaf \['w'\]: expected .*, received .* dtype float16"),
        ([{"w": np.float32([1])}, {"w": None}], r"leaf \['w'\]: expected a gradient in all trees or in none"),
    ],
)
def test_bad_lists_are_refused(name: str, values: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        ORDERS[name](values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: foreign_orders.addn_blocks(normal(3), names=["a"]), "addn_blocks: expected 3 names, received 1"),
        (lambda: foreign_orders.addn_blocks(normal(3), reused=3), "expected a reused term from 0 to 2, received 3"),
        (lambda: foreign_orders.mean_of_means(normal(3), 2), "expected a multiple of 2 trees, received 3"),
        (lambda: foreign_orders.mean_of_means(normal(2), 2, [1]), "mean_of_means: expected 2 weights, received 1"),
        (
            lambda: foreign_orders.welford([np.int32([1])]),
            "welford: expected a dtype of float16, bfloat16, float32, received",
        ),
    ],
)
def test_bad_settings_are_refused(call: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        call()
