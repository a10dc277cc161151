"""HDF5, as Keras writes its .weights.h5."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from gradcombine.verify.dumps.entry import Dump, Entry, from_array, from_rows


def read(path: Path) -> Dump:
    """The numeric datasets of an HDF5 file."""
    found: dict[str, Entry] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and node.dtype.kind in "biufc":
            found[name] = _entry(path, name, node.shape, node.dtype)

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def _entry(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Entry:
    if shape:
        return from_rows(name, partial(_read, path, name), shape, dtype)
    return from_array(name, partial(_read, path, name, ()), shape, dtype)


def _read(path: Path, name: str, rows: Any) -> np.ndarray:
    with h5py.File(path) as file:
        node: Any = file[name]
        return np.asarray(node[rows])
