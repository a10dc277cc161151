"""Weights of contributions: validation, presence, and multiplication."""

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
      known: its value, where it is a Python or NumPy number.
      array: the scalar array, where it is not.
      whole: whether its type is an integer one, known or not.
      zero: whether it is 0: a Python bool where that is known, else a boolean scalar.
      refused: of a traced weight, whether it would have been refused; None where it was not, or cannot be.
    """

    known: int | float | None
    array: Array
    whole: bool
    zero: Array | bool
    refused: Array | None = None
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_integral(self) -> bool:
        """Whether the weight is certainly a whole number: by its type, or by its value where that is known."""
        return self.whole or (self.known is not None and float(self.known).is_integer())

    def cast(self, backend: Backend, dtype: np.dtype) -> Array:
        """Rounded to a float dtype, infinite above its range; modulo the width of an integer dtype."""
        key = backend.name, dtype
        if key not in self._made:
            if self.known is not None:
                array = backend.full((), rounded(self.known, dtype).item(), dtype)
            else:
                array = backend.cast(self.array, dtype)
                if self.refused is not None and dtypes.kind(dtype) != "integer":
                    # No array: JAX looks for NaN where one is made, if it is asked to.
                    array = backend.where(self.refused, dtype.type(np.nan), array)
            self._made[key] = array
        return self._made[key]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A value derived from the weight, once for all leaves: else it would be a good part of a traced program."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _refused(value: Scalar) -> GradCombineError:
    return invalid(EXPECTED, f"{value}: no contribution can be taken back" if value < 0 else value)


def parse(backend: Backend, weight: Scalar) -> Weight:
    """Validates a weight as far as it is known.

    Raises:
      GradCombineError: for what is not one number, and for a known weight that is negative, NaN or infinite. Of a
        traced weight only shape and dtype are known: there each of them counts as NaN; but integer leaves, which
        cannot be NaN, are multiplied by a negative integer. The reduction `checked` refuses them at run time.
    """
    # NumPy's durations count as integers by their class.
    if isinstance(weight, numbers.Real) and not isinstance(weight, np.timedelta64):
        whole = isinstance(weight, numbers.Integral)
        known = int(weight) if isinstance(weight, numbers.Integral) else _float(weight)
        if not known >= 0 or known == math.inf:
            raise _refused(weight)
        return Weight(known, None, whole, known == 0)
    if owner(weight) is None:
        raise invalid(EXPECTED, type(weight).__name__)
    array = backend.asarray(weight)
    shape, dtype = backend.shape(array), np.dtype(backend.dtype(array))
    if shape != ():
        raise invalid("a weight of shape ()", f"one of shape {shape}")
    if dtypes.kind(dtype) not in ("float", "integer"):
        raise invalid(EXPECTED, f"a weight of dtype {dtype}")
    value, whole = backend.concrete(array), dtypes.kind(dtype) == "integer"
    if value is not None:
        if not (np.isfinite(value) and value >= 0):
            raise _refused(value)
        return Weight(None, array, whole, bool(value == 0))
    if whole:
        zero = backend.full((), 0, dtype)
        return Weight(None, array, whole, array == zero, array < zero if dtype.kind != "u" else None)
    # By its bits, as XLA and TensorFlow take subnormal floats for zeros. Floats of a byte have zeros, signs and
    # infinities of several kinds or none; float32 holds them.
    wide = dtypes.FLOAT32 if dtype.itemsize == 1 else dtype
    integer = np.dtype(f"i{wide.itemsize}")
    bits = backend.bitcast(backend.cast(array, wide), integer)
    magnitude = bits & np.iinfo(integer).max
    infinity = np.array(np.inf).astype(wide).view(integer).item()
    return Weight(None, array, whole, magnitude == 0, (magnitude >= infinity) | ((bits < 0) & (magnitude != 0)))


def _float(x: Scalar) -> float:
    """Infinite above the range of Python's floats."""
    try:
        return float(x)
    except OverflowError:
        return math.inf


@lru_cache(256)
@np.errstate(over="ignore")  # infinite above the range of the dtype
def rounded(known: float, dtype: np.dtype) -> np.generic:
    """A known weight in a dtype, as `Weight.cast` rounds it; most are few numbers, for each leaf and step."""
    if dtypes.kind(dtype) == "integer":
        info = ml_dtypes.iinfo(dtype)
        return dtype.type((int(known) - int(info.min)) % (1 << info.bits) + int(info.min))
    return np.float64(known if isinstance(known, float) else _float(known)).astype(dtype)


def presence(backend: Backend, weight: Scalar) -> Scalar:
    """1 for a contribution that counts, 0 for one of weight 0."""
    parsed = parse(backend, weight)
    if parsed.known is not None:
        return int(parsed.known != 0)
    one, zero = (backend.full((), value, np.dtype(np.int32)) for value in (1, 0))
    return backend.where(parsed.zero, zero, one)


def weighted(backend: Backend, x: Array, weight: Weight, running: np.dtype) -> Array:
    """``weight * x``, rounded once in at least float32.

    Raises:
      GradCombineError: for an integer leaf and a weight that is not known to be a whole number.
    """
    return x if weight.known == 1 else scaled(backend, x, factor(backend, weight, running), running)


def factor(backend: Backend, weight: Weight, running: np.dtype) -> Array:
    """The factor of contributions to an accumulator of this dtype.

    Raises:
      GradCombineError: as `weighted`.
    """
    if dtypes.kind(running) == "integer" and not weight.is_integral:
        raise invalid(f"an integer weight for a leaf of {running}", "another one")
    return weight.cast(backend, dtypes.part(dtypes.working(running)))


def scaled(backend: Backend, x: Array, factor: Array, running: np.dtype) -> Array:
    """``factor * x``, rounded once in at least float32."""
    return backend.scale(backend.cast(x, dtypes.working(running)), factor)


def _holding(weight: Weight, wide: bool) -> np.dtype:
    """The dtype in which a known weight becomes an array; an integer one keeps its value."""
    known = weight.known
    assert known is not None
    if weight.is_integral:
        # No integers of 64 bits: JAX has none by default.
        for dtype in (np.dtype(np.int32), np.dtype(np.uint32)):
            if known <= np.iinfo(dtype).max:
                return dtype
    dtype = np.dtype(np.float64 if wide else np.float32)
    if weight.whole and rounded(known, dtype).item() != known:
        expected = f"an integer weight below 2**32, or one that {dtype} holds, where a contribution may be left out"
        raise invalid(expected, known)
    return dtype


def where(backend: Backend, condition: Array, weight: Scalar, wide: bool) -> Array:
    """The weight where the boolean scalar holds, else 0; of an integer type if it is certainly a whole number.

    Args:
      backend: of the condition.
      condition: known or traced.
      weight: any that `parse` takes.
      wide: whether a float that is known becomes one of 64 bits.

    Raises:
      GradCombineError: as `parse`, and for an integer that no array holds.
    """
    parsed = parse(backend, weight)
    array = parsed.array
    if parsed.known is not None:
        array = parsed.cast(backend, _holding(parsed, wide))
    return backend.where(condition, array, backend.full((), 0, backend.dtype(array)))
