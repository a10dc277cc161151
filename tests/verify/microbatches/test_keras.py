"""Keras optimizers with gradient accumulation, on the TensorFlow backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.verify import Cause, StepReport, Verdict, check_microbatches
from tests.verify.microbatches.problem import ALIKE, FULL, PARAMS


def loss(params: Any, batch: Any) -> Any:
    made = tf.reduce_sum(batch["x"] * params["w"], axis=1) + params["b"]
    return tf.reduce_mean((made - batch["y"]) ** 2)


def accumulating(**others: Any) -> Callable[[Any, int], Any]:
    """Wraps an optimizer with accumulation and, for the defects, with other settings changed too."""

    def wrap(inner: Any, steps: int) -> Any:
        return type(inner).from_config(inner.get_config() | {"gradient_accumulation_steps": steps} | others)

    return wrap


def check(batch: Any, inner: Any, wrap: Any, **options: Any) -> StepReport:
    return check_microbatches(
        options.pop("loss", loss), options.pop("params", PARAMS), batch, inner, wrap, microbatches=[4], **options
    )


ADAM = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)
HALVED: Any = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
DECAYING = keras.optimizers.SGD(HALVED)


@pytest.mark.full
@pytest.mark.parametrize("inner", [ADAM, keras.optimizers.SGD(0.1, momentum=0.9)])
def test_clipping_decay_and_bias_correction_happen_once_a_window(inner: Any) -> None:
    report = check(ALIKE, inner, accumulating())
    assert report.passes, str(report)


@pytest.mark.full
@pytest.mark.parametrize(
    ("batch", "inner", "wrap", "cause", "window"),
    [
        (FULL, ADAM, accumulating(), Cause.MEAN_OF_MEANS, 0),
        (ALIKE, DECAYING, accumulating(), Cause.COUNTED, 0),
        (ALIKE, ADAM, accumulating(), Cause.LEAKS, 2),
        (ALIKE, ADAM, accumulating(gradient_accumulation_steps=2), Cause.WINDOW, 0),
        (ALIKE, keras.optimizers.SGD(0.1), accumulating(clipnorm=0.1), Cause.CHANGED_MEAN, 0),
        (ALIKE, keras.optimizers.SGD(0.1), accumulating(weight_decay=0.1), Cause.CHANGED_AFTER, 0),
    ],
)
def test_a_fault_is_named(batch: Any, inner: Any, wrap: Any, cause: Cause, window: int) -> None:
    report = check(batch, inner, wrap, partial=window == 2)
    assert report.cause is cause, str(report)
    assert cause is Cause.MEAN_OF_MEANS or f"window {window}" in report.faults[0].run


@pytest.mark.full
def test_bfloat16_variables_have_a_bfloat16_accumulator() -> None:
    narrow = tf.nest.map_structure(lambda x: tf.cast(x, tf.bfloat16), PARAMS)
    batch = tf.nest.map_structure(lambda x: tf.cast(x, tf.bfloat16), ALIKE)
    for bias in (narrow["b"], tf.reduce_sum(narrow["b"])):  # NumPy itself cannot convert scalars of bfloat16
        report = check(batch, keras.optimizers.SGD(0.125), accumulating(), params=narrow | {"b": bias})
        assert report.cause is Cause.PRECISION, str(report)


def test_the_wrapper_has_to_make_another_optimizer() -> None:
    with pytest.raises(GradCombineError, match="received AttributeError: 'int' object has no attribute"):
        check(ALIKE, ADAM, lambda inner, k: 3)


@pytest.mark.full
def test_a_loss_of_its_own_precision_is_not_checked_in_float64() -> None:
    def narrow(params: Any, batch: Any) -> Any:
        return loss(*tf.nest.map_structure(lambda x: tf.cast(x, tf.float32), (params, batch)))

    report = check(ALIKE, keras.optimizers.SGD(0.1), accumulating(), loss=narrow)
    assert report.verdict is Verdict.CANNOT_TELL, str(report)
    assert "not checked: accuracy, since the step rounds to a dtype narrower" in str(report)


@pytest.mark.full
def test_a_model_of_keras_is_a_loss() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])

    def model_loss(params: Any, batch: Any) -> Any:
        made = model.stateless_call(params, model.non_trainable_variables, batch["x"])[0]
        return tf.reduce_mean((made[:, 0] - batch["y"]) ** 2)

    values = [np.asarray(variable) for variable in model.trainable_variables]
    report = check(ALIKE, ADAM, accumulating(), loss=model_loss, params=values)
    assert report.passes and report.reference == "the same step in float64", str(report)
