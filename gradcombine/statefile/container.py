"""A state file: one text, and arrays by name, in an .npz or a .safetensors file.

An array lies there as it is, where both formats know its dtype, else as its bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.formats import Entry, npz, safetensors
from gradcombine.statefile.replacing import replacing

_SUFFIXES = (".npz", ".safetensors")
_TEXT = "header"
_KEY = "gradcombine"
"""What the text is called in an .npz file, and in a .safetensors file."""

_NATIVE = frozenset(
    {"bool", "float16", "float32", "float64"} | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes that .npz and .safetensors both have."""


def stored_as(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[np.dtype, tuple[int, ...]]:
    """Dtype and shape in the file. Another dtype becomes uint8, with one more axis: the bytes of each element."""
    if dtype.name in _NATIVE:
        return dtype.newbyteorder("<"), shape
    return np.dtype(np.uint8), (*shape, dtype.itemsize)


def to_stored(array: np.ndarray) -> np.ndarray:
    """The array as it lies in the file, in C order."""
    dtype, shape = stored_as(array.dtype, array.shape)
    whole = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.name in _NATIVE:
        return whole.astype(dtype, copy=False)
    return whole.reshape(-1).view(np.uint8).reshape(shape)


def from_stored(stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `to_stored`."""
    if dtype.name in _NATIVE:
        return stored.astype(dtype, copy=False)
    return stored.reshape(-1).view(dtype).reshape(shape)


def digest(stored: np.ndarray) -> str:
    """The SHA-256 of the bytes in the file."""
    return hashlib.sha256(stored.reshape(-1).view(np.uint8).data).hexdigest()


class Contents(NamedTuple):
    """What a state file holds: the header's text, and the arrays by name, read when they are asked for."""

    text: str
    arrays: dict[str, Entry]


def require_path(operation: str, path: str | os.PathLike[str]) -> Path:
    """Refuses a path that names no format, and where anything else than a file has it.

    A FIFO would wait for ever, and nobody means to replace a device or a folder.
    """
    if Path(path).suffix not in _SUFFIXES:
        raise GradCombineError(operation, f"a path that ends in {' or '.join(_SUFFIXES)}", repr(str(path)))
    if os.path.exists(path) and not os.path.isfile(path):
        raise GradCombineError(operation, "a regular file", repr(str(path)))
    return Path(path)


def write(path: Path, text: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a file as a whole. The same contents give the same bytes."""
    with replacing(path) as file:
        if path.suffix == ".npz":
            npz.write(file, {_TEXT: np.frombuffer(text.encode(), np.uint8), **arrays})
        else:
            safetensors.write(file, arrays, {_KEY: text})


def read(path: Path) -> Contents:
    """Reads a file's header. It may raise anything for damaged contents: `decoding` gives that one name."""
    if path.suffix == ".npz":
        arrays = npz.read("statefile.load", path, compressed=False)
        header = arrays.pop(_TEXT, None)
        if header is None:
            raise refused("a gradcombine state file", "an archive without a header")
        if header.dtype != np.uint8 or len(header.shape) != 1:
            raise refused("a header of bytes", f"one of {header.dtype}{header.shape}")
        return Contents(header.whole().tobytes().decode(), arrays)
    found = safetensors.read("statefile.load", path)
    if _KEY not in found.texts:
        raise refused("a gradcombine state file", "a .safetensors file without a header")
    return Contents(found.texts[_KEY], found.entries)


@contextmanager
def decoding(path: Path) -> Generator[None, None, None]:
    """Names whatever a decoder raises on damaged contents; a file that cannot be opened keeps its OSError."""
    try:
        yield
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # An error about a path says so; one without a name is about a place in the file that is not there.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        # Decoders of archives raise a dozen classes, depending on where the damage is.
        received = f"{path.name}: {type(error).__name__}: {error}"
        raise GradCombineError("statefile.load", "a whole state file", received) from error


def refused(expected: str, received: object) -> GradCombineError:
    """The error of a file whose contents are not what they should be."""
    return GradCombineError("statefile.load", expected, received)


def array_name(rank: int, leaf: int) -> str:
    """What an array is called in the file: its replica, and its number among the header's leaves."""
    return f"{rank}.{leaf}"
