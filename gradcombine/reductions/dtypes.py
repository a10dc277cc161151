"""The one place that decides dtypes.

Three settings are independent: the *accumulator* dtype of the running value, the *wire* dtype in which replicas
exchange it, and the *output* dtype of the result.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)
INT32 = np.dtype(np.int32)


@cache
def kind(dtype: np.dtype) -> str:
    """``"float"``, ``"complex"``, ``"integer"`` or the dtype's own name; ml_dtypes' types are told apart as well."""
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


def accumulator(dtype: np.dtype, requested: np.dtype | None) -> np.dtype:
    """The running value's dtype: at least 32 bits wide, real only where the contribution is."""
    family = kind(dtype)
    if family == "complex":
        # A requested real dtype states the width of the parts.
        wanted = dtype if requested is None else np.result_type(requested, np.complex64)
        return np.dtype(wanted)
    if family == "integer":
        if requested is not None and kind(requested) == "integer":
            return requested
        if dtype.itemsize >= 4:
            return dtype
        return np.dtype(np.uint32) if dtype.kind == "u" else INT32
    if requested is not None:
        return requested
    return dtype if dtype.itemsize >= 4 else FLOAT32


def output(dtype: np.dtype, running: np.dtype, requested: np.dtype | None) -> np.dtype:
    """The result's dtype: the contribution's own, except that narrow integers keep the accumulator's width."""
    family = kind(dtype)
    if family == "integer":
        return requested if requested is not None and kind(requested) == "integer" else running
    if family == "complex" or requested is None:
        return dtype if requested is None or kind(requested) != "complex" else requested
    return requested


def working(running: np.dtype) -> np.dtype:
    """Where products with a weight and quotients are formed before they are rounded to the accumulator's dtype."""
    return FLOAT32 if kind(running) == "float" and running.itemsize < 4 else running


def part(dtype: np.dtype) -> np.dtype:
    """The real dtype of a complex one's parts; any other dtype itself."""
    return np.finfo(dtype).dtype if dtype.kind == "c" else dtype


def parse(dtype: Any) -> np.dtype | None:
    """A dtype given as NumPy, ml_dtypes, JAX or TensorFlow spell it, or None."""
    if dtype is None:
        return None
    if isinstance(dtype, str) and hasattr(ml_dtypes, dtype):
        return np.dtype(getattr(ml_dtypes, dtype))
    return np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
