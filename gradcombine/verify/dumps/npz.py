"""NumPy's .npz, compressed or not, as a stream: an array need not fit into memory."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

import ml_dtypes
import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.dumps.entry import PIECE, Dump, Entry

_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read(path: Path) -> Dump:
    """The arrays of an .npz file.

    NumPy writes bfloat16 as unnamed words of two bytes, and those are read as bfloat16.
    """
    with zipfile.ZipFile(path) as archive:
        return {name: _entry(archive, path, name) for name in map(_name, archive.namelist())}


def _name(member: str) -> str:
    return member.removesuffix(".npy")


def _entry(archive: zipfile.ZipFile, path: Path, name: str) -> Entry:
    with archive.open(f"{name}.npy") as stream:
        shape, fortran, dtype = _header(stream, name)
    return Entry(name, shape, dtype, partial(_pieces, path, name, shape, fortran, dtype))


def _header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise GradCombineError("diff", "an .npy array of format 1.0 or 2.0", version, name)
    shape, fortran, dtype = _HEADERS[version](stream)
    if dtype.hasobject:
        raise GradCombineError("diff", "an array of numbers", "one of Python objects", name)
    return shape, fortran, np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype


def _pieces(path: Path, name: str, shape: tuple[int, ...], fortran: bool, dtype: np.dtype) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        _header(stream, name)
        if fortran and len(shape) > 1:
            stored = np.frombuffer(stream.read(), dtype)
            yield stored.reshape(shape, order="F").reshape(-1)
            return
        with contextlib.closing(stream):
            while data := stream.read(PIECE * dtype.itemsize):
                yield np.frombuffer(data, dtype)
