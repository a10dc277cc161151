"""Keras' optimizer of several optimizers."""

from __future__ import annotations

import keras
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate


def test_settings_of_one_optimizer_among_several_are_refused() -> None:
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(1.0)))
    with pytest.raises(GradCombineError, match="exclude_from_weight_decay on one of MultiOptimizer"):
        Accumulate(several, 2).exclude_from_weight_decay(var_names=["bias"])
