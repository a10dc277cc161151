"""Observes Keras accumulations on TensorFlow from outside.

The gradient that reaches the optimizer is observed with SGD of learning rate 1 instead of the optimizer, on variables
that are zero: they become the exact negative gradient. The optimizer's updates are compared with those of a copy
without accumulation.
"""

# pyright: standard

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from gradcombine import tree
from gradcombine.errors import invalid
from gradcombine.verify.check.leaves import as_numpy
from gradcombine.verify.check.windows import Leaves, Outcome

Wrap = Callable[[Any, int], Any]


class KerasTraining:
    """A TensorFlow loss, a Keras optimizer, and the accumulation around it."""

    def __init__(self, loss: Callable[[Any, Any], Any], inner: Any, wrap: Wrap) -> None:
        if keras.backend.backend() != "tensorflow":
            raise invalid("the TensorFlow backend of Keras", keras.backend.backend())
        self._loss, self._inner, self._wrap = loss, inner, wrap
        self._gradient = tf.function(self._eager_gradient, reduce_retracing=True)

    def gradient(self, params: Any, microbatch: Any) -> list[tf.Tensor | None]:
        return self._gradient(_tensors(params), _tensors(microbatch))

    def start(self, microbatches: int, params: Any, alone: bool) -> KerasRun:
        return KerasRun(lambda inner: self._wrap(inner, microbatches), None if alone else self._inner, params)

    def _eager_gradient(self, params: Any, microbatch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss = self._loss(params, microbatch)
        gradient = tape.gradient(loss, tf.nest.flatten(params))
        return [None if x is None else tf.convert_to_tensor(x) for x in gradient]


class KerasRun:
    """A sequence of updates of the optimizer under test, of SGD in its place, and of a copy without accumulation."""

    def __init__(self, wrap: Callable[[Any], Any], inner: Any | None, params: Any) -> None:
        self._shapes = [as_numpy(x) for x in tree.flatten(params)[0]]
        self._sgd, self._negative_gradient = wrap(keras.optimizers.SGD(1.0)), self._variables(np.zeros_like)
        self._tested, self._params, self._copy, self._copy_params = None, [], None, []
        if inner is not None:
            self._tested, self._params = wrap(_fresh(inner)), self._variables(np.asarray)
            self._copy, self._copy_params = _fresh(inner), self._variables(np.asarray)
            self._copy.build(self._copy_params)
        self._steps_since_call = 0

    def __call__(self, gradient: Leaves, extra: Mapping[str, Any]) -> Outcome:
        del extra  # for optax only
        self._steps_since_call += 1
        tensors = [None if x is None else tf.convert_to_tensor(x) for x in gradient]
        self._sgd.apply(tensors, self._negative_gradient)
        reached: Leaves = [-x.numpy() for x in self._negative_gradient]
        calls = int(any(np.any(x != 0) for x in reached if x is not None))
        for variable in self._negative_gradient:
            variable.assign(tf.zeros_like(variable))
        moved, counted, changed = self._apply(tensors, reached, calls)
        self._steps_since_call = 0 if calls else self._steps_since_call
        return Outcome(moved, counted, reached if calls else None, changed)

    def _apply(self, tensors: list[Any], reached: Leaves, calls: int) -> tuple[bool, int, bool]:
        """Returns whether the parameters move, how much the count grows, and whether the copy moves differently."""
        if self._tested is None or self._copy is None:
            return False, calls, False
        before = [x.numpy() for x in self._params]
        rates = [float(x.learning_rate) if calls else 0.0 for x in (self._tested, self._copy)]
        self._tested.apply(tensors, self._params)
        after = [x.numpy() for x in self._params]
        moved = any(np.any(a != b) for a, b in zip(before, after, strict=True))
        if not calls:
            return moved, 0, False
        self._copy.apply(
            [None if g is None or x is None else tf.convert_to_tensor(x) for g, x in zip(tensors, reached, strict=True)]
        )
        changed = any(np.any(x.numpy() != y) for x, y in zip(self._copy_params, after, strict=True))
        for variable, value in zip(self._copy_params, after, strict=True):
            variable.assign(value)
        # The learning rates differ if the schedule of the tested optimizer counts microbatches.
        same_rate = rates[0] == rates[1]
        return moved, calls if same_rate else self._steps_since_call, changed and same_rate

    def _variables(self, value: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
        return [keras.Variable(value(x), dtype=x.dtype.name, name=f"v{i}") for i, x in enumerate(self._shapes)]


def _fresh(optimizer: Any) -> Any:
    return type(optimizer).from_config(optimizer.get_config())


def _tensors(value: Any) -> Any:
    arrays, structure = tree.flatten(value)
    return tree.unflatten(structure, [tf.convert_to_tensor(x) for x in arrays])
