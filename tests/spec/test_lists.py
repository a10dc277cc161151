"""Long leaves in a list: their single pass over memory has the bits of successive additions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from tests.spec import exact, modes
from tests.spec.selection import unrolled

SIZE = 40_000
"""Size of a leaf that spans several NumPy blocks and that TensorFlow compiles."""

COUNT = 6
KNOWN = (3, 0.1, 1, 0, 7.7, 2)
VALUES = np.random.default_rng(4).normal(size=(COUNT, SIZE)).astype(np.float32)


def expected(weights: Any, order: str, values: np.ndarray = VALUES) -> tuple[np.ndarray, np.float32]:
    """The weighted sum and the sum of weights, rounded at every addition; a term of weight 0 keeps its position."""
    terms = [None if w == 0 else x * np.float32(w) for x, w in zip(values, weights, strict=True)]
    scales = [None if w == 0 else np.float32(w) for w in weights]

    def add(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return exact.fold(add, terms, order), exact.fold(add, scales, order)


class Lists:
    """Sum and mean of the rows, with weights that are constants of the program."""

    def __init__(self, weights: Any, order: str) -> None:
        self.weights, self.order = weights, order

    def __call__(self, env: modes.Env, data: Any) -> Any:
        trees = [{"x": data["x"][i]} for i in range(COUNT)]
        order: Any = self.order
        return {
            "sum": gc.combine(gc.reductions.sum(), trees, self.weights, order)["x"],
            "mean": gc.combine(gc.reductions.mean(), trees, self.weights, order)["x"],
        }


WEIGHTS = {"plain": None, "weighted": KNOWN}
PROGRAMS = {
    f"{name}-{order}": Lists(weights, order) for name, weights in WEIGHTS.items() for order in ("sequential", "tree")
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@unrolled
def test_one_pass_has_the_bits_of_many(mode: modes.Mode, program: Lists) -> None:
    (result,) = mode.run(program, [{"x": VALUES}])
    total, weight = expected(program.weights or (1,) * COUNT, program.order)
    np.testing.assert_array_equal(exact.bits(result["sum"]), exact.bits(total))
    np.testing.assert_array_equal(exact.bits(result["mean"]), exact.bits(total / weight))


def test_a_missing_gradient_keeps_its_place_in_the_tree() -> None:
    trees = [{"x": None if i == 1 else x} for i, x in enumerate(VALUES[:4])]
    received = gc.combine(gc.reductions.sum(), trees, order="tree")["x"]
    np.testing.assert_array_equal(received, VALUES[0] + (VALUES[2] + VALUES[3]))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_long_list_is_added_in_blocks_to_the_same_bits(order: Any) -> None:
    import tensorflow as tf

    rng = np.random.default_rng(5)
    values, weights = rng.normal(size=(101, 5)).astype(np.float32), rng.choice([0, 1, 0.1, 7.7], 101).tolist()
    weights[32:64] = [0] * 32  # an empty block
    total, weight = expected(weights, order, values)
    compiled = tf.function(lambda x: gc.combine(gc.reductions.mean(), tf.unstack(x), weights, order), autograph=False)
    for result in (gc.combine(gc.reductions.mean(), list(values), weights, order), compiled(values)):
        np.testing.assert_array_equal(exact.bits(np.asarray(result)), exact.bits(total / weight))


@pytest.mark.needs("tensorflow")
def test_a_long_list_may_miss_gradients_and_mix_integers() -> None:
    import tensorflow as tf

    missing = tf.function(lambda x: gc.combine(gc.reductions.sum(), [None, *tf.unstack(x)], [1e39, *[2.0] * 39]))
    np.testing.assert_array_equal(missing(tf.ones([39, 2])), np.float32([78, 78]))
    kinds = [tf.constant([i, 100], tf.int8 if i % 2 else tf.int32) for i in range(40)]
    mixed = tf.function(lambda: gc.combine(gc.reductions.sum(), kinds))()
    np.testing.assert_array_equal(mixed, [780, 4000])


@pytest.mark.sampled
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_long_list_has_the_derivatives_of_its_terms(order: Any, xla: bool) -> None:
    import tensorflow as tf

    weights = [0.5, 0, 3, 1] * 10

    @tf.function(autograph=False, jit_compile=xla)
    def derivatives(x: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = gc.combine(gc.reductions.sum(), tf.unstack(x), weights, order) ** 2
            first = inner.gradient(y, x)
        return first, outer.gradient(first, x)

    x = np.arange(80, dtype=np.float32).reshape(40, 2) / 4  # exact
    w = np.float32(weights)[:, None]
    first, second = derivatives(x)
    np.testing.assert_array_equal(first, 2 * w * (w * x).sum(0))
    np.testing.assert_array_equal(second, np.broadcast_to(2 * w * w.sum(), x.shape))


@pytest.mark.needs("tensorflow")
def test_tensorflow_traces_little_more_than_one_operation_for_each_of_many_terms() -> None:
    import tensorflow as tf

    specs = [tf.TensorSpec([2])] * 200
    peer, *own = (
        tf.function(f, autograph=False).get_concrete_function(specs).graph.as_graph_def()
        for f in (tf.add_n, gc.add_n, gc.tree_sum)
    )
    for graph in own:
        # With a single call of a function, inlining adds no operations.
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        assert len([node for node in nodes if "Call" in node.op]) == 1
        assert len(nodes) < len(peer.node) + 150
