"""Keras optimizers that accumulate, on the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, Verdict, check_microbatches
from tests.verify.microbatches.problem import ALIKE, ALIKE_PARTIAL, FULL, PARAMS


def loss(params: Any, batch: Any) -> Any:
    made = tf.reduce_sum(batch["x"] * params["w"], axis=1) + params["b"]
    return tf.reduce_mean((made - batch["y"]) ** 2)


def accumulating(steps: int, **others: Any) -> Callable[[Any], Any]:
    """The optimizer with accumulation, and perhaps with other settings that differ."""

    def wrap(inner: Any) -> Any:
        return type(inner).from_config(inner.get_config() | {"gradient_accumulation_steps": steps} | others)

    return wrap


ADAM = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)
HALVED: Any = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
DECAYING = keras.optimizers.SGD(HALVED)


@pytest.mark.parametrize("inner", [ADAM, pytest.param(keras.optimizers.SGD(0.1, momentum=0.9), marks=pytest.mark.full)])
def test_clipping_decay_and_bias_correction_happen_once_a_window(inner: Any) -> None:
    report = check_microbatches(loss, PARAMS, ALIKE, inner, accumulating(4))
    assert report.passes, str(report)
    assert len(report.windows) == 3


@pytest.mark.parametrize(
    ("windows", "inner", "wrap", "cause", "window"),
    [
        (FULL, ADAM, accumulating(4), Cause.MEAN_OF_MEANS, 0),
        (ALIKE, DECAYING, accumulating(4), Cause.COUNTED, 0),
        pytest.param(ALIKE_PARTIAL, ADAM, accumulating(4), Cause.PARTIAL_LEAKS, 2, marks=pytest.mark.full),
        (ALIKE, ADAM, accumulating(2), Cause.WINDOW, 0),
        pytest.param(
            *(ALIKE, keras.optimizers.SGD(0.1), accumulating(4, clipnorm=0.1), Cause.CHANGED_MEAN, 0),
            marks=pytest.mark.full,
        ),
        (ALIKE, keras.optimizers.SGD(0.1), accumulating(4, weight_decay=0.1), Cause.CHANGED_AFTER, 0),
    ],
)
def test_a_fault_is_named(windows: Any, inner: Any, wrap: Any, cause: Cause, window: int) -> None:
    report = check_microbatches(loss, PARAMS, windows, inner, wrap)
    assert (report.cause, report.faults[0].window) == (cause, window), str(report)


@pytest.mark.full
def test_bfloat16_variables_have_a_bfloat16_accumulator() -> None:
    narrow = tf.nest.map_structure(lambda x: tf.cast(x, tf.bfloat16), PARAMS)
    windows = tf.nest.map_structure(lambda x: tf.cast(x, tf.bfloat16), ALIKE)
    report = check_microbatches(loss, narrow, windows, keras.optimizers.SGD(0.125), accumulating(4))
    assert report.cause is Cause.PRECISION, str(report)
    assert "bfloat16" in report.faults[0].detail


def test_the_wrapper_has_to_make_another_optimizer() -> None:
    with pytest.raises(GradCombineError, match="accumulating to return a Keras optimizer, received int"):
        check_microbatches(loss, PARAMS, ALIKE, ADAM, lambda inner: 3)


def test_a_loss_of_its_own_precision_is_not_checked_in_float64() -> None:
    def narrow(params: Any, batch: Any) -> Any:
        return loss(*tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), (params, batch)))

    report = check_microbatches(narrow, PARAMS, ALIKE, keras.optimizers.SGD(0.1), accumulating(4))
    assert report.verdict is Verdict.CANNOT_TELL and report.full_batch is None
    assert "not checked, since the loss computes in float32" in str(report)


def test_a_model_of_keras_is_a_loss() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])

    def model_loss(params: Any, batch: Any) -> Any:
        made = model.stateless_call(params, model.non_trainable_variables, batch["x"])[0]
        return tf.reduce_mean((made[:, 0] - batch["y"]) ** 2)

    values = [np.asarray(variable) for variable in model.trainable_variables]
    report = check_microbatches(model_loss, values, ALIKE, ADAM, accumulating(4))
    assert report.verdict is Verdict.CANNOT_TELL and not report.faults, str(report)
