"""The sum ``sum(w * g)`` and mean ``sum(w * g) / sum(w)`` of row-sparse leaves, in a table of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.backends.registry import dtype_of, shape_of
from gradcombine.errors import invalid, operation, shown
from gradcombine.reductions import dtypes
from gradcombine.reductions.adding import finished
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Cell, Totals
from gradcombine.reductions.dtypes import INT32
from gradcombine.reductions.treewise import Treewise, TreewiseState
from gradcombine.reductions.weights import Weight, weighted
from gradcombine.settings import Settings
from gradcombine.sparse import (
    MOST_ROWS,
    Distinct,
    RowSparse,
    across,
    distinct,
    is_row_sparse,
    require_in_range,
    require_rows,
    row_slices,
    union,
)
from gradcombine.types import Array, DType, Leaf, Overflow
from gradcombine.wires.wire import Wire


class RowTable(NamedTuple):
    """An accumulator of distinct rows.

    Attributes:
      values: array of shape (capacity, ...); -0, the neutral element of addition, in the padding.
      indices: int32 of shape (capacity,), ascending; then padding, the index one past the last row.
      lost: int32 scalar, nonzero if traced contributions had more distinct rows than the capacity, or an index out of
        range.
      extent: the number of rows of the dense array, as a constant in the structure.
    """

    values: Array
    indices: Array
    lost: Array
    extent: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array."""
        rows = self.extent.rows if tree.is_static(self.extent) else None
        if rows is None:
            raise invalid("a constant number of rows", shown(self.extent))
        return (rows, *tuple(self.values.shape)[1:])

    @property
    def in_words(self) -> str:
        """Shape and capacity, which must be equal to merge two states."""
        return f"rows of an array of shape {self.shape}, with capacity {self.values.shape[0]}"


def single(backend: Backend, table: RowTable, slices: RowSlices, weight: Weight) -> RowTable | None:
    """The table of one weighted contribution; None for one without rows.

    Raises:
      GradCombineError: for an index out of range and for more distinct rows than the capacity, unless they are traced.
    """
    rows, size = table.extent.rows, backend.shape(table.indices)[0]
    slices = require_rows(backend, slices)
    n, zero = backend.shape(slices.indices)[0], weight.zero
    if n == 0 or zero is True:
        return None
    indices = slices.indices
    if zero is not False:
        # The indices of a contribution of weight 0 may be out of range.
        indices = backend.where(zero, backend.full((n,), 0, backend.dtype(indices)), indices)
    outside = require_in_range(backend, indices, rows)
    dropped = outside if zero is False else outside | zero
    indices = backend.where(dropped, backend.full((n,), rows, INT32), backend.cast(indices, INT32))
    running = backend.dtype(table.values)
    merged = distinct(backend, indices, backend.cast(slices.values, running), rows, min(n, size))
    outside_count = backend.total(backend.cast(outside, INT32))
    lost = backend.maximum(outside_count, _excess(backend, merged, size))
    values = backend.cast(weighted(backend, merged.values, weight, running), running)
    return RowTable(values, merged.indices, lost, table.extent)


def _excess(backend: Backend, distinct_rows: Distinct, size: int) -> Array:
    """The number of distinct rows beyond the capacity; raises for them if it is known."""
    zero = backend.full((), 0, INT32)
    count = backend.concrete(distinct_rows.count)
    if count is not None and count > size:
        raise invalid(f"at most {size} different rows (the capacity)", int(count))
    return backend.maximum(distinct_rows.count - size, zero)


def result(backend: Backend, table: RowTable, finished: Array) -> RowSparse:
    """The rows with these values, and +0 in the padding; all values are NaN if a row was lost.

    In that case the padding becomes the last row, so that a result without rows shows the NaN, too.
    """
    rows, (size, *rest), output = table.extent.rows, backend.shape(finished), backend.dtype(finished)
    padding = table.indices >= backend.full((), rows, INT32)
    lost = table.lost > backend.full((), 0, INT32)
    values = backend.where(across(padding, len(rest)), backend.full((), 0, output), finished)
    values = backend.where(lost, backend.full((), float("nan"), output), values)
    last = backend.full((size,), rows - 1, INT32)
    return RowSparse(backend.where(padding & lost, last, table.indices), values, table.extent)


