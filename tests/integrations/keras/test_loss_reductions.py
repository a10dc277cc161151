"""Batch weights in ``fit`` for losses that are sums over examples or means over sample weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd, WeightedTrainStep
from tests.integrations.keras.cases import SETTINGS, Batches, Model, Plain, linear
from tests.spec.selection import cases

RNG = np.random.default_rng(3)
ROWS, BATCH, EVERY = 11, 4, 3
X, Y = RNG.normal(size=(ROWS, 2)).astype(np.float32), RNG.normal(size=(ROWS, 1)).astype(np.float32)
COUNTED = RNG.integers(1, 9, ROWS).astype(np.float32)


def squares(reduction: str | None) -> Any:
    return keras.losses.MeanSquaredError(reduction=reduction)


def gradient(weights: np.ndarray) -> np.ndarray:
    """The weighted sum of the examples' gradients over the epoch in float64, with all parameters 1."""
    residuals = X.astype(np.float64).sum(axis=1) - Y[:, 0]
    return 2 * (weights.astype(np.float64) * residuals) @ X.astype(np.float64)


def change(loss: Any, reduction: Any, model: type, settings: dict[str, Any], **fit: Any) -> np.ndarray:
    """The change of the parameters by one window over an epoch in batches of 4, 4 and 3."""
    made = linear(Accumulate(keras.optimizers.SGD(1.0), EVERY, reduction=reduction), model)
    made.compile(made.optimizer, loss, **settings)
    callbacks = [FlushAtEpochEnd()]
    made.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks, **fit)
    assert int(made.optimizer.iterations) == 1
    return 1 - made.weights[0].numpy()[:, 0].astype(np.float64)


KINDS = {"plain": Plain, "weighted": Model}
ONES, BY_WEIGHT = np.ones(ROWS), "mean_with_sample_weight"
LOSSES: dict[str, tuple[Any, str, Any, np.ndarray]] = {
    "sum": (squares("sum"), "sum", None, ONES),
    "mse": ("mse", "mean", None, ONES / ROWS),
    "mean": (squares("mean"), "mean", None, ONES / ROWS),
    "mse beside sample weights": ("mse", "mean", COUNTED, COUNTED / ROWS),
    "by sample weight": (squares(BY_WEIGHT), "mean", COUNTED, COUNTED / COUNTED.sum(dtype=np.float64)),
    "by sample weight, without any": (squares(BY_WEIGHT), "mean", None, ONES / ROWS),
}
"""Loss, reduction of the window, sample weights, and the weights of the examples' gradients in the window."""

QUICK = [
    ("sum", "plain", "jit"),
    ("sum", "weighted", "default"),
    ("by sample weight", "plain", "jit"),
    ("by sample weight", "weighted", "default"),
    ("by sample weight, without any", "weighted", "default"),
    ("mse", "plain", "default"),
    ("mean", "weighted", "default"),
    ("mse beside sample weights", "plain", "default"),
]


@pytest.mark.full
@pytest.mark.parametrize(("loss", "kind", "settings"), cases(QUICK, LOSSES, KINDS, SETTINGS, pairwise=True))
def test_a_window_over_the_epoch_weighs_its_examples_as_the_loss_does(loss: str, kind: str, settings: str) -> None:
    function, reduction, counts, weights = LOSSES[loss]
    received = change(function, reduction, KINDS[kind], SETTINGS[settings], sample_weight=counts)
    np.testing.assert_allclose(received, gradient(weights), rtol=1e-5)


@pytest.mark.parametrize("model", [Plain, Model])
@pytest.mark.parametrize("reduction", ["sum", pytest.param(None, marks=pytest.mark.full)])
def test_a_mean_of_summed_losses_is_refused(model: type, reduction: str | None) -> None:
    with pytest.raises(GradCombineError, match=r"Accumulate\(..., reduction='sum'\) for losses that are sums"):
        change(squares(reduction), "mean", model, {})


def two_outputs(losses: Any, model: type = Plain) -> Any:
    x = keras.Input((2,))
    made = model(x, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])
    made.compile(Accumulate(keras.optimizers.SGD(1.0), EVERY), losses)
    return made


@pytest.mark.parametrize("model", [Plain, Model])
def test_losses_of_both_kinds_are_refused(model: type) -> None:
    made = two_outputs([squares("sum"), squares("mean")], model)
    with pytest.raises(GradCombineError, match=r"all means over the examples or all sums.*received .*'mean', 'sum'"):
        made.fit(X, [Y, Y], batch_size=BATCH, verbose=0, callbacks=[FlushAtEpochEnd()])


def test_sample_weights_of_several_outputs_are_refused() -> None:
    made = two_outputs([squares("mean_with_sample_weight")] * 2)
    with pytest.raises(GradCombineError, match=r"^Accumulate: leaf loss: .*one sample weight .*received 2"):
        made.fit(X, [Y, Y], batch_size=BATCH, verbose=0, sample_weight=COUNTED, callbacks=[FlushAtEpochEnd()])


def test_the_number_of_examples_is_that_of_all_arrays() -> None:
    """Scalars have no examples; arrays of two lengths, such as a prior of the classes, leave open which one counts."""
    made = linear(Accumulate(keras.optimizers.SGD(1.0), EVERY), Model)
    batch = {"alpha": keras.ops.ones(()), "x": keras.ops.ones((4, 2))}
    assert int(made.microbatch_weight(batch, None, None)) == 4
    for x, y in (({"prior": keras.ops.ones(10), **batch}, None), (batch["x"], [batch["x"], batch["x"][:3]])):
        with pytest.raises(GradCombineError, match=r"leaf batch: expected arrays with one number of examples.*lengths"):
            made.microbatch_weight(x, y, None)


