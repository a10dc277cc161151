"""A user-defined reduction of four functions, whose states hold None for leaves without gradients, in every place."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import gradcombine as gc

ORDERS = ["sequential", "tree"]
VALUES = np.array([[1, 2], [3, 5], [np.nan, 1], [2, 8]], np.float32)
WEIGHTS = np.array([1, 2, 0, 3], np.float32)
EXPECTED = [1 + 2 * 9 + 3 * 4, 4 + 2 * 25 + 3 * 64]


def each(function: Any, *trees: Any) -> Any:
    return {name: None if leaf is None else function(*(t[name] for t in trees)) for name, leaf in trees[0].items()}


SQUARES = gc.Reduction(
    init=partial(each, lambda x: x * 0),
    update=lambda state, value, weight: each(lambda s, x: s + weight * x * x, state, value),
    merge=lambda a, b: each(lambda x, y: x + y, a, b),
    finalize=lambda state: state,
    name="squares",
)


def over_time(order: Any, values: Any, weights: Any) -> Any:
    acc = gc.accumulate(SQUARES, every=4, order=order)
    state = acc.init({"w": values[0], "none": None})
    for i in range(len(VALUES)):
        state = acc.update({"w": values[i], "none": None}, state, weights[i])
    return acc.value(gc.merge_replicas(SQUARES, state, over=gc.LOCAL))


def check(result: Any) -> None:
    assert result["none"] is None
    np.testing.assert_array_equal(result["w"], EXPECTED)


@pytest.mark.parametrize("order", ORDERS)
def test_in_numpy(order: Any) -> None:
    check(over_time(order, VALUES, WEIGHTS))
    check(gc.combine(SQUARES, [{"w": x, "none": None} for x in VALUES], WEIGHTS, order))


@pytest.mark.sampled
@pytest.mark.needs("jax")
@pytest.mark.parametrize("order", ORDERS)
def test_in_jax(order: Any) -> None:
    import jax

    check(jax.jit(partial(over_time, order))(VALUES, WEIGHTS))
    replica = jax.vmap(
        lambda x, w: gc.all_reduce(SQUARES, {"w": x, "none": None}, gc.jax_axis("data"), w), axis_name="data"
    )
    check(jax.tree.map(lambda x: x[0], replica(VALUES, WEIGHTS)))


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("order", ORDERS)
def test_in_a_loop_of_tensorflow(order: Any) -> None:
    import tensorflow as tf

    @tf.function
    def looped(values: Any, weights: Any) -> Any:
        acc = gc.accumulate(SQUARES, every=4, order=order)

        def body(i: Any, state: Any) -> Any:
            return i + 1, acc.update({"w": values[i], "none": None}, state, weights[i])

        start = 0, acc.init({"w": values[0], "none": None})
        return acc.value(tf.while_loop(lambda i, _: i < len(VALUES), body, start)[1])

    check(looped(tf.constant(VALUES), tf.constant(WEIGHTS)))
