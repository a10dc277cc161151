"""Gradients that reach Keras optimizers on TensorFlow are found, in eager steps and in compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.verify import Cause, StepReport, Verdict, check_step
from tests.verify.steps.dividing import parts

pytestmark = pytest.mark.full

RNG = np.random.default_rng(0)
BATCH = {
    "x": tf.constant(RNG.normal(size=(8, 3, 4)), tf.float32),
    "mask": tf.constant(np.arange(3) < np.array([1, 1, 2, 3, 3, 2, 1, 3])[:, None], tf.float32),
}


def mean(made: list[Any]) -> list[Any]:
    """The gradients of one batch, from sums of gradients and weights of microbatches."""
    total = sum(weight for _, weight in made)
    return [sum(x) / total for x in zip(*(grads for grads, _ in made), strict=True)]


def mean_of_means(made: list[Any]) -> list[Any]:
    return [x / len(made) for x in mean([([x / weight for x in grads], 1.0 / len(made)) for grads, weight in made])]


def summed(made: list[Any]) -> list[Any]:
    return [x * len(made) for x in mean(made)]


def without_the_last(made: list[Any]) -> list[Any]:
    total = sum(weight for _, weight in made)
    return [sum(x[: max(1, len(x) - 1)]) / total for x in zip(*(grads for grads, _ in made), strict=True)]


def checked(
    optimizer: Callable[[int], Any],
    combine: Callable[[list[Any]], list[Any]] | None = mean,
    wrap: Callable[[Any], Any] = tf.function,
    layer: Callable[[], Any] | None = None,
    batch: Any = BATCH,
    outside: Any = None,
) -> StepReport:
    """Checks an engine that loads the variables of a model, updates them once, and returns them.

    Args:
      combine: of sums of gradients and weights; None: one call of the optimizer for each microbatch.
      outside: a model that all engines share; None: each engine makes one.
    """

    def make_step(k: int) -> Any:
        net, inner = outside or model(layer), optimizer(k)
        inner.build(net.trainable_variables)

        def gradients(part: Any) -> Any:
            with tf.GradientTape() as tape:
                outputs = tf.cast(net(part["x"], training=True), part["mask"].dtype)
                loss = tf.reduce_sum((outputs[..., 0] - 1) ** 2 * part["mask"])
            return tape.gradient(loss, net.trainable_variables), tf.reduce_sum(part["mask"])

        @wrap
        def update(batch: Any) -> None:
            made = [gradients(part) for part in parts(batch, k)]
            for grads in [combine(made)] if combine else [mean([x]) for x in made]:
                inner.apply(grads, net.trainable_variables)

        def step(params: Any, batch: Any) -> Any:
            for variable, value in zip(net.variables, params, strict=True):
                variable.assign(value)
            for variable in inner.variables:
                if variable is not inner._learning_rate:
                    variable.assign(tf.zeros_like(variable.value))
            update(batch)
            return [tf.convert_to_tensor(x.value) for x in net.variables]

        return step

    params = [tf.convert_to_tensor(x.value) for x in (outside or model(layer)).variables]
    return check_step(make_step, params, batch, returns="params", microbatches=(4,))


def model(layer: Callable[[], Any] | None = None) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(5, "tanh"), *([layer()] if layer else []), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((3, 4)), *layers])


def adam(_: int) -> Any:
    return keras.optimizers.Adam(0.05)


@pytest.mark.parametrize(
    "wrap", [lambda f: f, tf.function, tf.function(jit_compile=True)], ids=["eager", "graph", "xla"]
)
def test_wrong_gradients_are_named_behind_any_optimizer(wrap: Any) -> None:
    def rates(_: int) -> Any:
        return keras.optimizers.RMSprop(0.05, clipnorm=0.5)

    causes = {mean_of_means: Cause.MEAN_OF_MEANS, without_the_last: Cause.LOST, summed: Cause.SUM}
    for combine, cause in list(causes.items())[: None if wrap is tf.function else 1]:
        report = checked(rates, combine, wrap)
        assert report.cause is cause and "reaches the optimizer" in report.faults[0].detail, (combine, str(report))
    assert checked(rates, wrap=wrap).passes


@pytest.mark.parametrize("name", ["Adam", "Lion"])
def test_a_sum_that_the_first_update_hides_is_named(name: str) -> None:
    def hiding(_: int) -> Any:
        return getattr(keras.optimizers, name)(0.05, **({"epsilon": 1e-30} if name == "Adam" else {}))

    report = checked(hiding, summed)
    assert report.cause is Cause.SUM and "hides it" in report.faults[0].detail, str(report)
    assert checked(hiding).passes


def test_running_statistics_are_named_beside_the_gradients() -> None:
    report = checked(adam, layer=keras.layers.BatchNormalization)
    assert {x.cause for x in report.faults} == {Cause.STATISTICS}, str(report)
    assert report.allowing("statistics").passes, str(report)
    wrong = checked(adam, summed, layer=keras.layers.BatchNormalization)
    assert not wrong.allowing("statistics").passes, str(wrong)


def test_the_gradients_of_an_optimizer_that_accumulates_are_not_known() -> None:
    """Each call gets those of one microbatch, which differ although the update does not."""

    def accumulating(k: int) -> Any:
        return keras.optimizers.Lion(0.05, gradient_accumulation_steps=k if k > 1 else None)

    report = checked(accumulating, None, batch=BATCH | {"mask": tf.ones((8, 3))})
    assert report.verdict is Verdict.CANNOT_TELL and not report.faults, str(report)


def test_the_gradients_under_a_strategy_are_not_known() -> None:
    """There the gradients of one replica reach the optimizer, and updates run in another function."""
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")

    def distributed(update: Any) -> Any:
        return tf.function(lambda batch: strategy.run(update, (batch,)))

    def lion(_: int) -> Any:
        return keras.optimizers.Lion(0.05)

    for combine in (mean, summed):
        report = checked(lion, combine, distributed)
        assert report.verdict is Verdict.CANNOT_TELL and not report.faults, str(report)


def test_updates_that_adam_hides_are_counted() -> None:
    report = checked(adam, None)
    assert report.cause is Cause.MOVED_EACH, str(report)
    assert report.faults[0].detail == "its optimizers make 4 steps, and 1 in one batch"


@pytest.mark.parametrize("outside", [False, True])
def test_layers_run_in_float64(outside: bool) -> None:
    report = checked(adam, outside=model() if outside else None)
    assert report.passes and not report.not_checked, str(report)
    assert keras.config.floatx() == "float32" and keras.config.dtype_policy().name == "float32"


class SelfAttention(keras.layers.Layer):
    def build(self, shape: Any) -> None:
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return x + self.attention(x, x)


@pytest.mark.parametrize("name", ["Adam", "Lion"])
def test_the_key_bias_of_attention_is_rounding_and_no_narrow_dtype(name: str) -> None:
    """Its gradient is 0 in exact arithmetic, and the optimizer moves it by an update of full size."""

    def optimizer(_: int) -> Any:
        return getattr(keras.optimizers, name)(0.05)

    report = checked(optimizer, layer=SelfAttention)
    assert report.passes and not report.not_checked, str(report)
    assert checked(optimizer, mean_of_means, layer=SelfAttention).cause is Cause.MEAN_OF_MEANS


@pytest.mark.parametrize("right", [False, True])
def test_variables_of_tensorflow_run_in_float64(right: bool) -> None:
    with tf.Graph().as_default():
        of_a_graph = tf.Variable(tf.ones(4))  # has no value here
    weights = tf.Variable(tf.ones(4))

    def make_step(k: int) -> Any:
        @tf.function
        def update(x: Any) -> None:
            with tf.GradientTape() as tape:
                losses = [tf.reduce_mean(tf.linalg.matvec(part, weights) ** 2) for part in parts(x, k)]
                loss = sum(losses) / (k if right else 1)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))

        def step(params: Any, batch: Any) -> Any:
            weights.assign(params)
            update(batch)
            return weights

        return step

    report = check_step(make_step, tf.ones(4), BATCH["x"], returns="params", microbatches=(4,))
    assert report.passes == right and not report.not_checked, str(report)
    assert report.cause is (None if right else Cause.SUM), str(report)
    assert weights.dtype == of_a_graph.dtype == tf.float32 and weights.numpy().dtype == np.float32


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_found_and_runs_in_float64(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        report = checked(adam)
        assert report.passes and not report.not_checked, str(report)
        assert checked(adam, summed).cause is Cause.SUM
        assert keras.config.dtype_policy().name == policy
    finally:
        keras.config.set_dtype_policy("float32")


def test_a_step_with_values_that_it_changes_in_place_is_observed_on_copies() -> None:
    """It cannot be traced, and would change the parameters of the check."""

    def make_step(k: int) -> Any:
        def step(params: Any, batch: Any) -> Any:
            grads = [tf.linalg.matvec(x, x @ params - 1, transpose_a=True).numpy() for x in parts(batch, k)]
            params -= np.float32(0.1 / 8) * sum(grads)
            return params

        return step

    params = np.ones(4, np.float32)
    report = check_step(make_step, params, BATCH["x"].numpy()[:, 0], returns="params", microbatches=(4,))
    assert not report.faults and params.tolist() == [1, 1, 1, 1], str(report)
