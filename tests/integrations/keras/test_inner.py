"""Methods and properties inherited from the Keras optimizer are forwarded to the inner optimizer or raise."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import linear, matrix_and_vector, microbatches, stepper

PUBLIC = sorted(name for name in {*dir(keras.optimizers.Optimizer)} - {*dir(object)} if not name.startswith("_"))
SETTINGS = sorted(name for name in vars(keras.optimizers.SGD(1.0)) if not name.startswith("_"))
DELEGATED = (
    "add_variable",
    "add_variable_from_reference",
    "add_optimizer_variables",
    "assign",
    "assign_add",
    "assign_sub",
    "exclude_from_weight_decay",
)
SCALED = [lambda inner: inner, keras.optimizers.LossScaleOptimizer]


@pytest.mark.parametrize("name", PUBLIC)
def test_nothing_is_inherited_without_a_decision(name: str) -> None:
    """Fails for each method or property of a newer Keras that is neither forwarded nor overridden."""
    ours = [x for x in Accumulate.__mro__ if x.__module__.startswith("gradcombine.")]
    assert any(name in vars(x) for x in ours)


@pytest.mark.parametrize("name", DELEGATED)
def test_methods_reach_the_inner_optimizer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, seen = keras.optimizers.SGD(1.0), []
    optimizer = Accumulate(inner, 2)
    monkeypatch.setattr(type(inner), name, lambda *args, **kwargs: seen.append((args, kwargs)))
    getattr(optimizer, name)("given", name="too")
    assert seen == [((inner, "given"), {"name": "too"})]


@pytest.mark.parametrize("wrap", SCALED)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in ("name", "built")])
def test_settings_are_the_inner_optimizers(name: str, wrap: Any) -> None:
    inner = keras.optimizers.SGD(1.0)
    optimizer = Accumulate(wrap(inner), 2)
    monitored = object()
    inner.__dict__[name] = monitored
    assert getattr(optimizer, name) is monitored
    if name == "gradient_accumulation_steps":
        with pytest.raises(GradCombineError, match="no gradient_accumulation_steps"):
            optimizer.gradient_accumulation_steps = 2
    elif name == "loss_scale_factor" and wrap is keras.optimizers.LossScaleOptimizer:
        with pytest.raises(GradCombineError, match="one LossScaleOptimizer"):
            optimizer.loss_scale_factor = 2.0
    else:
        setattr(optimizer, name, 0.25)
        assert vars(inner)[name] == 0.25 and name not in vars(optimizer)


@pytest.mark.parametrize("wrap", SCALED)
def test_excluded_from_weight_decay_is_excluded(wrap: Any) -> None:
    variables = matrix_and_vector()
    optimizer = Accumulate(wrap(keras.optimizers.SGD(1.0, weight_decay=0.5)), 2)
    optimizer.exclude_from_weight_decay(var_names=["w1"])
    step = stepper(optimizer, variables, "eager")
    for _ in range(2):
        step([np.zeros((2, 3)), np.zeros(5)])
    assert [float(x.numpy().max()) for x in variables] == [0.5, 1.0]


def test_an_unknown_attribute_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'momenta'"):
        _ = Accumulate("sgd", 2).momenta


def test_an_inner_optimizer_that_trains_others_is_refused() -> None:
    inner = keras.optimizers.SGD(1.0)
    a, b = matrix_and_vector()
    inner.build([b, a])
    with pytest.raises(GradCombineError, match="built with the same variables"):
        Accumulate(inner, 2).build([a, b])


def test_building_again_keeps_the_window() -> None:
    variables = matrix_and_vector()
    optimizer = Accumulate(keras.optimizers.SGD(1.0), 2)
    step = stepper(optimizer, variables, "eager")
    step(microbatches(0, 1)[0])
    count = len(optimizer.variables)
    optimizer.build(variables)
    assert len(optimizer.variables) == count and bool(optimizer.flush())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_other_trainable_weights_are_refused_in_the_words_of_keras() -> None:
    """Or are accepted if Keras accepts them, as it does for fewer weights on TensorFlow."""
    data = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    seen = []
    for optimizer in (keras.optimizers.SGD(0.1), Accumulate(keras.optimizers.SGD(0.1), 2)):
        model = linear(optimizer)
        extra = keras.layers.Dense(1)
        extra.build((None, 1))
        optimizer.build([*model.trainable_variables, *extra.trainable_variables])
        try:
            seen.append(bool(model.fit(*data, verbose=0)))
        except ValueError as error:
            seen.append(str(error))
    assert seen[0] == seen[1]