@pytest.mark.full
def test_a_weight_of_ones_own_is_taken_for_summed_losses() -> None:
    class Counted(Model):
        def microbatch_weight(self, x: Any, y: Any, sample_weight: Any) -> Any:
            return 1

    received = change(squares("sum"), "mean", Counted, {})
    np.testing.assert_allclose(received, gradient(np.ones(ROWS)) / EVERY, rtol=1e-5)


@pytest.mark.parametrize("model", [Plain, Model])
def test_regularizers_beside_summed_losses_are_refused(model: type) -> None:
    """They do not add up over microbatches: each has the full penalty."""
    x = keras.Input((2,))
    made = model(x, keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.5))(x))
    made.compile(Accumulate(keras.optimizers.SGD(1.0), EVERY, reduction="sum"), squares("sum"))
    with pytest.raises(GradCombineError, match="expected no regularizers, which do not add up over microbatches"):
        made.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[FlushAtEpochEnd()])


def test_activity_regularizers_beside_means_by_sample_weight_are_refused() -> None:
    """Keras divides them by the number of examples."""
    x = keras.Input((2,))
    made = Plain(x, keras.layers.Dense(1, activity_regularizer=keras.regularizers.L2(0.5))(x))
    made.compile(Accumulate(keras.optimizers.SGD(1.0), EVERY), squares("mean_with_sample_weight"))
    with pytest.raises(GradCombineError, match="leaf loss: expected no activity_regularizer, a mean over examples"):
        made.fit(X, Y, batch_size=BATCH, verbose=0, sample_weight=np.ones(len(X)), callbacks=[FlushAtEpochEnd()])


@pytest.mark.parametrize("model", [Plain, Model])
def test_a_mean_over_labels_that_are_not_ignored_is_refused(model: type) -> None:
    loss = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    with pytest.raises(GradCombineError, match="an override of microbatch_weight that counts the labels"):
        change(loss, "mean", model, {})


OF_BATCHES = ["dice", "Tversky", keras.losses.Dice(), keras.losses.Dice(axis=(0, 1)), keras.losses.circle]


@pytest.mark.parametrize("loss", OF_BATCHES)
@pytest.mark.parametrize("model", [Plain, Model])
def test_a_loss_that_compares_the_examples_of_a_batch_is_refused(model: type, loss: Any) -> None:
    with pytest.raises(GradCombineError, match="a loss that compares the examples of a batch"):
        change(loss, "mean", model, {})


@pytest.mark.parametrize("model", [Plain, Model])
def test_a_dice_loss_of_single_examples_is_a_mean(model: type) -> None:
    loss = keras.losses.Dice(axis=(1,))
    one = linear(keras.optimizers.SGD(1.0), model)
    one.compile(one.optimizer, loss)
    one.fit(X, Y, batch_size=ROWS, verbose=0)
    expected = 1 - one.weights[0].numpy()[:, 0].astype(np.float64)
    np.testing.assert_allclose(change(loss, "mean", model, {}), expected, rtol=1e-5)


@pytest.mark.parametrize("reaches_outputs", [True, False])
@pytest.mark.parametrize("bases", [(keras.Model,), (WeightedTrainStep, keras.Model)])
@pytest.mark.parametrize("functional", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_mean_over_steps_that_are_not_masked_is_refused(functional: bool, bases: Any, reaches_outputs: bool) -> None:
    masking = keras.layers.Masking()
    layer = keras.layers.TimeDistributed(keras.layers.Dense(1)) if reaches_outputs else keras.layers.SimpleRNN(1)

    class Subclassed(*bases):
        def __init__(self) -> None:
            super().__init__()
            self.masking, self.layer = masking, layer

        def call(self, x: Any) -> Any:
            return self.layer(self.masking(x))

    x = keras.Input((3, 2))
    model: Any = type("Functional", bases, {})(x, layer(masking(x))) if functional else Subclassed()
    model.compile(Accumulate(keras.optimizers.SGD(1.0), EVERY), "mse")
    steps, y = np.ones((ROWS, 3, 2), np.float32), np.ones((ROWS, 3, 1) if reaches_outputs else (ROWS, 1), np.float32)
    expected = pytest.raises(GradCombineError, match="received a model whose output has a mask")
    with expected if reaches_outputs else nullcontext():
        model.fit(steps, y, batch_size=BATCH, verbose=0, callbacks=[FlushAtEpochEnd()])


def test_the_labels_count_where_the_first_input_has_other_rows() -> None:
    """Keras divides a loss by the number of labels."""
    x, edges = keras.Input((2,), name="x"), keras.Input((2,), name="edges")
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = Plain({"edges": edges, "x": x}, dense(x) + 0 * keras.ops.sum(edges))
    model.compile(Accumulate(keras.optimizers.SGD(1.0), 2), "mse")
    x, y = np.float32([[1, 2], [3, -1], [2, 2], [-4, 1]]), np.float32([[1], [0], [8], [-2]])
    one, two = np.ones((1, 2), np.float32), np.ones((5, 2), np.float32)
    data = Batches([({"edges": two, "x": x[:2]}, y[:2]), ({"edges": one, "x": x[2:]}, y[2:])])
    model.fit(data, shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd()])
    assert (1 - model.weights[0].numpy()[:, 0]).tolist() == (2 * (x.sum(axis=1) - y[:, 0]) @ x / 4).tolist()
