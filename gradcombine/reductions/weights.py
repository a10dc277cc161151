"""Weights of contributions: validation and multiplication."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import owner
from gradcombine.errors import GradCombineError, invalid
from gradcombine.reductions import dtypes
from gradcombine.types import Array, Scalar

EXPECTED = "a finite weight that is not negative"


@dataclass(eq=False, slots=True)
class Weight:
    """A validated weight.

    Attributes:
      known: the value of a Python or NumPy number; None for an array.
      array: the scalar array; None for a Python or NumPy number.
      is_integer: whether its type is an integer.
      zero: whether it is 0: a Python bool, or a boolean scalar for a traced weight.
      invalid: whether a traced weight is negative or not finite, a boolean scalar; None if it cannot be.
    """

    known: int | float | None
    array: Array
    is_integer: bool
    zero: Array | bool
    invalid: Array | None = None
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_integral(self) -> bool:
        """Whether the weight is known to be integral, by its type or its value."""
        return self.is_integer or (self.known is not None and float(self.known).is_integer())

    def cast(self, backend: Backend, dtype: np.dtype) -> Array:
        """Rounds to a float dtype, to infinity above its range; wraps around for an integer dtype."""
        key = backend.name, dtype
        if key not in self._cache:
            if self.known is not None:
                array = backend.full((), rounded(self.known, dtype).item(), dtype)
            else:
                array = backend.cast(self.array, dtype)
                if self.invalid is not None and dtypes.kind(dtype) != "integer":
                    # NaN as a NumPy scalar: jax_debug_nans raises for a new array that is NaN.
                    array = backend.where(self.invalid, dtype.type(np.nan), array)
            self._cache[key] = array
        return self._cache[key]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Computes a value derived from the weight once for all leaves; per leaf, it would be much of a program."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]


def _error(value: Scalar) -> GradCombineError:
    return invalid(EXPECTED, f"{value}: a contribution cannot be subtracted" if value < 0 else value)


def parse(backend: Backend, weight: Scalar) -> Weight:
    """Validates a weight.

    Raises:
      GradCombineError: unless the weight is a scalar, finite and not negative. If it is traced, only its shape and
        dtype are checked: an invalid one acts as NaN, except that it multiplies integer leaves, which have no NaN, as
        it is. The reduction `checked` raises for it at run time.
    """
    if type(weight) is np.ndarray and not weight.dtype.hasobject:
        if weight.shape != ():
            raise invalid("a weight of shape ()", f"one of shape {weight.shape}")
        weight = weight[()]
    # np.timedelta64 is a subclass of NumPy's integers.
    if isinstance(weight, numbers.Real) and not isinstance(weight, np.timedelta64):
        is_integer = isinstance(weight, numbers.Integral)
        known = int(weight) if isinstance(weight, numbers.Integral) else _float(weight)
        if not known >= 0 or known == math.inf:
            raise _error(weight)
        return Weight(known, None, is_integer, known == 0)
    if owner(weight) is None:
        raise invalid(EXPECTED, type(weight).__name__)
    array = backend.asarray(weight)
    shape, dtype = backend.shape(array), np.dtype(backend.dtype(array))
    if shape != ():
        raise invalid("a weight of shape ()", f"one of shape {shape}")
    if dtypes.kind(dtype) not in ("float", "integer"):
        raise invalid(EXPECTED, f"a weight of dtype {dtype}")
    value, is_integer = backend.concrete(array), dtypes.kind(dtype) == "integer"
    if value is not None:
        if not (np.isfinite(value) and value >= 0):
            raise _error(value)
        return Weight(None, array, is_integer, bool(value == 0))
    if is_integer:
        zero = backend.full((), 0, dtype)
        return Weight(None, array, is_integer, array == zero, array < zero if dtype.kind != "u" else None)
    # Compares the bits, as XLA and TensorFlow compare subnormal floats as zeros. 8-bit floats differ in their zeros,
    # signs and infinities, so they are compared as float32.
    wide = dtypes.FLOAT32 if dtype.itemsize == 1 else dtype
    integer = np.dtype(f"i{wide.itemsize}")
    bits = backend.bitcast(backend.cast(array, wide), integer)
    magnitude = bits & np.iinfo(integer).max
    infinity = np.array(np.inf).astype(wide).view(integer).item()
    return Weight(None, array, is_integer, magnitude == 0, (magnitude >= infinity) | ((bits < 0) & (magnitude != 0)))


def _float(x: Scalar) -> float:
    """Converts to float; to infinity above its range."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


