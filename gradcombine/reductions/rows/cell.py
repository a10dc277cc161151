"""The cell of row-sparse sums and means: a table of fixed capacity, in which each row that occurred stands once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.checks import require_integer, require_one_of
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import RoundedWeights, Totals, dtype_of, require_dtype, shape_of
from gradcombine.reductions.rows.leaf import MOST_ROWS, is_row_sparse, row_slices
from gradcombine.reductions.rows.table import RowTable, empty_table, join, result, single
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array

Overflow = Literal["error", "check"]


@dataclass(frozen=True)
class Rows(RoundedWeights):
    """An accumulator that is a `RowTable`.

    Attributes:
      finished: ``finished(backend, sums, totals)``: the values as they leave, before they are cast.
      capacity: how many different rows a table holds.
      overflow: what happens to one row too many.
      settings: the dtypes of accumulator and result.
    """

    name: str
    finished: Callable[[Backend, Array, Totals], Array]
    capacity: int
    overflow: Overflow
    settings: dtypes.Settings
    kinds: tuple[str, ...] = ("float", "complex")
    additive: bool = False

    def __post_init__(self) -> None:
        require_integer(self.name, "a capacity of 1 row or more", self.capacity, highest=sys.maxsize)
        require_one_of(self.name, f"overflow of {list(get_args(Overflow))}", self.overflow, get_args(Overflow))

    is_leaf = staticmethod(is_row_sparse)

    def running(self, dtype: np.dtype) -> np.dtype:
        return self.settings.running(dtype)

    def output(self, dtype: np.dtype) -> np.dtype:
        return self.settings.output(dtype)

    def arrays(self, leaf: Any) -> tuple[Array, ...]:
        slices = row_slices(leaf)
        return (leaf,) if slices is None else (slices.values, slices.indices)

    def shape(self, leaf: Any) -> tuple[int, ...]:
        slices = row_slices(leaf)
        if isinstance(leaf, RowTable):
            return leaf.shape
        shape = shape_of(leaf if slices is None else slices.values)
        if not shape or (slices is not None and slices.rows is None):
            raise GradCombineError(self.name, "a leaf with a known number of rows", f"shape {shape}")
        return shape if slices is None or slices.rows is None else (slices.rows, *shape[1:])

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> RowTable:
        if not 1 <= shape[0] <= MOST_ROWS:
            raise GradCombineError(self.name, f"from 1 to {MOST_ROWS} rows", shape[0])
        return empty_table(backend, min(self.capacity, shape[0]), shape, running, like)

    def entering(self, backend: Backend, a: RowTable, made_for: np.dtype, leaf: Any) -> RowSlices:
        slices = row_slices(leaf)
        if slices is None:
            expected = "a RowSparse, tf.IndexedSlices or BCOO (for dense ones as well: sparse_as_dense)"
            raise GradCombineError(self.name, expected, "a dense array")
        # Slices that do not know the number of rows are taken for rows of the whole array that the state was made for.
        rows = a.extent.rows if slices.rows is None else slices.rows
        received = (rows, *shape_of(slices.values)[1:])
        if received != a.shape:
            raise GradCombineError(self.name, f"rows of shape {a.shape}", received)
        require_dtype(self, made_for, dtype_of(slices.values))
        return slices

    def update(self, backend: Backend, a: RowTable, x: RowSlices, weight: Weight, totals: Totals) -> RowTable:
        added = single(self.name, backend, a, x, weight)
        return a if added is None else self._joined(backend, a, added)

    def masked(self, backend: Backend, zero: Array, old: RowTable, new: RowTable) -> RowTable:
        # A contribution of weight 0 has no rows, so there is no need to go through the table again.
        return new

    def merge(self, backend: Backend, a: RowTable, b: RowTable, a_totals: Totals, b_totals: Totals) -> RowTable:
        return self._joined(backend, a, b)

    def _joined(self, backend: Backend, a: RowTable, b: RowTable) -> RowTable:
        table = join(self.name, backend, a, b)
        if self.overflow == "check":
            size = backend.shape(table.indices)[0]
            expected = f"at most {size} different rows, all in range"
            backend.check(table.lost == 0, self.name, expected, "more, or an index out of range")
        return table

    def finish(self, backend: Backend, a: RowTable, totals: Totals, output: np.dtype) -> Any:
        return result(backend, a, backend.cast(self.finished(backend, a.values, totals), output))
