"""Keras' own data and model parallelism on JAX: the window lies where its parameters lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import bits

X = np.arange(16, dtype=np.float32).reshape(8, 2)
Y = np.ones((8, 1), np.float32)


def data_parallel() -> Any:
    return keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:4])


def model_parallel() -> Any:
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], keras.distribution.list_devices()[:4])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["wide/kernel"] = (None, "model")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


@pytest.fixture
def undistributed() -> Iterator[None]:
    yield
    keras.distribution.set_distribution(None)


def fitted(optimizer: Any, batch_size: int) -> Any:
    x = keras.Input((2,))
    wide = keras.layers.Dense(4, kernel_initializer="ones", name="wide")(x)
    model = keras.Model(x, keras.layers.Dense(1, kernel_initializer="ones", name="narrow")(wide))
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0)
    return model


@pytest.mark.usefixtures("undistributed")
@pytest.mark.parametrize(("make", "spec"), [(data_parallel, (None, None)), (model_parallel, (None, "model"))])
def test_it_trains_as_one_batch_on_one_device(make: Any, spec: tuple[Any, ...]) -> None:
    alone = fitted(keras.optimizers.SGD(2.0**-9), 8)
    keras.distribution.set_distribution(make())
    model = fitted(Accumulate(keras.optimizers.SGD(2.0**-9), 2), 4)
    assert bits(model.weights) == bits(alone.weights)
    (window,) = (x for x in model.optimizer.variables if "wide_kernel_window" in x.path)
    assert tuple(window.value.sharding.spec) == spec
