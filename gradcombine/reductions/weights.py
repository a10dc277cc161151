"""What the weight of a contribution may be, and what it does."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import owner
from gradcombine.errors import GradCombineError, renamed
from gradcombine.reductions import dtypes
from gradcombine.types import Array

EXPECTED = "a finite weight that is not negative"


class Weight(NamedTuple):
    """A validated weight.

    Attributes:
      known: its value, where that is known while tracing.
      array: the scalar array, where it is not.
      whole: whether its type is an integer one, known or not.
    """

    known: float | None
    array: Array
    whole: bool

    @property
    def is_one(self) -> bool:
        return self.known == 1

    def is_zero(self, backend: Backend) -> Array | bool:
        """A Python bool where the weight is known, else a boolean scalar."""
        if self.known is not None:
            return self.known == 0
        return self.array == backend.full((), 0, backend.dtype(self.array))

    @property
    def is_integral(self) -> bool:
        """Whether the weight is a whole number for certain: by its type, or where it is known by its value."""
        return self.whole or (self.known is not None and self.known.is_integer())

    def cast(self, backend: Backend, dtype: np.dtype) -> Array:
        if self.known is not None:
            return backend.full((), self.known, dtype)
        return backend.cast(self.array, dtype)


def parse(operation: str, backend: Backend, weight: Any) -> Weight:
    """Validates a weight as far as it is known.

    Raises:
      GradCombineError: for what is not one number, and for a known weight that is negative, NaN or infinite. Of a
        traced weight only shape and dtype are known: there NaN makes a mean NaN and a negative weight counts
        negatively. The reduction `checked` refuses both at run time.
    """
    # NumPy's durations count as integers by their class.
    if isinstance(weight, numbers.Real) and not isinstance(weight, np.timedelta64):
        known = float(weight)
        if not math.isfinite(known) or known < 0:
            raise GradCombineError(operation, EXPECTED, weight)
        return Weight(known, None, isinstance(weight, numbers.Integral))
    if owner(weight) is None:
        raise GradCombineError(operation, EXPECTED, type(weight).__name__)
    with renamed(operation):
        array = backend.asarray(weight)
        shape, dtype = backend.shape(array), np.dtype(backend.dtype(array))
    if shape != ():
        raise GradCombineError(operation, "a weight of shape ()", f"one of shape {shape}")
    if dtypes.kind(dtype) not in ("float", "integer"):
        raise GradCombineError(operation, EXPECTED, f"a weight of dtype {dtype}")
    value = backend.concrete(array)
    if value is not None and not (np.isfinite(value) and value >= 0):
        raise GradCombineError(operation, EXPECTED, value)
    return Weight(None, array, dtype.kind in "iu")


def presence(operation: str, backend: Backend, weight: Any) -> Any:
    """1 for a contribution that counts, 0 for one of weight 0."""
    parsed = parse(operation, backend, weight)
    if parsed.known is not None:
        return int(parsed.known != 0)
    one, zero = (backend.full((), value, np.dtype(np.int32)) for value in (1, 0))
    return backend.where(parsed.is_zero(backend), zero, one)
