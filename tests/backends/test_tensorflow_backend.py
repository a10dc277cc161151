"""TensorFlow: graph rewrites change no bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions

RNG = np.random.default_rng(0)
VALUES = [RNG.normal(size=513).astype(np.float32) for _ in range(20)]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("method", ["add_n", "accumulate_n", "tree"])
@pytest.mark.parametrize("n", [3, 9, 20])
def test_the_order_of_additions_survives(n: int, method: str, jit_compile: bool) -> None:
    """By default, Grappler would turn any chain or tree of additions into one AddN, which adds in blocks of eight."""
    run = tf.function(lambda values: gc.add_n(values, method), jit_compile=jit_compile)
    np.testing.assert_array_equal(run(list(map(tf.constant, VALUES[:n]))), gc.add_n(VALUES[:n], method))


def test_the_case_bites() -> None:
    """The same chain in plain TensorFlow has different bits."""

    @tf.function
    def plain(values: Any) -> Any:
        total = values[0]
        for value in values[1:]:
            total = total + value
        return total

    assert (plain(list(map(tf.constant, VALUES))).numpy() != gc.add_n(VALUES)).any()


@pytest.mark.parametrize("jit_compile", [False, True])
def test_weighted_means_round_as_uncompiled_ones(jit_compile: bool) -> None:
    """Includes constant weights, by whose reciprocals Grappler and XLA would multiply."""
    weights = np.float32([0.3, 0.7, 7.1])
    expected = gc.mean(VALUES[:3], weights)
    values = list(map(tf.constant, VALUES[:3]))
    traced = tf.function(lambda v, w: gc.mean(v, tf.unstack(w)), jit_compile=jit_compile)
    np.testing.assert_array_equal(traced(values, tf.constant(weights)), expected)
    known = tf.function(lambda v: gc.mean(v, weights), jit_compile=jit_compile)
    np.testing.assert_array_equal(known(values), expected)


@pytest.mark.parametrize("method", [("ADD_N", "add_n"), ("EXPERIMENTAL_TREE", "tree"), ("DEFAULT", "add_n")])
def test_aggregation_methods_are_accepted(method: tuple[str, str]) -> None:
    value = getattr(tf.AggregationMethod, method[0])
    np.testing.assert_array_equal(gc.add_n(VALUES, value), gc.add_n(VALUES, method[1]))


def test_tracing_does_not_rewrite_the_library() -> None:
    """By default, AutoGraph would convert the source of every function that is called."""
    acc = gc.accumulate(reductions.mean(), every=2)
    public = [gc.add_n, gc.combine, gc.mean, gc.tree_sum, gc.all_reduce, gc.merge_replicas, gc.accumulate, *acc]
    public += [getattr(reductions, name) for name in reductions.__all__ if name.islower()]
    names = ("init", "update", "merge", "finalize", "clear", "all_merge", "all_finalize")
    for reduction in (reductions.mean(), reductions.per_leaf({"w": reductions.sum()})):
        public += [getattr(reduction, name) for name in names]
    assert all(hasattr(function, "autograph_info__") for function in public)
    marked = tf.autograph.experimental.do_not_convert(lambda: None)
    assert hasattr(marked, "autograph_info__")


@pytest.mark.parametrize("has_shape", [False, True])
@pytest.mark.parametrize("traced", [False, True])
def test_zeroed_keeps_indexed_slices(traced: bool, has_shape: bool) -> None:
    acc = gc.accumulate(reductions.zeroed(reductions.row_mean(capacity=4)), every=2)
    shape = tf.constant([4, 1]) if has_shape else None

    def window(first: Any, second: Any) -> Any:
        state = acc.init(tf.zeros([4, 1]))
        for values in (first, second):
            state = acc.update(tf.IndexedSlices(values, tf.constant([1, 1]), shape), state)
        return gc.sparse.to_dense(acc.value(state))

    run = tf.function(window) if traced else window
    for bad, expected in ((1.0, 4.0), (np.inf, 3.0)):
        result = run(tf.constant([[1.0], [2.0]]), tf.constant([[bad], [4.0]]))
        np.testing.assert_array_equal(result, [[0], [expected], [0], [0]])
