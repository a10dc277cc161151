"""Comparison of trees of two frameworks, and the messages of failing assertions."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.verify import assert_equal_bits, compare


def example(convert: Any = np.asarray, off: float = 0.0) -> Any:
    kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
    kernel[1, 2] += np.float32(off)
    return {"decoder": [{"kernel": convert(kernel)}, {"bias": None}], "scale": convert(np.float32(2))}


@pytest.mark.parametrize("convert", [jnp.asarray, tf.constant, tf.Variable], ids=["jax", "tensorflow", "variable"])
def test_frameworks_meet(convert: Any) -> None:
    assert_equal_bits(example(), example(convert))
    found = compare(example(convert), example(off=4.7683716e-07))
    assert (found.equal_bits, found.max_ulp, found.leaves[0].name) == (False, 1, "['decoder'][0]['kernel']")


def test_the_worst_leaf_comes_first() -> None:
    a = {name: np.float32([1, 1]) for name in "abcd"}
    b = {"a": a["a"], "b": np.float32([1, 1.0000002]), "c": np.float32([1, np.nan]), "d": np.float32([1.0000001, 1])}
    assert [leaf.name for leaf in compare(a, b).leaves] == ["['c']", "['b']", "['d']", "['a']"]


def test_a_failure_names_leaf_element_and_values() -> None:
    with pytest.raises(AssertionError) as caught:
        assert_equal_bits(example(), example(off=0.5))
    assert "1 of 2 leaves differ" in str(caught.value)
    assert "['decoder'][0]['kernel'] float32 (2, 3)" in str(caught.value)
    assert "worst [1, 2]: 5.0 != 5.5" in str(caught.value)


def test_leaves_without_a_counterpart_are_listed() -> None:
    found = compare({"a": np.ones(2), "b": np.ones(2)}, {"b": np.ones(3), "c": np.ones(2)})
    assert (found.only_a, found.only_b, found.shapes) == (("['a']",), ("['c']",), (("['b']", (2,), (3,)),))
    assert not found.matched
    with pytest.raises(AssertionError, match=r"only in the second: \['c'\]"):
        assert_equal_bits({"a": np.ones(2)}, {"c": np.ones(2)})


def test_leaves_without_a_common_measure_are_listed() -> None:
    found = compare({"a": np.float32([1]), "b": np.ones(2)}, {"a": np.int32([1]), "b": np.ones(2)})
    assert found.kinds == (("['a']", np.float32, np.int32),) and len(found.leaves) == 1
    assert not (found.matched or found.equal_bits)
    assert "['a']: not compared, float32 against int32" in str(found)


@pytest.mark.parametrize("other", [{}, {"v": np.ones(2)}, {"w": None}, {"w": np.ones(3)}, {"w": np.ones(2, int)}])
def test_no_distance_is_larger_than_that_of_trees_that_do_not_match(other: Any) -> None:
    tree = {"w": np.ones(2)}
    assert compare(tree, other).max_ulp == compare(other, tree).max_ulp == 2**64 - 1
    assert compare(tree, {"w": np.float64([1, np.nan])}).max_ulp == 2**64 - 1


def test_no_gradient_matches_only_itself() -> None:
    assert_equal_bits({"w": None}, {"w": None})
    assert compare({"w": np.ones(1)}, {"w": None}).only_a == ("['w']",)


def test_another_dtype_is_another_tree_of_bits() -> None:
    found = compare(np.float32([1]), np.float64([1]))
    assert (found.equal_bits, found.max_ulp) == (False, 0)
    assert "float32 against float64" in str(found)


def test_accumulator_states_are_trees_too() -> None:
    acc = gc.accumulate(gc.reductions.mean("exact"), every=4)
    state = acc.init(np.zeros(2, np.float32))
    one = acc.update(np.float32([1, 2]), state)
    assert_equal_bits(one, acc.update(np.float32([1, 2]), state))
    assert not compare(one, acc.update(np.float32([1, 3]), state)).equal_bits
