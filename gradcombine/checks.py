"""What is asked of an argument, each check once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from gradcombine.backends.registry import owner
from gradcombine.errors import GradCombineError, shown
from gradcombine.types import Order

MOST = np.iinfo(np.int32).max


def require_integer(operation: str, expected: str, value: Any, lowest: int = 1, highest: int = MOST) -> int:
    """The integer that a value is, of any integer type and framework; refuses a bool and what is out of range."""
    try:
        if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise GradCombineError(operation, expected, shown(value)) from None
    if not lowest <= number <= highest:
        raise GradCombineError(operation, expected, shown(number))
    return number


def require_scalar(operation: str, expected: str, leaf: Any, kinds: str, path: str = "") -> None:
    """Refuses what is not a scalar array or number of one of these NumPy kinds of dtype."""
    backend = owner(leaf)
    if backend is None:
        raise GradCombineError(operation, expected, shown(leaf), path)
    shape, dtype = backend.shape(leaf), np.dtype(backend.dtype(leaf))
    if shape != () or dtype.kind not in kinds:
        raise GradCombineError(operation, expected, f"shape {shape} and dtype {dtype}", path)


def require_one_of(operation: str, expected: str, value: Any, choices: Sequence[str]) -> None:
    """Refuses what is not one of some names."""
    if not isinstance(value, str) or value not in choices:
        raise GradCombineError(operation, expected, shown(value))


def require_order(operation: str, order: Any) -> None:
    """Refuses what is not an order of combination."""
    require_one_of(operation, "order 'sequential' or 'tree'", order, get_args(Order))


def require_collective(
    operation: str, over: Any, expected: str = "a collective: LOCAL, jax_axis(name) or tf_replicas()"
) -> None:
    """Refuses what is not a collective."""
    if isinstance(over, type) or not hasattr(over, "all_gather"):
        raise GradCombineError(operation, expected, shown(over))
