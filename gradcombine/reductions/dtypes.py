"""The one place that decides dtypes.

Three settings are independent: the *accumulator* dtype of the running value, the *wire* dtype in which replicas
exchange it, and the *output* dtype of the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.errors import invalid, shown
from gradcombine.types import DType

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)
NUMERIC = ("float", "complex", "integer")
"""The kinds of numbers."""


@cache
def kind(dtype: np.dtype) -> str:
    """``"float"``, ``"complex"``, ``"integer"`` or the dtype's own name; those of ml_dtypes too."""
    for name, numpy_kinds, info in (("float", "f", ml_dtypes.finfo), ("integer", "iu", ml_dtypes.iinfo)):
        if dtype.kind in numpy_kinds:
            return name
        if dtype.kind == "V" and dtype.names is None and _knows(info, dtype):
            return name
    return "complex" if dtype.kind == "c" else str(dtype)


def _knows(info: Any, dtype: np.dtype) -> bool:
    try:
        info(dtype)
    except ValueError:
        return False
    return True


class Settings:
    """The dtypes asked for: of accumulators and of results.

    Attributes:
      accumulator: the running value's dtype. None: at least 32 bits wide, else the contributions' own.
      result: its dtype. None: the contributions' own; narrow integers stay as wide as their accumulator.
    """

    def __init__(self, accumulator: DType = None, output: DType = None) -> None:
        self.accumulator, self.result = parse(accumulator), parse(output)

    def running(self, dtype: np.dtype) -> np.dtype:
        """The accumulator's dtype for contributions of ``dtype``, which is of their kind."""
        family, wanted = kind(dtype), self.accumulator
        if family == "complex":
            # A requested real dtype states the width of the parts.
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
        """The result's dtype for contributions of ``dtype``, which is of their kind."""
        family, wanted = kind(dtype), self.result
        if wanted is not None and kind(wanted) == family:
            return wanted
        return self.running(dtype) if family == "integer" else dtype


def of_weights(dtypes: Iterable[np.dtype]) -> np.dtype:
    """Of the sum of the weights of contributions of these dtypes: the widest float among them, at least float32."""
    widest = FLOAT32
    for dtype in dtypes:
        if dtype.itemsize > 4 and kind(dtype) != "integer" and part(dtype).itemsize > widest.itemsize:
            widest = part(dtype)
    return widest


def working(running: np.dtype) -> np.dtype:
    """Where products with a weight and quotients are formed before they are rounded to the accumulator's dtype."""
    return FLOAT32 if kind(running) == "float" and running.itemsize < 4 else running


def part(dtype: np.dtype) -> np.dtype:
    """The real dtype of a complex one's parts; any other dtype itself."""
    return np.finfo(dtype).dtype if dtype.kind == "c" else dtype


def is_wide(dtype: np.dtype) -> bool:
    """Whether numbers, or the parts of complex ones, have more than 32 bits."""
    return part(dtype).itemsize > 4


def parse(dtype: DType) -> np.dtype | None:
    """A dtype given as NumPy, ml_dtypes, JAX or TensorFlow spell it, or None.

    Raises:
      GradCombineError: for what is no dtype of numbers.
    """
    if dtype is None:
        return None
    try:
        extended = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        parsed = np.dtype(extended or getattr(dtype, "as_numpy_dtype", dtype))
    except Exception:  # NumPy has several for what it cannot read
        parsed = None
    if parsed is None or kind(parsed) not in NUMERIC:
        raise invalid("a dtype of floats, complex numbers or integers", shown(dtype))
    return parsed


def holds(dtype: np.dtype, number: object) -> bool:
    """Whether an array of a dtype takes a number: rounded, where it is not of integers."""
    try:
        with np.errstate(all="ignore"):
            held = np.array(number, dtype)
    except Exception:  # NumPy has several, and a number's own class may have others
        return False
    return kind(dtype) != "integer" or bool(held == number)
