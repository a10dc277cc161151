"""File formats of named arrays. Readers load arrays lazily, and treat every file as untrusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError, first_line, invalid

PIECE = 1 << 20
"""Number of elements that are read at a time."""

_MOST_AXES = 64
_MOST_BYTES = 2**63 - 1
"""NumPy's limits, of which the latter applies to the product of the nonzero lengths."""


class Entry(NamedTuple):
    """A named array in a file.

    Attributes:
      name: its path, with slashes.
      shape: as the file declares it.
      dtype: a NumPy or ml_dtypes dtype in native byte order.
      read: yields the elements in C order, as one-dimensional arrays of any length and byte order.
      unread: the reason why the array cannot be read; empty if it can.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Iterator[np.ndarray]]
    unread: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yields the elements in C order, as one-dimensional arrays of the entry's dtype.

        Raises:
          GradCombineError: for an unreadable array, damaged contents, and more or fewer elements than the shape has.
        """
        self._require_readable()
        remaining = self.size
        try:
            for piece in self.read():
                remaining -= piece.size
                if remaining < 0:
                    break
                if piece.dtype.newbyteorder("=") != self.dtype:
                    raise TypeError(f"{piece.dtype} instead of the declared {self.dtype}")
                yield piece.astype(self.dtype, copy=False)
        except (GradCombineError, MemoryError):
            raise
        except Exception as error:
            # Each format raises errors of its own for damage, from zlib.error to tf.errors.DataLossError.
            raise invalid("a leaf that can be read", first_line(error), self.name) from error
        if remaining:
            raise invalid(f"{self.size} elements", "fewer" if remaining > 0 else "more", self.name)

    def whole(self) -> np.ndarray:
        """Reads the array into memory. Raises as `pieces` does."""
        self._require_readable()
        array = np.empty(self.size, self.dtype)
        filled = 0
        for piece in self.pieces():
            array[filled : filled + piece.size] = piece
            filled += piece.size
        return array.reshape(self.shape)

    def _require_readable(self) -> None:
        if self.unread:
            raise invalid("an array of numbers", self.unread, self.name)
        nonzero = math.prod(filter(None, self.shape)) * self.dtype.itemsize
        if len(self.shape) > _MOST_AXES or nonzero > _MOST_BYTES:
            expected = f"a shape that NumPy can represent, of at most {_MOST_AXES} axes"
            raise invalid(expected, f"one of {len(self.shape)} axes and {nonzero} bytes", self.name)


def from_pieces(name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], Iterator[np.ndarray]]) -> Entry:
    """An entry whose elements are read as a stream."""
    return Entry(name, shape, dtype.newbyteorder("="), read)


def from_array(name: str, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray]) -> Entry:
    """An entry whose array is read at once."""
    return from_pieces(name, shape, dtype, lambda: iter([load().reshape(-1)]))


def from_blocks(name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray]) -> Entry:
    """An entry whose blocks are read separately, as ``read(index)``."""

    def blocks() -> Iterator[np.ndarray]:
        # Iterate over the leading axes one index at a time, and slice the first axis whose rows fit into a piece.
        axis = next((i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= PIECE), 0)
        rows = max(1, PIECE // max(1, math.prod(shape[axis + 1 :])))
        for index in np.ndindex(shape[:axis]):
            for start in range(0, shape[axis], rows):
                yield read((*index, slice(start, min(start + rows, shape[axis])))).reshape(-1)

    return from_pieces(name, shape, dtype, blocks if shape else lambda: iter([read(()).reshape(-1)]))


def unread(name: str, reason: str, shape: tuple[int, ...] = ()) -> Entry:
    """An entry that cannot be read: its elements are not numbers, or of an unknown dtype."""
    return Entry(name, shape, np.dtype(object), lambda: iter(()), reason)


def holds_numbers(dtype: np.dtype) -> bool:
    """Whether a dtype is a boolean, integer, float or complex dtype of NumPy or ml_dtypes."""
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
