"""compile, fit, save and load."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd
from tests.integrations.keras.cases import ON_JAX, Batches, Plain, bits, linear, warned_of
from tests.spec.selection import named

RNG = np.random.default_rng(0)
X, Y = RNG.integers(-4, 5, (16, 2)).astype(np.float32), RNG.integers(-4, 5, (16, 1)).astype(np.float32)
"""Small integers in power-of-two batches, so the losses and gradients of the first steps are exact."""


def sgd() -> Any:
    return keras.optimizers.SGD(2.0**-6, momentum=0.5)


def batches(*sizes: int) -> Batches:
    ends = np.cumsum(sizes)
    return Batches([(X[end - size : end], Y[end - size : end]) for end, size in zip(ends, sizes, strict=True)])


def trained(optimizer: Any, data: Any, **settings: Any) -> Any:
    model = linear(optimizer)
    model.fit(data, shuffle=False, verbose=0, **settings)
    return model


@pytest.mark.parametrize("sizes", [pytest.param((4, 4, 4, 4), marks=pytest.mark.full), (4, 2, 2, 1, 1, 6)], ids=str)
def test_fit_equals_large_batches(sizes: tuple[int, ...]) -> None:
    """Microbatches of any sizes have the bits of the batches that they form."""
    every = len(sizes) // 2
    large = trained(sgd(), batches(8, 8))
    model = trained(Accumulate(sgd(), every), batches(*sizes))
    assert bits(model.weights) == bits(large.weights)
    assert int(model.optimizer.iterations) == 2


@pytest.mark.full
def test_without_weights_it_is_a_mean_of_means() -> None:
    model = linear(Accumulate(keras.optimizers.SGD(1.0), 2), Plain)
    before = model.weights[0].numpy()
    with warned_of("2 and of 4"):
        model.fit(batches(4, 2), shuffle=False, verbose=0)
    means = [2 * ((x @ before - y) * x).mean(axis=0) for x, y in ((X[:4], Y[:4]), (X[4:6], Y[4:6]))]
    assert (before[:, 0] - model.weights[0].numpy()[:, 0]).tolist() == np.mean(means, axis=0).tolist()


@pytest.mark.full
def test_what_an_epoch_leaves_over_is_flushed() -> None:
    large = trained(sgd(), batches(8, 4), epochs=2)
    model = trained(Accumulate(sgd(), 2), batches(4, 4, 4), epochs=2, callbacks=[FlushAtEpochEnd()])
    assert bits(model.weights) == bits(large.weights)
    assert int(model.optimizer.iterations) == 4


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"run_eagerly": True}, {"steps_per_execution": 3}], ids=str)
def test_the_callback_weighs_the_smaller_last_batch(settings: dict[str, Any]) -> None:
    """11 rows in microbatches of 2 (the last of 1) train like batches of 8 and 3; all sums are exact."""

    def weights(optimizer: Any, size: int, **fit: Any) -> list[bytes]:
        model = linear(optimizer, Plain)
        model.compile(optimizer, "mse", **settings)
        for _ in range(2):  # the second fit starts with the model in the same state as the first
            model.fit(X[:11], Y[:11], batch_size=size, shuffle=False, verbose=0, **fit)
            assert "train_step" not in vars(model)
        return bits(model.weights)

    received = weights(Accumulate(sgd(), 4), 2, callbacks=[FlushAtEpochEnd()])
    expected = weights(sgd(), 8)
    for a, b in zip(received, expected, strict=True):
        np.testing.assert_allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=1e-6)


def test_an_assigned_train_step_stays_after_fit() -> None:
    model, calls = linear(Accumulate(sgd(), 2), Plain), []
    step = model.train_step

    def counted(*args: Any) -> Any:
        calls.append(len(args))
        return step(*args)

    model.train_step = counted
    model.compile(model.optimizer, "mse", run_eagerly=not ON_JAX)
    for number in (1, 2):
        model.fit(batches(4, 4), shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd()])
        assert model.train_step is counted
        assert len(calls) >= number
    assert int(model.optimizer.iterations) == 2


def test_a_fit_that_stopped_leaves_no_weights_to_another_optimizer() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    model = linear(Accumulate(sgd(), 2), Plain)
    with pytest.raises(KeyboardInterrupt):
        model.fit(batches(4, 4), shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd(), Stop()])
    model.compile(sgd(), keras.losses.MeanSquaredError(reduction="sum"))
    model.fit(batches(4), shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.full
def test_validation_sees_what_was_flushed() -> None:
    model = linear(Accumulate(sgd(), 2))
    history = model.fit(
        batches(4, 4, 4), validation_data=(X, Y), shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd()]
    )
    assert history.history["val_loss"] == [model.evaluate(X, Y, verbose=0)]


def test_flush_needs_an_accumulating_optimizer() -> None:
    with pytest.raises(GradCombineError, match="compiled with Accumulate, received SGD"):
        trained(sgd(), batches(4), callbacks=[FlushAtEpochEnd()])


def adam(**settings: Any) -> Any:
    return keras.optimizers.Adam(0.1, **settings)


MAKE = {
    "ema": lambda: Accumulate(adam(use_ema=True), 3),
    "scale inside": lambda: Accumulate(keras.optimizers.LossScaleOptimizer(adam()), 3, order="tree"),
    "scale outside": lambda: keras.optimizers.LossScaleOptimizer(Accumulate(adam(), 3, precision="compensated")),
}


@pytest.mark.full
@pytest.mark.parametrize("make", named(("scale inside",), MAKE))
def test_a_file_resumes_in_the_middle_of_a_window(make: Any, tmp_path: Path) -> None:
    model = linear(make())
    model.fit(batches(4, 4), shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert bits(loaded.optimizer.variables) == bits(model.optimizer.variables)
    for each in (model, loaded):
        each.fit(batches(2, 2, 2, 2), shuffle=False, verbose=0)
    assert bits(loaded.weights) == bits(model.weights)
    assert bits(loaded.optimizer.variables) == bits(model.optimizer.variables)
    assert int(loaded.optimizer.iterations) == 2


@keras.saving.register_keras_serializable("tests")
def doubling(index: Any) -> Any:
    return 2**index


def test_a_config_makes_the_same_optimizer() -> None:
    made = Accumulate(
        keras.optimizers.SGD(0.25), doubling, reduction="sum", precision="compensated", order="tree", max_every=8
    )
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert isinstance(again, Accumulate)
    assert again.get_config() == made.get_config() and again.every is doubling


@pytest.mark.full
def test_a_callback_sets_the_inner_learning_rate() -> None:
    model = trained(
        Accumulate(sgd(), 2), batches(4, 4), callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.125)]
    )
    assert float(model.optimizer.inner_optimizer.learning_rate) == 0.125


@pytest.mark.parametrize(("size", "every"), [(2, 4), (4, 3)])
def test_the_end_of_data_of_unknown_size_is_no_microbatch(size: int, every: int) -> None:
    """TensorFlow runs what does not depend on the batch that is missing at the end of the data."""

    def fitted(optimizer: Any, size: int, **settings: Any) -> Any:
        data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).filter(lambda x, y: True).batch(size)
        model = linear(optimizer, Plain)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model.fit(data, epochs=2, verbose=0, **settings)
        return model

    large = fitted(sgd(), 8)
    model = fitted(Accumulate(sgd(), every), size, callbacks=[FlushAtEpochEnd()])
    assert bits(model.weights) == bits(large.weights)
    assert int(model.optimizer.iterations) == 2


class OfAnyRank(Plain):
    """A model with a loss for labels of any rank, which Keras' own losses refuse."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_pred - keras.ops.reshape(y, (-1, 1))))


def test_labels_of_unknown_rank_have_no_number_of_examples() -> None:
    """In TensorFlow; the arrays that JAX gets have a shape."""
    specs = tf.TensorSpec((None, 2)), tf.TensorSpec(None)
    data = tf.data.Dataset.from_generator(lambda: [(X[:4], Y[:4]), (X[4:8], Y[4:8])], output_signature=specs)
    data = data.apply(tf.data.experimental.assert_cardinality(2))
    model = linear(Accumulate(sgd(), 2), OfAnyRank)
    message = r"^Accumulate: leaf batch: expected arrays with one number .* received an array of unknown rank$"
    with nullcontext() if ON_JAX else pytest.raises(GradCombineError, match=message):
        model.fit(data, shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd()])
    assert int(model.optimizer.iterations) == ON_JAX
