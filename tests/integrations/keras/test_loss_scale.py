"""Loss scales inside and around the optimizer, and variables that are overwritten by their gradient."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import ON_JAX, linear, stepper

ONE, INF = np.ones(1, np.float32), np.full(1, np.inf, np.float32)


def dynamic(inner: Any, **settings: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, **settings)


def test_inside_it_skips_a_window_with_an_infinity(mode: str) -> None:
    w = keras.Variable([0.0])
    optimizer = Accumulate(dynamic(keras.optimizers.SGD(-1.0)), 2)
    step = stepper(optimizer, [w], mode)
    seen = []
    for given in (16 * ONE, 32 * ONE, INF, ONE, 4 * ONE, 4 * ONE):
        step([given])
        seen.append((float(w[0]), float(optimizer.scale_loss(1.0))))
    # (16 + 32) / 2 / 8 = 3, then a skipped window that halves the scale, then 4 / 4.
    assert seen == [(0, 8), (3, 8), (3, 8), (3, 4), (3, 4), (4, 4)]


def test_around_it_leaves_out_one_microbatch() -> None:
    w = keras.Variable([0.0])
    optimizer = dynamic(Accumulate(keras.optimizers.SGD(-1.0), 2))
    optimizer.build([w])
    mode = "compiled" if ON_JAX else "eager"
    step = stepper(optimizer, [w], mode)
    for given in (16 * ONE, INF, 4 * ONE):
        step([given])
    # (16 / 8 + 4 / 4) / 2
    assert float(w[0]) == 1.5


def test_around_it_turns_a_fixed_scale_off() -> None:
    inner = keras.optimizers.SGD(1.0, loss_scale_factor=4.0)
    optimizer = Accumulate(inner, 2)
    assert float(optimizer.scale_loss(np.float32(1))) == 4
    dynamic(optimizer)
    assert inner.loss_scale_factor is None


@pytest.mark.parametrize("outside", [False, True])
def test_averages_of_an_optimizer_with_a_scale_are_swapped(outside: bool) -> None:
    averaged = keras.optimizers.SGD(0.25, use_ema=True, ema_momentum=0.5)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(dynamic(Accumulate(averaged, 2)) if outside else Accumulate(dynamic(averaged), 2), "mse")
    data = np.ones((1, 1), np.float32), np.full((1, 1), 8, np.float32)
    for _ in range(4):
        model.train_on_batch(*data)
    # Two updates, from 0 to 4 and to 6, have the average 5.
    assert model.evaluate(*data, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()]) == (8 - 5) ** 2
    assert model.get_weights()[0].tolist() == [[6.0]]


def test_one_dynamic_scale_is_enough() -> None:
    with pytest.raises(GradCombineError, match="one LossScaleOptimizer, around this optimizer or inside"):
        dynamic(Accumulate(dynamic(keras.optimizers.SGD(1.0)), 2))


@pytest.fixture
def mixed_float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def recompiled(model: Any, path: Path) -> Any:
    again = keras.models.clone_model(model)
    again.compile_from_config(model.get_compile_config())
    return again


def saved(model: Any, path: Path) -> Any:
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.usefixtures("mixed_float16")
@pytest.mark.parametrize("settings", [{}, {"auto_scale_loss": False}], ids=str)
@pytest.mark.parametrize("way", [recompiled, saved, lambda model, path: pickle.loads(pickle.dumps(model))])
def test_a_model_of_mixed_float16_comes_back(way: Any, settings: Any, tmp_path: Path) -> None:
    """Keras does not save auto_scale_loss, and would wrap the optimizer in a second loss scale."""
    optimizer = Accumulate(dynamic(keras.optimizers.SGD(1.0)), 2)
    model = linear(optimizer, **settings)
    assert model.optimizer is optimizer
    optimizer.build(model.trainable_variables)
    again = way(model, tmp_path).optimizer
    assert isinstance(again, Accumulate)
    assert keras.optimizers.serialize(again)["config"] == keras.optimizers.serialize(optimizer)["config"]


def test_what_takes_its_variables_place_has_the_maximum(mode: str) -> None:
    """The scales of float8 layers are neither averaged nor weighted, as in Keras, but may be negative."""
    w, scale = keras.Variable([0.0]), keras.Variable([0.0])
    scale.overwrite_with_gradient = True
    step = stepper(Accumulate(keras.optimizers.SGD(-1.0, loss_scale_factor=2.0), 2), [w, scale], mode)
    for gradient, value, weight in ((2, -3, 1), (6, -5, 3)):
        step([gradient * ONE, value * ONE], weight)
    assert (float(w[0]), float(scale[0])) == (2.5, -3)
