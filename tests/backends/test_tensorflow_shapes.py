"""TensorFlow: tensors with a dimension that is unknown while tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import foreign_orders, reductions, sparse
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.places.window import OVER

KNOWN = np.float32([1, 2])


def window(reduction: gc.Reduction) -> Callable[[Any], Any]:
    def update(x: Any) -> Any:
        acc = gc.accumulate(reduction, 2)
        return acc.update({"w": x}, acc.init({"w": KNOWN}))

    return update


def slices(x: Any) -> Any:
    return tf.IndexedSlices(x, tf.range(tf.shape(x)[0]), tf.constant([4]))


REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a list": ("add_n: leaf ['w']", lambda x: gc.add_n([{"w": x}, {"w": x}])),
    "a list that begins with a known one": ("mean: leaf ['w']", lambda x: gc.mean([{"w": KNOWN}, {"w": x}])),
    "an exact list": ("sum: leaf ['w']", lambda x: gc.combine(reductions.sum("exact"), [{"w": KNOWN}, {"w": x}])),
    "a state": ("mean: leaf ['w']", lambda x: gc.accumulate(reductions.mean(), 2).init({"w": x})),
    "a window": ("mean: leaf ['w']", window(reductions.mean())),
    "extrema": ("max: leaf ['w']", window(reductions.max())),
    "replicas": ("mean: leaf ['w']", lambda x: gc.all_reduce(reductions.mean(), {"w": x}, over=gc.LOCAL)),
    "parts": ("sum: leaf ['w']", lambda x: reductions.per_leaf({"w": reductions.sum()}).init({"w": x})),
    "a weight": ("mean: expected", lambda x: gc.combine(reductions.mean(), [KNOWN], [x])),
    "rows": ("row_sum: leaf ['w']", lambda x: window(reductions.row_sum(2))(slices(x))),
    "rows added": ("add_rows: expected", lambda x: sparse.add_rows(KNOWN, slices(x))),
    "another system's order": ("ring: leaf ['w']", lambda x: foreign_orders.ring([{"w": x}, {"w": x}])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_operation_and_leaf(name: str) -> None:
    where, call = REFUSED[name]
    traced = tf.function(call, input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    with pytest.raises(gc.GradCombineError, match=r"expected a shape that is known while tracing") as caught:
        traced.get_concrete_function()
    assert str(caught.value).startswith(where)
    assert str(caught.value).endswith("received (None,)")


def test_rows_need_the_shape_of_the_dense_array() -> None:
    rows = tf.IndexedSlices(tf.constant([KNOWN]), tf.constant([0]))
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected tf.IndexedSlices with a constant dense"):
        gc.mean([{"w": rows}, {"w": KNOWN[None]}])


def test_a_stated_shape_is_enough() -> None:
    def stated(x: Any) -> Any:
        return gc.add_n([tf.ensure_shape(x, [2]), KNOWN])

    traced = tf.function(stated, input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
    assert traced(KNOWN).numpy().tolist() == [2, 4]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        traced(np.float32([1]))


def test_a_step_knows_the_shapes_of_its_variables() -> None:
    w = tf.Variable([8.0, 8.0])
    step = AccumulatedStep(
        lambda x: ([tf.reduce_mean(x, axis=0)], tf.shape(x)[0]), [w], lambda grads, _: w.assign_sub(grads[0]), every=2
    )
    train = tf.function(step, input_signature=[tf.TensorSpec([None, None], tf.float32)])
    for batch in ([[1, 2], [3, 4]], [[5, 0], [3, 2]]):
        train(tf.constant(batch, tf.float32))
    assert w.numpy().tolist() == [8 - 3, 8 - 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="not compatible with expected shape"):
        train(tf.zeros([2, 3]))
    assert int(step.states()[0].step) == OVER
