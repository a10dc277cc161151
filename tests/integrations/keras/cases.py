"""An optimizer that exposes its gradients, steps on both backends, and small models."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from gradcombine.integrations.keras import WeightedTrainStep

ON_JAX = keras.backend.backend() == "jax"

if ON_JAX:
    import jax
else:
    import tensorflow as tf


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
        extra = {"weight": weight} if weighted else {}
        optimizer.apply(gradients, list(variables), **extra)

    def step(gradients: Sequence[Any], weight: Any = None) -> None:
        given = [None if g is None else tensor(g, v.dtype) for g, v in zip(gradients, variables, strict=True)]
        # The weight is traced if compiled; concrete weights are covered by eager mode.
        run(given, 1.0 if weight is None else weight)

    if mode == "eager" and ON_JAX and not weighted:
        # On JAX, Keras can only branch in the stateless apply.
        run = _pure(optimizer, variables, weighted, jit=False)
    elif mode == "eager":
        run = plain
    elif ON_JAX:
        run = _pure(optimizer, variables, weighted)
    else:
        function = tf.function(plain, autograph=False)

        def run(gradients: Sequence[Any], weight: Any) -> None:
            function(gradients, tf.constant(weight))

    return step


def _pure(optimizer: Any, variables: Sequence[Any], weighted: bool, jit: bool = True) -> Callable[..., None]:
    def update(state: Any, gradients: Any, weight: Any, trained: Any) -> Any:
        extra = {"weight": weight} if weighted else {}
        return optimizer.stateless_apply(state, gradients, trained, **extra)

    call = jax.jit(update) if jit else update

    def run(gradients: Sequence[Any], weight: Any) -> None:
        state, trained = [x.value for x in optimizer.variables], [x.value for x in variables]
        trained, state = call(
            state, list(gradients), np.asarray(weight, np.int32 if isinstance(weight, int) else np.float32), trained
        )
        for variable, value in zip([*variables, *optimizer.variables], [*trained, *state], strict=True):
            variable.assign(value)

    return run


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