@lru_cache(256)
@np.errstate(over="ignore")  # infinite above the range of the dtype
def rounded(known: float, dtype: np.dtype) -> np.generic:
    """A known weight in a dtype, as `Weight.cast` rounds it; cached, as few weights are used for many leaves."""
    if dtypes.kind(dtype) == "integer":
        info = ml_dtypes.iinfo(dtype)
        return dtype.type((int(known) - int(info.min)) % (1 << info.bits) + int(info.min))
    return np.float64(known if isinstance(known, float) else _float(known)).astype(dtype)


def presence(backend: Backend, weight: Scalar) -> Scalar:
    """0 if the weight is 0, else 1: a Python int if it is known, else an int32 scalar."""
    parsed = parse(backend, weight)
    if parsed.known is not None:
        return int(parsed.known != 0)
    one, zero = (backend.full((), value, np.dtype(np.int32)) for value in (1, 0))
    return backend.where(parsed.zero, zero, one)


def weighted(backend: Backend, x: Array, weight: Weight, running: np.dtype) -> Array:
    """``weight * x``, rounded once in at least float32.

    Raises:
      GradCombineError: for an integer leaf and a weight that is not known to be integral.
    """
    return x if weight.known == 1 else scaled(backend, x, factor(backend, weight, running), running)


def factor(backend: Backend, weight: Weight, running: np.dtype) -> Array:
    """The weight as a factor for an accumulator of this dtype; raises as `weighted`."""
    if dtypes.kind(running) == "integer" and not weight.is_integral:
        raise invalid(f"an integer weight for a leaf of {running}", "a float weight")
    return weight.cast(backend, dtypes.part(dtypes.working(running)))


def scaled(backend: Backend, x: Array, factor: Array, running: np.dtype) -> Array:
    """``factor * x``, rounded once in at least float32."""
    return backend.scale(backend.cast(x, dtypes.working(running)), factor)


def _array_dtype(weight: Weight, wide: bool) -> np.dtype:
    """The dtype of the array of a known weight, which is exact for an integer."""
    known = weight.known
    assert known is not None
    if weight.is_integral:
        # Not int64, which JAX disables by default.
        for dtype in (np.dtype(np.int32), np.dtype(np.uint32)):
            if known <= np.iinfo(dtype).max:
                return dtype
    dtype = np.dtype(np.float64 if wide else np.float32)
    if weight.is_integer and rounded(known, dtype).item() != known:
        expected = f"an integer weight below 2**32 or exact in {dtype}, for a contribution that may be skipped"
        raise invalid(expected, known)
    return dtype


def where(backend: Backend, condition: Array, weight: Scalar, wide: bool) -> Array:
    """The weight if the condition holds, else 0; an integer array if the weight is known to be integral.

    Args:
      backend: the backend of the condition.
      condition: a boolean scalar, traced or not.
      weight: as for `parse`.
      wide: whether a known float weight becomes a float64 array instead of float32.

    Raises:
      GradCombineError: as `parse`, and for an integer without an exact array dtype.
    """
    parsed = parse(backend, weight)
    array = parsed.array
    if parsed.known is not None:
        array = parsed.cast(backend, _array_dtype(parsed, wide))
    return backend.where(condition, array, backend.full((), 0, backend.dtype(array)))
