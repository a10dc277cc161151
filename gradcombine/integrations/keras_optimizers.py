# pyright: standard
"""Nested Keras optimizers, and their slots of a variable; imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gradcombine.backends.registry import resolve
from gradcombine.errors import invalid
from gradcombine.types import Array, Scalar, Tree

_AVERAGES = "_model_variables_moving_average"


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yields an optimizer and all optimizers inside it: of a MultiOptimizer, or of a LossScaleOptimizer."""
    yield optimizer
    for nested in _nested(optimizer):
        yield from with_inner(nested)


def _nested(optimizer: Any) -> list[Any]:
    inner = getattr(optimizer, "inner_optimizer", None)
    return [*([] if inner is None else [inner]), *(getattr(optimizer, "optimizers", None) or ())]


def require_each_once(variables: Sequence[Any]) -> None:
    """Raises for a variable that is listed twice."""
    positions: dict[int, int] = {}
    for i, x in enumerate(variables):
        if (first := positions.setdefault(id(x), i)) != i:
            raise invalid("each variable once", f"that of [{first}] again", f"[{i}]")


def require_built_with(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raises for a variable that a built optimizer, or all optimizers inside it, were not built with."""
    groups = [optimizer], [one for one in with_inner(optimizer) if not _nested(one)]
    for i, x in enumerate(variables):
        for group in groups:
            if not any(one._var_key(x) in one._trainable_variables_indices for one in group):
                expected = "an optimizer that is not built, or built with this variable"
                raise invalid(expected, "one built with others", f"[{i}]")


def require_not_accumulating(optimizer: Any) -> None:
    """Raises for an optimizer that accumulates gradients, or contains one that does."""
    if any(hasattr(x, "flush") for x in with_inner(optimizer)):
        raise invalid("an optimizer that does not accumulate already", type(optimizer).__name__)
    if steps := max(getattr(x, "gradient_accumulation_steps", None) or 0 for x in with_inner(optimizer)):
        raise invalid("an optimizer without gradient_accumulation_steps", steps)


def require_unscaled(optimizer: Any) -> None:
    """Raises for an optimizer that divides gradients by a loss scale, or contains one that does."""
    for one in with_inner(optimizer):
        if getattr(one, "loss_scale_factor", None) is not None or hasattr(one, "dynamic_growth_steps"):
            received = f"{type(optimizer).__name__}, which divides by a loss scale"
            raise invalid("an optimizer without a loss scale, as differences of parameters have none", received)


def has_several(optimizer: Any) -> bool:
    """Whether an optimizer is or contains a MultiOptimizer."""
    return any(getattr(x, "optimizers", None) is not None for x in with_inner(optimizer))


def without_update(optimizer: Any, target: Any, read: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yields a variable and its slots, each with its value after an update with gradients of other variables only.

    After an update that a LossScaleOptimizer skips, none has changed. ``read`` returns the value of a variable of the
    built optimizer before the update.
    """
    value = after = read(target)
    for one in with_inner(optimizer):
        for name, slot in _slots(one, target):
            kept = read(slot)
            if name == _AVERAGES:
                # Keras updates the moving averages of all variables, even of those without a gradient in this step, and
                # overwrites all variables by them.
                iterations = read(one.iterations)
                kept = _averaged(kept, value, one.ema_momentum, iterations)
                if one.ema_overwrite_frequency:
                    after = _overwritten(value, kept, (iterations + 1) % one.ema_overwrite_frequency == 0)
            yield slot, kept
    yield target, after


def _slots(optimizer: Any, target: Any) -> Iterator[tuple[str, Any]]:
    """The optimizer's slots of a variable, each with the name of the attribute that lists them."""
    indices, key = getattr(optimizer, "_trainable_variables_indices", None), getattr(optimizer, "_var_key", None)
    if indices is None or key is None or key(target) not in indices:
        return
    index = indices[key(target)]
    for name, values in vars(optimizer).items():
        if isinstance(values, (list, tuple)) and len(values) == len(indices) and name != "_trainable_variables":
            slot = values[index]
            # A MultiOptimizer lists its optimizers, which have a method assign.
            if hasattr(slot, "assign") and hasattr(slot, "shape") and name != "_variables":
                yield name, slot


def _averaged(average: Array, value: Tree, momentum: float, iterations: Scalar) -> Array:
    """Keras' moving average of a variable after a step; the first step sets it to the variable."""
    backend = resolve([average])
    dtype = backend.dtype(average)
    zero = backend.full((), 0, dtype)
    kept = backend.where(iterations == 0, zero, backend.full((), momentum, dtype))
    return kept * average + (1 - kept) * backend.cast(value, dtype)


def _overwritten(value: Array, average: Array, condition: Scalar) -> Array:
    """The average, in the dtype of the value, if the condition holds, else the value."""
    backend = resolve([value])
    return backend.where(condition, backend.cast(average, backend.dtype(value)), value)
