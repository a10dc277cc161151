"""The .npz format: a ZIP archive of .npy files.

References: `numpy.lib.format <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>`_; `numpy.savez
<https://numpy.org/doc/stable/reference/generated/numpy.savez.html>`_.
"""

from __future__ import annotations

import math
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import IO

import ml_dtypes
import numpy as np
from numpy.lib import format as npy

from gradcombine import formats
from gradcombine.errors import invalid
from gradcombine.formats import Entry, from_pieces, holds_numbers, unread

_SUFFIX = ".npy"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_UNPARSED = (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError)
"""Errors that malformed headers raise; deep nesting makes Python's parser raise RecursionError or MemoryError."""
_MAX_DEFLATE_RATIO = 1032
"""Highest compression ratio of deflate. An entry that claims more is malicious or damaged."""


def write(file: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays to an empty file that is open for writing. Equal arrays give equal bytes."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(name + _SUFFIX, _EPOCH), "w", force_zip64=True) as member:
                npy.write_array(member, array, version=(1, 0), allow_pickle=False)


def read(path: Path, compressed: bool = True) -> dict[str, Entry]:
    """Reads the headers of an .npz file; returns its arrays by name, read on access.

    NumPy saves bfloat16 as dtype "V2", which is read as bfloat16.

    Args:
      path: of the file, which stays open as long as one of its entries is alive.
      compressed: whether compressed entries are accepted. Uncompressed ones cannot be larger than the file.

    Raises:
      GradCombineError: for entries that overlap, share a name, or contradict their headers.
      OSError: if the file cannot be opened.
      Exception: of many classes, for other damage.
    """
    size = path.stat().st_size
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        archive = zipfile.ZipFile(file)
        opened.pop_all()
    # Close the file before its finalizer warns that it is open; in a reference cycle their order is arbitrary.
    weakref.finalize(archive, file.close)
    members = [member for member in archive.infolist() if not member.is_dir()]
    if sum(member.compress_size for member in members) > size:
        raise invalid("entries that do not overlap", path.name)
    entries: dict[str, Entry] = {}
    for member in members:
        _require_plausible(member, compressed)
        name = member.filename.removesuffix(_SUFFIX)
        if name in entries:
            raise invalid("unique names of entries", f"a duplicate in {path.name}", name)
        entries[name] = _entry(archive, member, name)
    return entries


def _require_plausible(member: zipfile.ZipInfo, compressed: bool) -> None:
    stored = member.compress_type == zipfile.ZIP_STORED
    if not stored and not compressed:
        raise invalid("entries that are not compressed", member.filename)
    if not stored and member.compress_type != zipfile.ZIP_DEFLATED:
        raise invalid("entries that are stored or deflated", member.filename)
    largest = member.compress_size * (1 if stored else _MAX_DEFLATE_RATIO)
    if member.file_size > largest:
        received = f"{member.file_size}, stored in {member.compress_size} bytes"
        raise invalid(f"an entry of no more than {largest} bytes", received, member.filename)


def _entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Entry:
    if not member.filename.endswith(_SUFFIX):
        return unread(name, "a file that is not an .npy array")
    with archive.open(member) as stream:
        version = npy.read_magic(stream)
        if version not in _HEADERS:
            return unread(name, f"an .npy array of format {'.'.join(map(str, version))}")
        try:
            shape, fortran, dtype = _HEADERS[version](stream)
        except _UNPARSED as error:
            # NumPy saves the 8-bit floats of ml_dtypes as "<f1", a dtype that it cannot read.
            if "dtype" in str(error):
                return unread(name, str(error))
            expected = "an .npy header: a dict of descr, fortran_order and shape"
            raise invalid(expected, "malformed or deeply nested text", name) from error
        start = stream.tell()
    if dtype.hasobject:
        return unread(name, "Python objects", shape)
    numbers = np.dtype(ml_dtypes.bfloat16) if dtype == np.dtype("V2") else dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if any(n < 0 for n in shape) or start + nbytes != member.file_size:
        received = f"one of {member.file_size} bytes with its header of {start}"
        raise invalid(f"an array of {dtype}{shape}, {nbytes} bytes", received, name)
    if not holds_numbers(numbers):
        return unread(name, f"elements of dtype {dtype}", shape)
    contents = partial(_pieces, archive, member, start, shape, fortran, numbers)
    return from_pieces(name, shape, numbers, contents)


def _pieces(
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    start: int,
    shape: tuple[int, ...],
    fortran: bool,
    dtype: np.dtype,
) -> Iterator[np.ndarray]:
    with archive.open(member) as stream:
        stream.read(start)
        if fortran and len(shape) > 1:
            yield np.frombuffer(stream.read(), dtype).reshape(shape, order="F").reshape(-1)
            return
        # zipfile verifies the checksum on the read at the end of the entry.
        while data := stream.read(formats.PIECE * dtype.itemsize):
            yield np.frombuffer(data, dtype)
