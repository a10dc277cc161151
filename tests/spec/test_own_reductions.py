"""A user-defined reduction of four functions, whose states hold None for leaves without gradients, in every place."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from tests.spec import modes
from tests.spec.data import deal
from tests.spec.programs import Single

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


def check(result: Any) -> None:
    assert result["none"] is None
    np.testing.assert_array_equal(result["w"], EXPECTED)


@pytest.mark.parametrize(
    ("place", "name", "order"),
    [
        *((place, "numpy", order) for place in ("list", "time x replicas") for order in ORDERS),
        *(
            pytest.param(*each, order, marks=[pytest.mark.needs("jax"), *[pytest.mark.full] * (order == "tree")])
            for each in (("time x replicas", "jax_jit"), ("replicas", "jax_vmap"))
            for order in ORDERS
        ),
    ],
)
def test_places(place: str, name: str, order: Any) -> None:
    data = {"values": {"w": VALUES, "none": None}, "weights": WEIGHTS}
    for result in modes.get(name).run(Single(SQUARES, place, order), deal(data, 4 if place == "replicas" else 1)):
        check(result)


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
