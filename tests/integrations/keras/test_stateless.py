"""Keras on JAX: the optimizer as pure functions, and Keras' data and model parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import gradcombine as gc
from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import Replace, bits, matrix_and_vector, microbatches


def built(every: int) -> tuple[Any, list[Any], list[Any]]:
    variables, optimizer = matrix_and_vector(), Accumulate(Replace(), every)
    optimizer.build(variables)
    return optimizer, [x.value for x in variables], [x.value for x in optimizer.variables]


def test_a_scan_over_microbatches() -> None:
    optimizer, trained, state = built(3)
    given, weights = microbatches(0, 6), np.float32([1, 2, 3, 4, 5, 6])

    def body(carry: Any, microbatch: Any) -> Any:
        gradients, weight = microbatch
        trained, state = optimizer.stateless_apply(carry[1], gradients, carry[0], weight)
        return (trained, state), trained

    stacked = [jnp.stack(leaves) for leaves in zip(*given, strict=True)]
    _, history = jax.jit(lambda *carry: jax.lax.scan(body, carry, (stacked, weights)))(trained, state)
    for first, last in ((0, 2), (3, 5)):
        expected = gc.mean(given[first : last + 1], weights[first : last + 1])
        assert [np.asarray(x[last]).tobytes() for x in history] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("compile_", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_flush(compile_: Any) -> None:
    optimizer, trained, state = built(3)
    given = microbatches(1, 2)
    apply, flush = compile_(optimizer.stateless_apply), compile_(optimizer.stateless_flush)
    for gradients, weight in zip(given, np.float32([1, 3]), strict=True):
        trained, state = apply(state, gradients, trained, weight)
    trained, state = flush(state, trained)
    assert [np.asarray(x).tobytes() for x in trained] == [x.tobytes() for x in gc.mean(given, [1, 3])]
    again, _ = flush(state, [x + 1 for x in trained])
    assert [np.asarray(x).tobytes() for x in again] == [np.asarray(x + 1).tobytes() for x in trained]


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_parameters_window_and_state_are_updated_in_place(make: Any) -> None:
    """With arguments donated in the order of the results, as in fit, only one mean per variable may be temporary."""
    variables = [keras.Variable(np.zeros(4096, np.float32)) for _ in range(3)]
    optimizer = Accumulate(make(0.5), 2)
    optimizer.build(variables)
    state, trained = [x.value for x in optimizer.variables], [x.value for x in variables]

    def step(trained: Any, state: Any, gradients: Any) -> Any:
        return optimizer.stateless_apply(state, gradients, trained)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(trained, state, trained).compile()
    memory = compiled.memory_analysis()
    size = sum(x.nbytes for x in (*trained, *state) if x.size > 1)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < 4 * 4096 * 4
    assert "f32[4096]{0} copy(" not in compiled.as_text()


def test_accumulators_that_jax_has_not_are_refused() -> None:
    with (
        pytest.warns(UserWarning, match="float64"),
        pytest.raises(GradCombineError, match="accumulators of float64, for which JAX needs jax_enable_x64"),
    ):
        Accumulate(Replace(), 2, dtype="float64").build(matrix_and_vector())


def test_what_it_cannot_train_is_refused() -> None:
    optimizer = Accumulate(keras.optimizers.SGD(1.0), 2)
    with pytest.raises(GradCombineError, match="Accumulate: expected an optimizer that is built"):
        optimizer.stateless_apply([], [], [])
    mutable = SimpleNamespace(assign=None, trainable=True)
    for foreign in (mutable, SimpleNamespace(assign=mutable, trainable=True)):
        with pytest.raises(GradCombineError, match=r"Accumulate: leaf \[0\]: expected a variable, received namespace"):
            optimizer.build([foreign])


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
