"""One array of a dump, read when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

PIECE = 1 << 20
"""How many elements are read at a time."""


class Entry(NamedTuple):
    """An array that has a name in a file.

    Attributes:
      name: its path, with slashes.
      shape, dtype: known without reading it.
      pieces: yields the elements in C order, as one-dimensional arrays of any length.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def whole(self) -> np.ndarray:
        """The array in memory."""
        found = np.empty(self.size, self.dtype)
        filled = 0
        for piece in self.pieces():
            found[filled : filled + piece.size] = piece
            filled += piece.size
        return found.reshape(self.shape)


Dump: TypeAlias = Mapping[str, Entry]
"""The entries of a file, by name."""


def from_array(name: str, load: Callable[[], np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> Entry:
    """An entry of a format that reads an array as a whole."""
    return Entry(name, shape, dtype, lambda: iter([load().reshape(-1)]))


def from_rows(name: str, read: Callable[[slice], np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> Entry:
    """An entry of a format that can read some of the rows: ``read(slice)``."""

    def pieces() -> Iterator[np.ndarray]:
        rows = max(1, PIECE // max(1, math.prod(shape[1:])))
        for start in range(0, shape[0], rows):
            yield read(slice(start, min(start + rows, shape[0]))).reshape(-1)

    if not shape:
        raise ValueError("a scalar has no rows")
    return Entry(name, shape, dtype, pieces)
