"""Accumulation around Keras' MultiOptimizer."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate


def test_settings_of_one_optimizer_among_several_are_refused() -> None:
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0)))
    with pytest.raises(GradCombineError, match="exclude_from_weight_decay on one of MultiOptimizer"):
        Accumulate(several, 2).exclude_from_weight_decay(var_names=["bias"])


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (lambda: Accumulate(keras.optimizers.SGD(1.0), 2), "does not accumulate already"),
        (lambda: keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), "without gradient_accumulation_steps"),
    ],
)
def test_none_of_several_optimizers_accumulates_itself(inside: Any, message: str) -> None:
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inside()))
    with pytest.raises(GradCombineError, match=message):
        Accumulate(several, 2)