@dataclass(frozen=True)
class Rows(Settings, Cell):
    """A cell whose accumulator is a `RowTable`.

    Attributes:
      divides: whether the result is divided by the sum of weights.
      capacity: the maximal number of distinct rows of a table.
      overflow: the handling of more rows.
      settings: the dtypes of accumulator and result.
    """

    name: str
    divides: bool
    capacity: int
    overflow: Overflow
    settings: dtypes.Settings
    kinds: tuple[str, ...] = ("float", "complex")

    is_leaf = staticmethod(is_row_sparse)

    def arrays(self, leaf: Leaf) -> tuple[Array, ...]:
        slices = row_slices(leaf)
        return (leaf,) if slices is None else (slices.values, slices.indices)

    def shape(self, leaf: Leaf) -> tuple[int, ...]:
        slices = row_slices(leaf)
        if isinstance(leaf, RowTable):
            return leaf.shape
        shape = shape_of(leaf if slices is None else slices.values)
        if not shape or (slices is not None and slices.rows is None):
            raise invalid("a leaf with a known number of rows", f"shape {shape}")
        return shape if slices is None or slices.rows is None else (slices.rows, *shape[1:])

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> RowTable:
        rows, *rest = shape
        if not 1 <= rows <= MOST_ROWS:
            raise invalid(f"from 1 to {MOST_ROWS} rows", rows)
        size = min(self.capacity, rows)
        return RowTable(
            backend.full((size, *rest), -0.0, running, [like]),
            backend.full((size,), rows, INT32, [like]),
            backend.full((), 0, INT32, [like]),
            tree.static_rows(rows),
        )

    def checked(self, backend: Backend, a: RowTable, made_for: np.dtype, leaf: Leaf) -> RowSlices:
        slices = row_slices(leaf)
        if slices is None:
            expected = "a RowSparse, tf.IndexedSlices or BCOO (sparse_as_dense also takes dense arrays)"
            raise invalid(expected, "a dense array")
        # An unknown number of rows is assumed to be that of the state.
        rows = a.extent.rows if slices.rows is None else slices.rows
        received = (rows, *shape_of(slices.values)[1:])
        if received != a.shape:
            raise invalid(f"rows of shape {a.shape}", received)
        if (dtype := dtype_of(slices.values)) != made_for:
            self.require_dtype(made_for, dtype)
        return slices

    def update(self, backend: Backend, a: RowTable, x: RowSlices, weight: Weight, totals: Totals) -> RowTable:
        table = single(backend, a, x, weight)
        return a if table is None else self.merge(backend, a, table, totals, totals)

    def masked(self, backend: Backend, zero: Array, old: RowTable, new: RowTable) -> RowTable:
        # `single` drops the rows of a contribution of weight 0, so `new` has the rows of `old`.
        return new

    def merge(self, backend: Backend, a: RowTable, b: RowTable, a_totals: Totals, b_totals: Totals) -> RowTable:
        # With the capacity of the first table. The value of a row in both is a + b.
        rows, size = a.extent.rows, backend.shape(a.indices)[0]
        both = union(backend, (a.indices, a.values), (b.indices, b.values), rows, size)
        lost = backend.maximum(backend.maximum(a.lost, b.lost), _excess(backend, both, size))
        if self.overflow == "check":
            expected = f"at most {size} different rows, all in range"
            backend.check(lost == 0, self.name, expected, "more, or an index out of range")
        return RowTable(both.values, both.indices, lost, a.extent)

    def finish(self, backend: Backend, a: RowTable, totals: Totals, output: np.dtype) -> RowSparse:
        return result(backend, a, backend.cast(finished(backend, a.values, totals, self.divides), output))


class RowSumState(TreewiseState):
    """Row-sparse sums of ``w * g``."""


class RowMeanState(TreewiseState):
    """Row-sparse sums of ``w * g``, before the division."""


