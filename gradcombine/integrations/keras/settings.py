# pyright: standard
"""The arguments of an accumulating optimizer: an inner optimizer, a reduction, weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import keras

from gradcombine import reductions
from gradcombine.errors import (
    invalid,
    require_equal,
    require_items,
    require_one_of,
    require_type,
    shown,
    translate_errors,
    within,
)
from gradcombine.integrations.keras_optimizers import with_inner
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import Array, DType, Leaf, Precision, Scalar, Tree
from gradcombine.wires import Wire


def require_jax(method: str) -> None:
    """Refuses a method that is pure on Keras' JAX backend alone: TensorFlow's variables are written all the same."""
    require_equal(f"Keras' JAX backend, for {method}", "jax", keras.backend.backend())


def require_variables(variables: object) -> list[Any]:
    """The variables, as a list; refuses what is none."""
    found = require_items("a list of variables", variables)
    for i, x in enumerate(found):
        known = getattr(x, "assign", None) is not None and getattr(x, "trainable", None) is not None
        with within(f"[{i}]"):
            if not known:
                raise invalid("a variable", shown(x))
    return found


Name = Literal["mean", "sum"]


def inner_optimizer(argument: Any) -> Any:
    """The optimizer to run at the boundary; a name or a config makes a new one."""
    expected = "a Keras optimizer, its name or its config"
    with translate_errors(
        expected, Exception, received=lambda: shown(argument)
    ):  # Keras has a class of error for each part of a config
        optimizer = keras.optimizers.get(argument) if isinstance(argument, (str, dict)) else argument
    require_type(expected, optimizer, keras.optimizers.Optimizer)
    accumulates = any(hasattr(x, "flush") for x in with_inner(optimizer))
    steps = max(getattr(x, "gradient_accumulation_steps", None) or 0 for x in with_inner(optimizer))
    if accumulates:
        raise invalid("an optimizer that does not accumulate already", f"{type(optimizer).__name__} around another one")
    if steps:
        raise invalid("an inner optimizer without gradient_accumulation_steps", steps)
    return optimizer


def chain(optimizer: Any) -> list[Any]:
    """An optimizer, the one that it wraps, and so on."""
    optimizers = []
    while optimizer is not None:
        optimizers.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizers


def unscaled(optimizer: Any) -> Any:
    """An optimizer, without the LossScaleOptimizers around it."""
    return next(x for x in chain(optimizer) if not isinstance(x, keras.optimizers.LossScaleOptimizer))


def scales_loss(optimizer: Any) -> bool:
    """Whether there is a LossScaleOptimizer in the chain."""
    return any(isinstance(x, keras.optimizers.LossScaleOptimizer) for x in chain(optimizer))


ONE_LOSS_SCALE = "one LossScaleOptimizer, around this optimizer or inside"
"""Expected of a LossScaleOptimizer around an accumulating optimizer that has one inside."""


def require_built_alike(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an inner optimizer that trains other variables, or the same in another order."""
    built = [id(x) for x in optimizer._trainable_variables]
    others = built != [id(x) for x in variables]
    if others:
        raise invalid("an inner optimizer that is not built, or built with the same variables", "one built with others")


def require_agreed_scale(replicas: int) -> None:
    """Refuses a loss scale that is not decided by all replicas."""
    expected = "Accumulate(LossScaleOptimizer(...)), which sees the gradients of all replicas"
    received = "LossScaleOptimizer(Accumulate(...)), which decides by those of the first one"
    if replicas > 1:
        raise invalid(expected, received)


def reduction_of(name: Name, precision: Precision, dtype: DType, wire: Wire | None) -> Reduction:
    """The reduction of ordinary gradients."""
    require_one_of(f"a reduction of {list(get_args(Name))}", name, get_args(Name))
    return (reductions.mean if name == "mean" else reductions.sum)(precision, dtype, wire=wire)


class Parts:
    """Gradients that are averaged, and values that take their variable's place, by the variables.

    Keras calls the latter ``overwrite_with_gradient``: the scales of float8 layers, of which a window has the maximum.

    Args:
      overwritten: for each variable, whether it is one of these.
      reduction: of all others.
    """

    def __init__(self, overwritten: Sequence[bool], reduction: Reduction) -> None:
        self._overwritten = list(overwritten)
        self.reduction = reduction
        if any(self._overwritten):
            self.reduction = reductions.per_leaf((reduction, reductions.max()))

    def split(self, values: Sequence[Leaf]) -> Tree:
        """The tree that the reduction takes."""
        if not any(self._overwritten):
            return list(values)
        pairs = list(zip(values, self._overwritten, strict=True))
        return [x for x, chosen in pairs if not chosen], [x for x, chosen in pairs if chosen]

    def join(self, tree: Tree) -> list[Leaf]:
        """The values again, one per variable."""
        if not any(self._overwritten):
            return list(tree)
        others, chosen = map(iter, tree)
        return [next(chosen) if overwritten else next(others) for overwritten in self._overwritten]

    def averaged(self, position: int) -> int:
        """The variable of a position among the others."""
        return [i for i, overwritten in enumerate(self._overwritten) if not overwritten][position]


class Weights:
    """The weight of the microbatch that a thread computes: tf.distribute runs each replica in its own thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Any] = {}

    @contextmanager
    def set_to(self, weight: Scalar) -> Iterator[None]:
        """Sets this thread's weight inside of a with statement."""
        thread = threading.get_ident()
        before = self._by_thread.get(thread)
        self._by_thread[thread] = weight
        try:
            yield
        finally:
            if before is None:
                del self._by_thread[thread]
            else:
                self._by_thread[thread] = before

    def current(self) -> Array:
        """This thread's weight; None where none is set."""
        return self._by_thread.get(threading.get_ident())
