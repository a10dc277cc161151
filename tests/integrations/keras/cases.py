"""An optimizer that exposes its gradients, steps on both backends, and small models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import WeightedTrainStep

ON_JAX = keras.backend.backend() == "jax"

if ON_JAX:
    import jax
else:
    import tensorflow as tf

WITH_SEVERAL = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12, the oldest supported version, has none"
)


@keras.saving.register_keras_serializable("tests")
class Replace(keras.optimizers.Optimizer):
    """Overwrites each variable with its gradient."""

    def __init__(self, learning_rate: float = 1.0, **settings: Any) -> None:
        super().__init__(learning_rate, **settings)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.assign(variable, gradient)


@keras.saving.register_keras_serializable("tests")
class Model(WeightedTrainStep, keras.Model):
    pass


class Plain(keras.Model):
    """A model that passes no weights to the optimizer."""


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "several": {"steps_per_execution": 2},
}
"""Settings of ``compile``."""


class Batches(keras.utils.PyDataset):
    """A dataset of the given batches, which may differ in size."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__()
        self._batches = list(batches)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        return self._batches[index]


def linear(optimizer: Any, model: type = Model, **settings: Any) -> Any:
    """A linear model with two weights of 1 and no bias."""
    x = keras.Input((2,))
    made = model(x, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name="dense")(x))
    made.compile(optimizer, "mse", **settings)
    return made


@contextmanager
def warned_of(sizes: str) -> Iterator[list[Any]]:
    """Collects warnings about microbatches of these sizes, and asserts that there is exactly one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", f".* of {sizes} examples the same weight: .* mean of means", UserWarning)
        yield caught
    assert len(caught) == 1


def tensor(value: Any, dtype: Any = None) -> Any:
    return keras.ops.convert_to_tensor(value, dtype=dtype)


def stepper(optimizer: Any, variables: Sequence[Any], mode: str) -> Callable[..., None]:
    """``step(gradients, weight)`` on NumPy arrays, eager or compiled like Keras' trainer."""
    weighted = hasattr(optimizer, "flush")
    if not optimizer.built:
        optimizer.build(list(variables))

    def plain(gradients: Sequence[Any], weight: Any) -> None:
        optimizer.apply(gradients, list(variables), **({"weight": weight} if weighted else {}))

    def update(state: Any, gradients: Any, weight: Any, trained: Any) -> Any:
        return optimizer.stateless_apply(state, gradients, trained, **({"weight": weight} if weighted else {}))

    def pure(gradients: Sequence[Any], weight: Any) -> None:
        state, trained = [x.value for x in optimizer.variables], [x.value for x in variables]
        weight = np.asarray(weight, np.int32 if isinstance(weight, int) else np.float32)
        trained, state = (update if mode == "eager" else compiled)(state, gradients, weight, trained)
        for variable, value in zip([*variables, *optimizer.variables], [*trained, *state], strict=True):
            variable.assign(value)

    compiled = jax.jit(update) if ON_JAX else tf.function(plain, autograph=False)

    def step(gradients: Sequence[Any], weight: Any = 1.0) -> None:
        given = [None if g is None else tensor(g, v.dtype) for g, v in zip(gradients, variables, strict=True)]
        # On JAX, Keras' own optimizers can only branch in the stateless apply.
        if ON_JAX and (mode != "eager" or not weighted):
            pure(given, weight)
        elif mode == "eager":
            plain(given, weight)
        else:
            compiled(given, tf.constant(weight))  # traced; concrete weights are covered by eager mode

    return step


def bits(variables: Sequence[Any]) -> list[bytes]:
    return [np.asarray(keras.ops.convert_to_numpy(x)).tobytes() for x in variables]


def microbatches(seed: int, count: int) -> list[list[np.ndarray]]:
    """Gradients of a matrix and a vector, of widely varying magnitude."""
    rng = np.random.default_rng(seed)
    return [
        [
            (rng.normal(size=shape) * 10.0 ** rng.integers(-4, 5, size=shape)).astype(np.float32)
            for shape in ((2, 3), (5,))
        ]
        for _ in range(count)
    ]


def matrix_and_vector(dtype: str = "float32") -> list[keras.Variable]:
    shapes = ((2, 3), (5,))
    return [keras.Variable(np.ones(shape, np.float32), dtype=dtype, name=f"w{len(shape)}") for shape in shapes]
