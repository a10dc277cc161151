"""The rules for dtypes.

There are three independent settings: the *accumulator* dtype of the running value, the *wire* dtype in which replicas
exchange it, and the *output* dtype of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import ml_dtypes
import numpy as np

from gradcombine.errors import invalid, shown
from gradcombine.types import DType

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
NUMERIC = ("float", "complex", "integer")
KINDS = (*NUMERIC, "bool")


@cache
def kind(dtype: np.dtype) -> str:
    """``"float"``, ``"complex"`` or ``"integer"``, also for ml_dtypes; the name of any other dtype."""
    for name, numpy_kinds, info in (("float", "f", ml_dtypes.finfo), ("integer", "iu", ml_dtypes.iinfo)):
        if dtype.kind in numpy_kinds:
            return name
        if dtype.kind == "V" and dtype.names is None:
            with suppress(ValueError):
                info(dtype)
                return name
    return "complex" if dtype.kind == "c" else str(dtype)


class Settings:
    """The requested dtypes of accumulators and results.

    Attributes:
      accumulator: the dtype of accumulators. None: that of the contributions, but at least 32 bits wide.
      result: the dtype of results. None: that of the contributions; for integers, that of the accumulator.
    """

    def __init__(self, accumulator: DType = None, output: DType = None) -> None:
        self.accumulator, self.result = parse(accumulator), parse(output)

    def running(self, dtype: np.dtype) -> np.dtype:
        """The accumulator dtype for contributions of ``dtype``; always of the same kind."""
        family, wanted = kind(dtype), self.accumulator
        if family == "complex":
            # A real dtype requests the width of the real and imaginary parts.
            return dtype if wanted is None else np.dtype(np.result_type(wanted, np.complex64))
        if family == "integer":
            if wanted is not None and kind(wanted) == "integer":
                return wanted
            narrow = np.dtype(np.uint32) if dtype.kind == "u" else INT32
            return dtype if dtype.itemsize >= 4 else narrow
        if wanted is not None and kind(wanted) == family:
            return wanted
        return dtype if dtype.itemsize >= 4 else FLOAT32

    def output(self, dtype: np.dtype) -> np.dtype:
        """The result dtype for contributions of ``dtype``; always of the same kind."""
        family, wanted = kind(dtype), self.result
        if wanted is not None and kind(wanted) == family:
            return wanted
        return self.running(dtype) if family == "integer" else dtype


def of_weights(dtypes: Iterable[np.dtype]) -> np.dtype:
    """The dtype of the sum of weights of contributions of these dtypes: their widest float, at least float32."""
    widest = FLOAT32
    for dtype in dtypes:
        if dtype.itemsize > 4 and kind(dtype) != "integer" and part(dtype).itemsize > widest.itemsize:
            widest = part(dtype)
    return widest


def working(running: np.dtype) -> np.dtype:
    """The dtype of products with weights and of quotients, before they are rounded to the accumulator dtype."""
    return FLOAT32 if kind(running) == "float" and running.itemsize < 4 else running


def part(dtype: np.dtype) -> np.dtype:
    """The dtype of the real part of a complex dtype; other dtypes unchanged."""
    return np.finfo(dtype).dtype if dtype.kind == "c" else dtype


def is_wide(dtype: np.dtype) -> bool:
    """Whether numbers, or the real parts of complex ones, have more than 32 bits."""
    return part(dtype).itemsize > 4


def parse(dtype: DType) -> np.dtype | None:
    """Converts a dtype of NumPy, ml_dtypes, JAX or TensorFlow, or None; raises unless it is numeric."""
    if dtype is None:
        return None
    try:
        extended = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        parsed = np.dtype(extended or getattr(dtype, "as_numpy_dtype", dtype))
    except Exception:  # NumPy raises several types for invalid dtypes
        parsed = None
    if parsed is None or kind(parsed) not in NUMERIC:
        raise invalid("a dtype of floats, complex numbers or integers", shown(dtype))
    return parsed


def holds(dtype: np.dtype, number: object) -> bool:
    """Whether a number converts to a dtype: exactly for integers, by rounding for others."""
    try:
        with np.errstate(all="ignore"):
            converted = np.array(number, dtype)
    except Exception:  # NumPy raises several types, and a user's class of numbers may raise anything
        return False
    return kind(dtype) != "integer" or bool(converted == number)
