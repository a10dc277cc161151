"""The .npz format: a ZIP archive of .npy files, not compressed.

References: `numpy.lib.format <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>`_; `numpy.savez
<https://numpy.org/doc/stable/reference/generated/numpy.savez.html>`_.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from gradcombine.statefile.container import refused
from gradcombine.statefile.stored import nbytes

_HEADER = "header"
_SUFFIX = ".npy"
_MOST_BEFORE_DATA = 4096
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write(file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
    header = np.frombuffer(text.encode(), np.uint8)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in {_HEADER: header, **arrays}.items():
            # A fixed date: the same state gives the same file.
            with archive.open(zipfile.ZipInfo(name + _SUFFIX, _EPOCH), "w", force_zip64=True) as entry:
                npy.write_array(entry, array, version=(1, 0), allow_pickle=False)


@contextmanager
def opened(path: Path) -> Iterator[NpzReader]:
    with path.open("rb") as file:
        yield NpzReader(file, path.stat().st_size)


class NpzReader:
    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self._size = file, size
        self._entries: dict[str, zipfile.ZipInfo] = {}

    def text(self) -> str:
        self._archive = zipfile.ZipFile(self._file)
        entries = self._archive.infolist()
        for entry in entries:
            # Not compressed, an entry is no larger than its part of the file: nothing here can be a ZIP bomb.
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise refused("entries that are not compressed", entry.filename)
            self._entries[entry.filename.removesuffix(_SUFFIX)] = entry
        if sum(entry.file_size for entry in entries) > self._size or len(self._entries) != len(entries):
            raise refused("entries that do not overlap", self._archive.filename)
        if _HEADER not in self._entries:
            raise refused("a gradcombine state file", "an archive without a header")
        entry = self._entries.pop(_HEADER)
        with self._archive.open(entry) as file:
            shape, dtype = _read_header(file)
            if dtype != np.uint8 or len(shape) != 1 or shape[0] > entry.file_size:
                raise refused("a header of bytes", f"one of {dtype}{shape}")
            return _read(file, dtype, shape).tobytes().decode()

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def array(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        entry = self._entries[name]
        size = nbytes(dtype, shape)
        if not size <= entry.file_size <= size + _MOST_BEFORE_DATA:
            raise refused(f"an array of {size} bytes", f"one of {entry.file_size}")
        with self._archive.open(entry) as file:
            if _read_header(file) != (shape, dtype):
                raise refused(f"an array of {dtype}{shape}", "another one")
            return _read(file, dtype, shape)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    if npy.read_magic(file) != (1, 0):
        raise refused("version 1.0 of .npy", "another one")
    shape, fortran_order, dtype = npy.read_array_header_1_0(file, max_header_size=_MOST_BEFORE_DATA)
    if fortran_order:
        raise refused("C order", "Fortran order")
    return shape, dtype


def _read(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    out = np.empty(shape, dtype)
    rest = out.reshape(-1).view(np.uint8).data
    while len(rest):
        count = file.readinto(rest)  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise refused(f"{len(rest)} more bytes", "the end of an entry")
        rest = rest[count:]
    # Reading up to the end checks the entry's own checksum.
    if file.read(1):
        raise refused("the end of an entry", "more bytes")
    return out
