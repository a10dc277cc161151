"""The .safetensors format, by its own library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open

from gradcombine.errors import GradCombineError
from gradcombine.verify.dumps.entry import Dump, Entry, from_rows

_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "C64": np.complex64,
}


def read(path: Path) -> Dump:
    """The arrays of a .safetensors file."""
    with safe_open(path, "numpy") as file:
        return {name: _entry(path, name, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 (no mapping)


def _entry(path: Path, name: str, found: Any) -> Entry:
    shape, kind = tuple(found.get_shape()), found.get_dtype()
    if kind not in _DTYPES:
        raise GradCombineError("diff", f"a dtype of {', '.join(_DTYPES)}", kind, name)
    dtype = np.dtype(_DTYPES[kind])
    if not shape:
        return Entry(name, shape, dtype, partial(_scalar, path, name))
    return from_rows(name, partial(_rows, path, name), shape, dtype)


def _scalar(path: Path, name: str) -> Iterator[np.ndarray]:
    with safe_open(path, "numpy") as file:
        yield file.get_tensor(name).reshape(-1)


def _rows(path: Path, name: str, rows: slice) -> np.ndarray:
    with safe_open(path, "numpy") as file:
        return file.get_slice(name)[rows]