@operation("row_sum")
def row_sum(
    capacity: int,
    *,
    overflow: Overflow = "error",
    dtype: DType = None,
    output_dtype: DType = None,
    wire: Wire | None = None,
) -> Reduction:
    """The weighted sum of row-sparse gradients; stores and exchanges rows, never a dense array.

    Args:
      capacity: the maximal number of distinct rows of a leaf's state: those of all contributions over the entire window
        and all replicas. Memory, sorting and communication grow with it.
      overflow: the handling of more distinct rows in compiled code: ``"error"`` makes all values of the result NaN;
        ``"check"`` also adds a run-time check of the framework, as `checked` does for weights. If the indices are not
        traced, more rows always raise.
      dtype: the accumulator dtype. None: that of the contributions, but at least float32.
      output_dtype: the dtype of the result. None: that of the contributions.
      wire: the compression of the values between replicas, as for `sum`; they are gathered, and rounded once.

    Returns:
      A reduction of trees whose leaves are float or complex `gradcombine.sparse.RowSparse`, tf.IndexedSlices, BCOO or
      None. ``init`` takes such a tree, or the parameters as dense arrays or specs. The leaves of the result are
      `RowSparse`, with the rows in ascending order, then padding with the index ``rows`` and values of 0.

    Raises:
      GradCombineError: in ``update`` and ``merge`` as `sum`; for a dense contribution (see `sparse_as_dense`), for rows
        of another shape, for indices out of range, and for more distinct rows than the capacity. If the indices are
        traced, the latter two make the result NaN instead.

    Bits: determined by the contributions and their order, on every backend, eager and compiled. Duplicate rows of a
    contribution are added first, in the canonical tree and in the accumulator dtype; their sum times the weight is one
    term of the row, and terms are added as by `sum`. Replicas are always gathered and merged in the canonical tree over
    the ranks.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> a = sparse.row_sparse(np.int32([7, 2, 7]), np.float32([[1], [2], [3]]), rows=1000)
    >>> b = sparse.row_sparse(np.int32([2]), np.float32([[5]]), rows=1000)
    >>> out = gc.combine(gc.reductions.row_sum(capacity=3), [a, b], weights=[1, 10])
    >>> out.indices.tolist(), out.values.ravel().tolist()
    ([2, 7, 1000], [52.0, 4.0, 0.0])
    """
    settings = dtypes.Settings(dtype, output_dtype)
    cell = Rows("row_sum", False, capacity, overflow, settings)
    return Treewise(cell, RowSumState, wire=wire, capacity=cell.capacity, overflow=overflow)


@operation("row_mean")
def row_mean(
    capacity: int,
    *,
    overflow: Overflow = "error",
    dtype: DType = None,
    output_dtype: DType = None,
    wire: Wire | None = None,
) -> Reduction:
    """The weighted mean of row-sparse gradients, divided once, after all merging.

    Every contribution counts for every row, as 0 if it does not have the row: the result is that of `mean` of the dense
    gradients.

    Args:
      capacity, overflow, dtype, output_dtype, wire: as for `row_sum`.

    Returns:
      A reduction as for `row_sum`.

    Raises:
      GradCombineError: as `row_sum`.

    Bits: as for `row_sum`; the quotient is correctly rounded on CPU.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> a = sparse.row_sparse(np.int32([2]), np.float32([[4]]), rows=1000)
    >>> b = sparse.row_sparse(np.int32([7]), np.float32([[8]]), rows=1000)
    >>> out = gc.combine(gc.reductions.row_mean(capacity=2), [a, b], weights=[1, 3])
    >>> out.indices.tolist(), out.values.ravel().tolist()
    ([2, 7], [1.0, 6.0])
    """
    settings = dtypes.Settings(dtype, output_dtype)
    cell = Rows("row_mean", True, capacity, overflow, settings)
    details = {"capacity": cell.capacity, "overflow": overflow}
    return Treewise(cell, RowMeanState, wire=wire, scales_by_weight=True, divides=True, **details)
