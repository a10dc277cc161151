# pyright: standard
"""Arguments of an accumulating optimizer: the inner optimizer, the reduction, weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import keras

from gradcombine import reductions
from gradcombine.errors import (
    GradCombineError,
    invalid,
    require_equal,
    require_items,
    require_one_of,
    require_type,
    shown,
    translate_errors,
)
from gradcombine.integrations.keras_optimizers import require_each_once, require_not_accumulating
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import DType, Leaf, Precision, Scalar, Tree
from gradcombine.wires import Wire


def require_jax(method: str) -> None:
    """Raises on other backends than Keras' JAX backend: on TensorFlow the method would not be pure."""
    require_equal(f"Keras' JAX backend, for {method}", "jax", keras.backend.backend())


def require_variables(variables: object) -> list[Any]:
    """Returns a list of the variables; raises for other objects, and for a variable that is listed twice."""
    items = require_items("a list of variables", variables)
    kind = keras.Variable if keras.backend.backend() == "jax" else object  # on TensorFlow also a tf.Variable
    for i, x in enumerate(items):
        has_value = getattr(x, "assign", None) is not None and getattr(x, "trainable", None) is not None
        if not (has_value and isinstance(x, kind)):
            raise invalid("a variable", shown(x), f"[{i}]")
    require_each_once(items)
    return items


ReductionName = Literal["mean", "sum"]


def inner_optimizer(argument: Any) -> Any:
    """Returns the optimizer to wrap, created from a name or a config if necessary."""
    expected = "a Keras optimizer, its name or its config"
    # Keras raises errors of many classes for a bad config.
    with translate_errors(expected, Exception, received=lambda: shown(argument)):
        optimizer = keras.optimizers.get(argument) if isinstance(argument, (str, dict)) else argument
    require_type(expected, optimizer, keras.optimizers.Optimizer)
    require_not_accumulating(optimizer)
    return optimizer


def chain(optimizer: Any) -> list[Any]:
    """Lists an optimizer and its inner optimizers, outermost first."""
    optimizers = []
    while optimizer is not None:
        optimizers.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizers


def scales_loss(optimizer: Any) -> bool:
    """Whether there is a LossScaleOptimizer in the chain."""
    return any(isinstance(x, keras.optimizers.LossScaleOptimizer) for x in chain(optimizer))


def reduction_of(name: ReductionName, precision: Precision, dtype: DType, wire: Wire | None) -> Reduction:
    require_one_of(f"a reduction of {list(get_args(ReductionName))}", name, get_args(ReductionName))
    return (reductions.mean if name == "mean" else reductions.sum)(precision, dtype, wire=wire)


class Parts:
    """Splits gradients into ordinary ones and those that replace their variable's value.

    Keras marks the latter variables ``overwrite_with_gradient``: the scales of float8 layers, combined by maximum.

    Args:
      overwritten: per variable, whether its gradient replaces its value.
      reduction: reduction of ordinary gradients.

    Attributes:
      reduction: reduction of the tree that `split` returns.
    """

    def __init__(self, overwritten: Sequence[bool], reduction: Reduction) -> None:
        self._overwritten = list(overwritten)
        self.reduction = reduction
        if any(self._overwritten):
            self.reduction = reductions.per_leaf((reduction, reductions.max()))

    def split(self, values: Sequence[Leaf]) -> Tree:
        """Returns the tree to reduce: a list of all values, or a list of ordinary and one of replacing values."""
        if not any(self._overwritten):
            return list(values)
        pairs = list(zip(values, self._overwritten, strict=True))
        return [x for x, overwritten in pairs if not overwritten], [x for x, overwritten in pairs if overwritten]

    def join(self, tree: Tree) -> list[Leaf]:
        """Inverse of `split`: the list of values, one per variable."""
        if not any(self._overwritten):
            return list(tree)
        ordinary, replacing = map(iter, tree)
        return [next(replacing) if overwritten else next(ordinary) for overwritten in self._overwritten]

    def ordinary_index(self, position: int) -> int:
        """Index of the variable at a position among those with ordinary gradients."""
        return [i for i, overwritten in enumerate(self._overwritten) if not overwritten][position]


@dataclass
class _Weight:
    """A weight that is set by a with statement, or None.

    Attributes:
      is_traced: whether it was set inside of a compiled function.
      is_used: whether a microbatch was applied meanwhile.
    """

    value: Scalar
    is_traced: bool
    is_used: bool = False


class Weights(threading.local):
    """Weight of the microbatches that a thread applies: tf.distribute runs each replica in a thread."""

    def __init__(self, is_tracing: Callable[[], bool]) -> None:
        self._is_tracing, self._current = is_tracing, _Weight(None, is_traced=True)

    def take(self, weight: Scalar) -> Scalar:
        """Returns the weight of a microbatch, or None: the argument, or that of the with statement."""
        self._current.is_used = True
        if weight is not None or self._current.value is None:
            return weight
        if self._is_tracing() and not self._current.is_traced:
            expected = "weighted inside of the compiled function that applies the gradients, such as train_step"
            raise invalid(expected, "a weight from outside, of which the function would keep the first value")
        return self._current.value

    @contextmanager
    def set_to(self, weight: Scalar) -> Iterator[None]:
        """Sets this thread's weight inside a with statement; raises if no microbatch gets it."""
        before, self._current = self._current, _Weight(weight, self._is_tracing())
        try:
            yield
            if not (self._current.is_used or self._current.is_traced):
                expected = "a microbatch applied inside of weighted, by this thread, and not by a compiled function"
                raise GradCombineError("Accumulate", expected, "none")
        finally:
            before.is_used, self._current = True, before
