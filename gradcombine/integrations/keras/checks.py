"""What an accumulating optimizer accepts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras

from gradcombine.errors import GradCombineError

error = partial(GradCombineError, "Accumulate")


def inner_optimizer(given: Any) -> Any:
    """The optimizer to run at the boundary; a name or a config makes a new one."""
    optimizer = keras.optimizers.get(given) if isinstance(given, (str, dict)) else given
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise error("a Keras optimizer, its name or its config", type(given).__name__)
    if any(hasattr(x, "flush") for x in chain(optimizer)):
        raise error("an optimizer that does not accumulate already", f"{type(optimizer).__name__} around another one")
    steps = [getattr(x, "gradient_accumulation_steps", None) for x in chain(optimizer)]
    if any(steps):
        raise error("an inner optimizer without gradient_accumulation_steps", max(filter(None, steps)))
    return optimizer


def chain(optimizer: Any) -> list[Any]:
    """An optimizer, the one that it wraps, and so on."""
    found = []
    while optimizer is not None:
        found.append(optimizer)
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def unscaled(optimizer: Any) -> Any:
    """An optimizer, without the LossScaleOptimizers around it."""
    return next(x for x in chain(optimizer) if not isinstance(x, keras.optimizers.LossScaleOptimizer))


def scales_loss(optimizer: Any) -> bool:
    """Whether there is a LossScaleOptimizer in the chain."""
    return any(isinstance(x, keras.optimizers.LossScaleOptimizer) for x in chain(optimizer))


def one_loss_scale() -> GradCombineError:
    """For a LossScaleOptimizer around an accumulating optimizer that has one inside."""
    return error("one LossScaleOptimizer, around this optimizer or inside", "both")


def require_built_alike(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuses an inner optimizer that trains other variables, or the same in another order."""
    built = [id(x) for x in optimizer._trainable_variables]
    if built != [id(x) for x in variables]:
        raise error("an inner optimizer that is not built, or built with the same variables", "one built with others")


def require_agreed_scale(replicas: int) -> None:
    """Refuses a loss scale that is not decided by all replicas."""
    if replicas > 1:
        expected = "Accumulate(LossScaleOptimizer(...)), which sees the gradients of all replicas"
        raise error(expected, "LossScaleOptimizer(Accumulate(...)), which decides by those of the first one")
