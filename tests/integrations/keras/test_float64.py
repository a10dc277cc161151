"""Models in float64, which Keras' JAX backend does not have by default."""

from __future__ import annotations

import keras
import numpy as np

from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd
from tests.integrations.keras.cases import Plain, linear
from tests.integrations.keras.test_loss_reductions import BATCH, BY_WEIGHT, EVERY, RNG, ROWS, X, Y, gradient, squares


def test_sample_weights_in_float64_are_added_in_float64() -> None:
    counts = RNG.random(ROWS) + 0.1
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        model = linear(Accumulate(keras.optimizers.SGD(1.0), EVERY), Plain)
        model.compile(model.optimizer, squares(BY_WEIGHT))
        data = X.astype(np.float64), Y.astype(np.float64)
        callbacks = [FlushAtEpochEnd()]
        model.fit(*data, BATCH, sample_weight=counts, shuffle=False, verbose=0, callbacks=callbacks)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(1 - model.weights[0].numpy()[:, 0], gradient(counts / counts.sum()), rtol=1e-13)
