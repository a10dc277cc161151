"""One array of a file, read when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradcombine.errors import GradCombineError, first_line, invalid

PIECE = 1 << 20
"""How many elements are read at a time."""


class Entry(NamedTuple):
    """An array that has a name in a file.

    Attributes:
      name: its path, with slashes.
      shape: known without reading it.
      dtype: its NumPy or ml_dtypes one, in native byte order.
      read: yields the elements in C order, as one-dimensional arrays of any length and byte order.
      unread: why the array cannot be read; empty for one that can.
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
        """The elements in C order, as one-dimensional arrays of the entry's dtype; as many as the shape holds.

        Raises:
          GradCombineError: for an array that cannot be read, and for damaged contents.
        """
        self._require_numbers()
        missing = self.size
        try:
            for piece in self.read():
                missing -= piece.size
                if missing < 0:
                    break
                if piece.dtype.newbyteorder("=") != self.dtype:
                    raise TypeError(f"{piece.dtype} where {self.dtype} was announced")
                yield piece.astype(self.dtype, copy=False)
        except (GradCombineError, MemoryError):
            raise
        except Exception as error:
            # Damage shows as an error of each format's own classes, from zlib.error to tf.errors.DataLossError.
            raise invalid("a leaf that can be read", first_line(error), self.name) from error
        if missing:
            raise invalid(f"{self.size} elements", "fewer" if missing > 0 else "more", self.name)

    def whole(self) -> np.ndarray:
        """The array in memory. Errors as for `pieces`."""
        self._require_numbers()
        array = np.empty(self.size, self.dtype)
        filled = 0
        for piece in self.pieces():
            array[filled : filled + piece.size] = piece
            filled += piece.size
        return array.reshape(self.shape)

    def _require_numbers(self) -> None:
        if self.unread:
            raise invalid("an array of numbers", self.unread, self.name)


def from_pieces(name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[], Iterator[np.ndarray]]) -> Entry:
    """An entry of a format that is read as a stream."""
    return Entry(name, shape, dtype.newbyteorder("="), read)


def from_array(name: str, shape: tuple[int, ...], dtype: np.dtype, load: Callable[[], np.ndarray]) -> Entry:
    """An entry of a format that reads an array as a whole."""
    return from_pieces(name, shape, dtype, lambda: iter([load().reshape(-1)]))


def from_blocks(name: str, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Any], np.ndarray]) -> Entry:
    """An entry of a format that can read a part of an array: ``read(index)``."""

    def blocks() -> Iterator[np.ndarray]:
        # The first axis after which a block is no longer than a piece is cut; those before it are walked through.
        axis = next((i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= PIECE), 0)
        rows = max(1, PIECE // max(1, math.prod(shape[axis + 1 :])))
        for index in np.ndindex(shape[:axis]):
            for start in range(0, shape[axis], rows):
                yield read((*index, slice(start, min(start + rows, shape[axis])))).reshape(-1)

    return from_pieces(name, shape, dtype, blocks if shape else lambda: iter([read(()).reshape(-1)]))


def unread(name: str, reason: str, shape: tuple[int, ...] = ()) -> Entry:
    """An entry that is there, but cannot be read: what holds no numbers, or numbers that nothing here knows."""
    return Entry(name, shape, np.dtype(object), lambda: iter(()), reason)


def holds_numbers(dtype: np.dtype) -> bool:
    """Whether the elements are booleans, integers, floats or complex numbers, of NumPy or of ml_dtypes."""
    return dtype.kind in "biufc" or dtype.type.__module__ == "ml_dtypes"
