"""Keras on TensorFlow, observed from outside.

What reaches the optimizer is seen through plain gradient descent of rate 1 in its place, on variables that are zero:
they become the negative gradient, to the bit. What the optimizer itself makes of it is held against a copy without
accumulation.
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
from gradcombine.verify.check.windows import Leaves, Outcome

Wrap = Callable[[Any, int], Any]


class KerasTraining:
    """A loss in TensorFlow, a Keras optimizer, and the accumulation around it."""

    def __init__(self, loss: Callable[[Any, Any], Any], inner: Any, wrap: Wrap) -> None:
        if keras.backend.backend() != "tensorflow":
            raise invalid("the TensorFlow backend of Keras", keras.backend.backend())
        self._loss, self._inner, self._wrap = loss, inner, wrap
        self._gradient = tf.function(self._differentiated, reduce_retracing=True)

    def gradient(self, params: Any, microbatch: Any) -> list[tf.Tensor | None]:
        return self._gradient(_tensors(params), _tensors(microbatch))

    def start(self, microbatches: int, params: Any, alone: bool) -> KerasRun:
        return KerasRun(lambda inner: self._wrap(inner, microbatches), None if alone else self._inner, params)

    def _differentiated(self, params: Any, microbatch: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            loss = self._loss(params, microbatch)
        gradient = tape.gradient(loss, tf.nest.flatten(params))
        return [None if x is None else tf.convert_to_tensor(x) for x in gradient]


class KerasRun:
    """One training, with the optimizer under test, the plain one and the copy side by side."""

    def __init__(self, wrap: Callable[[Any], Any], inner: Any | None, params: Any) -> None:
        self._shapes = [np.asarray(x) for x in tree.flatten(params)[0]]
        self._plain, self._arrived = wrap(keras.optimizers.SGD(1.0)), self._variables(np.zeros_like)
        self._real, self._values, self._copy, self._copied = None, [], None, []
        if inner is not None:
            self._real, self._values = wrap(_fresh(inner)), self._variables(np.asarray)
            self._copy, self._copied = _fresh(inner), self._variables(np.asarray)
            self._copy.build(self._copied)
        self._since = 0

    def step(self, gradient: Leaves, extra: Mapping[str, Any]) -> Outcome:
        del extra  # Keras takes none
        self._since += 1
        tensors = [None if x is None else tf.convert_to_tensor(x) for x in gradient]
        self._plain.apply(tensors, self._arrived)
        reached: Leaves = [-x.numpy() for x in self._arrived]
        calls = int(any(np.any(x != 0) for x in reached if x is not None))
        for variable in self._arrived:
            variable.assign(tf.zeros_like(variable))
        moved, counted, changed = False, calls, False
        if self._real is not None:
            moved, counted, changed = self._trained(tensors, reached, calls)
        self._since = 0 if calls else self._since
        return Outcome(moved, counted, reached if calls else None, changed)

    def _trained(self, tensors: list[Any], reached: Leaves, calls: int) -> tuple[bool, int, bool]:
        """Whether the parameters move, by how much the schedule's count grows, whether they move as the copy's do."""
        assert self._real is not None and self._copy is not None
        before = [x.numpy() for x in self._values]
        rates = [float(x.learning_rate) if calls else 0.0 for x in (self._real, self._copy)]
        self._real.apply(tensors, self._values)
        after = [x.numpy() for x in self._values]
        moved = any(np.any(a != b) for a, b in zip(before, after, strict=True))
        if not calls:
            return moved, 0, False
        self._copy.apply(
            [None if g is None or x is None else tf.convert_to_tensor(x) for g, x in zip(tensors, reached, strict=True)]
        )
        changed = any(np.any(x.numpy() != y) for x, y in zip(self._copied, after, strict=True))
        for variable, value in zip(self._copied, after, strict=True):
            variable.assign(value)
        slow = rates[0] == rates[1]
        return moved, calls if slow else self._since, changed and slow

    def _variables(self, value: Callable[[np.ndarray], np.ndarray]) -> list[Any]:
        return [keras.Variable(value(x), dtype=x.dtype.name, name=f"v{i}") for i, x in enumerate(self._shapes)]


def _fresh(optimizer: Any) -> Any:
    """An optimizer of the same settings, at its beginning."""
    return type(optimizer).from_config(optimizer.get_config())


def _tensors(value: Any) -> Any:
    arrays, structure = tree.flatten(value)
    return tree.unflatten(structure, [tf.convert_to_tensor(x) for x in arrays])
