"""The warning about batches of different sizes that ``fit`` passes without a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd
from tests.integrations.keras.cases import ON_JAX, SETTINGS, Batches, Model, Plain, linear, warned_of
from tests.spec.selection import cases, named

X, Y = np.ones((11, 2), np.float32), np.ones((11, 1), np.float32)


def batches(*sizes: int) -> Batches:
    return Batches([(X[:size], Y[:size]) for size in sizes])


def compiled(model: type = Plain, every: Any = 2, reduction: Any = "mean", **settings: Any) -> Any:
    made = linear(Accumulate(keras.optimizers.SGD(0.125), every, reduction=reduction), model)
    made.compile(made.optimizer, settings.pop("loss", "mse"), **settings)
    return made


def fit(model: Any, data: Any, **settings: Any) -> None:
    data = data if isinstance(data, tuple) else (data,)
    model.fit(*data, shuffle=False, verbose=0, **settings)


def warned(model: Any, data: Any, **settings: Any) -> list[int]:
    """Number of warnings so far at the end of each step; there is one in total."""
    counts: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: counts.append(len(caught)))
    with warned_of("3 and of 4") as caught:
        fit(model, data, callbacks=[count], **settings)
    return counts


@pytest.mark.full
@pytest.mark.parametrize("settings", named(("jit", "eager"), SETTINGS))
def test_arrays_warn_at_the_first_step(settings: dict[str, Any]) -> None:
    assert warned(compiled(**settings), (X, Y), batch_size=4)[0] == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "kind"),
    cases(
        [("default", "generator"), ("jit", "dataset"), ("eager", "dataset"), ("several", "dataset")],
        SETTINGS,
        ("dataset", "generator"),
    ),
)
def test_other_data_warn_once_a_short_batch_has_come(name: str, kind: str) -> None:
    settings = SETTINGS[name]
    data = batches(4, 4, 3) if kind == "dataset" else (batches(4, 4, 3)[i] for i in range(3))
    counts = warned(compiled(**settings), data, steps_per_epoch=None if kind == "dataset" else 3)
    if "steps_per_execution" not in settings:
        assert counts == [0, 0, int(ON_JAX or "run_eagerly" in settings)]


class OwnStep(keras.Model):
    """Takes the same number of examples from each batch."""

    def train_step(self, *args: Any) -> Any:
        x, y = args[-1]
        return super().train_step(*args[:-1], (x[:4], y[:4]))


class OwnLoss(keras.Model):
    """Sums over the examples."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any) -> Any:
        return keras.ops.sum(keras.ops.square(y_pred - y))


SILENT: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "even": (compiled, (X[:8], Y[:8]), {"batch_size": 4}),
    "one short batch": (compiled, (X[:8], Y[:8]), {}),
    "without the last one": (compiled, (X, Y), {"batch_size": 4, "steps_per_epoch": 2}),
    "dataset": (compiled, batches(4, 4), {"epochs": 2}),
    "weighed": (compiled, (X, Y), {"batch_size": 4, "callbacks": [FlushAtEpochEnd()]}),
    "windows of one": (lambda: compiled(every=1), batches(4, 6, 4), {}),
    "WeightedTrainStep": (lambda: compiled(Model), batches(4, 6, 4), {}),
    "sum": (lambda: compiled(reduction="sum"), batches(4, 6, 4), {}),
    "summed loss": (lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum")), batches(4, 6, 4), {}),
    "own loss": (lambda: compiled(OwnLoss), batches(4, 6, 4), {}),
    "own step": (lambda: compiled(OwnStep), batches(4, 6, 4), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("case", SILENT)
def test_what_is_no_mean_of_means_is_silent(case: str) -> None:
    make, data, settings = SILENT[case]
    fit(make(), data, **settings)


@pytest.mark.full
def test_fits_of_one_size_each_are_silent() -> None:
    model = compiled()
    for size in (4, 2, 4):
        fit(model, batches(size, size), epochs=2)


@pytest.mark.full
def test_a_fit_warns_after_one_that_had_no_reason() -> None:
    """Its larger batches have already been traced."""
    model = compiled()
    fit(model, batches(4, 4))
    warned(model, batches(4, 3))


@pytest.mark.full
def test_an_optimizer_warns_once() -> None:
    model = compiled()
    warned(model, (X, Y), batch_size=4)
    fit(model, (X, Y), batch_size=4)
    fit(model, batches(4, 2))


@pytest.mark.full
def test_a_scaled_optimizer_warns() -> None:
    model = compiled()
    model.compile(keras.optimizers.LossScaleOptimizer(Accumulate(keras.optimizers.SGD(0.125), 2)), "mse")
    warned(model, batches(4, 3))


@pytest.mark.full
def test_the_warning_changes_no_bits() -> None:
    trained = []
    for callbacks in ([], [Ones()]):
        model = compiled()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            fit(model, batches(4, 4, 3, 4), epochs=2, callbacks=callbacks)
        trained.append([x.numpy().tobytes() for x in (*model.weights, *model.optimizer.variables)])
    assert trained[0] == trained[1]


class Ones(keras.callbacks.Callback):
    """Passes a weight of 1 for every microbatch, which disables the warning."""

    def on_train_begin(self, logs: Any = None) -> None:
        model: Any = self.model
        own = model.train_step

        def step(*args: Any) -> Any:
            with model.optimizer.weighted(1):
                return own(*args)

        model.train_step = step
        model.make_train_function(force=True)
