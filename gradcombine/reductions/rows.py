"""Row-sparse sum ``sum(w * g)`` and mean ``sum(w * g) / sum(w)``: in a table of the rows that occur."""

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
    """The rows that occurred, each once.

    Attributes:
      values: of shape (capacity, ...); -0 where there is padding, for the reason that `sum` begins with it.
      indices: int32 of shape (capacity,), ascending; then padding, the index one past the last row.
      lost: int32 scalar: not 0 where compiled code met more different rows than there is room for, or an index out of
        range.
      extent: the number of rows of the whole array, as a constant in the structure.
    """

    values: Array
    indices: Array
    lost: Array
    extent: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        rows = self.extent.rows if tree.is_static(self.extent) else None
        if rows is None:
            raise invalid("a constant number of rows", shown(self.extent))
        return (rows, *tuple(self.values.shape)[1:])

    @property
    def in_words(self) -> str:
        """Shape and capacity, which states must share to be merged."""
        return f"rows of an array of shape {self.shape}, with capacity {self.values.shape[0]}"


def empty_table(backend: Backend, size: int, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> RowTable:
    """The table of no rows, of an array of this shape."""
    rows, *rest = shape
    return RowTable(
        backend.full((size, *rest), -0.0, running, [like]),
        backend.full((size,), rows, INT32, [like]),
        backend.full((), 0, INT32, [like]),
        tree.static_rows(rows),
    )


def single(backend: Backend, table: RowTable, slices: RowSlices, weight: Weight) -> RowTable | None:
    """One contribution as a table: each row once, times its weight; None for one without rows.

    Raises:
      GradCombineError: for an index out of range, and for more different rows than the table holds, where known.
    """
    rows, size = table.extent.rows, backend.shape(table.indices)[0]
    slices = require_rows(backend, slices)
    n, zero = backend.shape(slices.indices)[0], weight.zero
    if n == 0 or zero is True:
        return None
    inside = slices.indices
    if zero is not False:
        # Whatever a contribution of weight 0 holds, it has no rows.
        inside = backend.where(zero, backend.full((n,), 0, backend.dtype(inside)), inside)
    outside = require_in_range(backend, inside, rows)
    left_out = outside if zero is False else outside | zero
    indices = backend.where(left_out, backend.full((n,), rows, INT32), backend.cast(inside, INT32))
    running = backend.dtype(table.values)
    once = distinct(backend, indices, backend.cast(slices.values, running), rows, min(n, size))
    wrong = backend.total(backend.cast(outside, INT32))
    lost = backend.maximum(wrong, _too_many(backend, once, size))
    values = backend.cast(weighted(backend, once.values, weight, running), running)
    return RowTable(values, once.indices, lost, table.extent)


def join(backend: Backend, a: RowTable, b: RowTable) -> RowTable:
    """Two tables become one, of the first one's capacity: a row of both is ``a + b``.

    Raises:
      GradCombineError: for more different rows than the table holds, where known.
    """
    rows, size = a.extent.rows, backend.shape(a.indices)[0]
    both = union(backend, (a.indices, a.values), (b.indices, b.values), rows, size)
    lost = backend.maximum(backend.maximum(a.lost, b.lost), _too_many(backend, both, size))
    return RowTable(both.values, both.indices, lost, a.extent)


def _too_many(backend: Backend, distinct_rows: Distinct, size: int) -> Array:
    """How many different rows there are above the capacity."""
    zero = backend.full((), 0, INT32)
    known = backend.concrete(distinct_rows.count)
    if known is not None and known > size:
        raise invalid(f"at most {size} different rows (the capacity)", int(known))
    return backend.maximum(distinct_rows.count - size, zero)


def result(backend: Backend, table: RowTable, finished: Array) -> RowSparse:
    """The rows as they leave, with these values: +0 where there is padding, NaN everywhere where any row was lost.

    Where rows were lost padding becomes the last row, so that NaN shows wherever the result goes.
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
    """An accumulator that is a `RowTable`.

    Attributes:
      divides: whether the values leave as they are over the sum of weights.
      capacity: how many different rows a table holds.
      overflow: what happens to one row too many.
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
        if not 1 <= shape[0] <= MOST_ROWS:
            raise invalid(f"from 1 to {MOST_ROWS} rows", shape[0])
        return empty_table(backend, min(self.capacity, shape[0]), shape, running, like)

    def entering(self, backend: Backend, a: RowTable, made_for: np.dtype, leaf: Leaf) -> RowSlices:
        slices = row_slices(leaf)
        if slices is None:
            expected = "a RowSparse, tf.IndexedSlices or BCOO (for dense ones as well: sparse_as_dense)"
            raise invalid(expected, "a dense array")
        # Slices that do not know the number of rows are taken for rows of the whole array that the state was made for.
        rows = a.extent.rows if slices.rows is None else slices.rows
        received = (rows, *shape_of(slices.values)[1:])
        if received != a.shape:
            raise invalid(f"rows of shape {a.shape}", received)
        if (dtype := dtype_of(slices.values)) != made_for:
            self.require_dtype(made_for, dtype)
        return slices

    def update(self, backend: Backend, a: RowTable, x: RowSlices, weight: Weight, totals: Totals) -> RowTable:
        added = single(backend, a, x, weight)
        return a if added is None else self._joined(backend, a, added)

    def masked(self, backend: Backend, zero: Array, old: RowTable, new: RowTable) -> RowTable:
        # A contribution of weight 0 has no rows, so there is no need to go through the table again.
        return new

    def merge(self, backend: Backend, a: RowTable, b: RowTable, a_totals: Totals, b_totals: Totals) -> RowTable:
        return self._joined(backend, a, b)

    def _joined(self, backend: Backend, a: RowTable, b: RowTable) -> RowTable:
        table = join(backend, a, b)
        if self.overflow == "check":
            size = backend.shape(table.indices)[0]
            expected = f"at most {size} different rows, all in range"
            backend.check(table.lost == 0, self.name, expected, "more, or an index out of range")
        return table

    def finish(self, backend: Backend, a: RowTable, totals: Totals, output: np.dtype) -> RowSparse:
        return result(backend, a, backend.cast(finished(backend, a.values, totals, self.divides), output))


class RowSumState(TreewiseState):
    """Rows of sums of ``w * g``."""


class RowMeanState(TreewiseState):
    """Rows of sums of ``w * g``, not divided yet."""


@operation("row_sum")
def row_sum(
    capacity: int,
    *,
    overflow: Overflow = "error",
    dtype: DType = None,
    output_dtype: DType = None,
    wire: Wire | None = None,
) -> Reduction:
    """The weighted sum of row-sparse gradients, held as rows: never a dense array, in a window or between replicas.

    Args:
      capacity: how many different rows a state holds, in each leaf: as many as occur in all contributions that are
        combined, over the whole window and all replicas. Memory, sorting and exchange grow with it.
      overflow: where more rows occur than that, known indices always raise before anything is lost. In compiled code
        ``"error"`` gives NaN in every value of the result; ``"check"`` adds the framework's own run-time check, as
        `checked` does for weights.
      dtype: of the accumulators. None: the contributions' own, float32 for narrower floats.
      output_dtype: of the result. None: the contributions' own.
      wire: how replicas send the values, as for `sum`: gathered, and rounded once.

    Returns:
      A reduction of trees whose leaves are float or complex `gradcombine.sparse.RowSparse`, tf.IndexedSlices, BCOO or
      None. ``init`` takes such a tree, or one of dense arrays or specs: the parameters. The result has a `RowSparse` in
      each place, with rows in ascending order, then padding: the index ``rows``, whose values are 0.

    Raises:
      GradCombineError: in ``update`` and ``merge``, besides the errors of `sum`: for a dense contribution (see
        `sparse_as_dense`), for rows of another shape, for known indices out of range (traced ones make the result NaN,
        as overflow does), and for more different rows than fit.

    Bits: the same for the same contributions in the same order, on every backend, eager and compiled. The occurrences
    of a row in one contribution are added first, in the canonical tree and the accumulator's dtype; their sum, times
    the weight, is one term of the row, and the terms are added as `sum` adds elements. Replicas are gathered, and
    merged in the tree over ranks, in either order.

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
    """The weighted mean of row-sparse gradients, held as rows, and divided once, after all merging.

    Every contribution counts for every row, with 0 where it does not hold the row: the rows of the result are those of
    `mean` of the dense gradients.

    Args:
      capacity, overflow, dtype, output_dtype, wire: as for `row_sum`.

    Returns:
      A reduction as `row_sum` is; its state holds the sum of weights as well.

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
    own = {"capacity": cell.capacity, "overflow": overflow}
    return Treewise(cell, RowMeanState, wire=wire, scales_by_weight=True, divides=True, **own)
