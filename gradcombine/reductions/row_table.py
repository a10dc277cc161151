"""One leaf's row-sparse accumulator: a table of the rows that occurred."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.accumulator import shape_of
from gradcombine.reductions.cell import described, dtype_of, weighted
from gradcombine.reductions.weights import Weight
from gradcombine.sparse.distinct import Distinct, across, distinct
from gradcombine.sparse.leaf import MOST_ROWS, RowSparse, extent, require_in_range, require_rows, row_slices
from gradcombine.sparse.union import union
from gradcombine.types import Array

_INT32 = dtypes.INT32


class RowTable(NamedTuple):
    """The rows that occurred, each once.

    Attributes:
      indices: int32 of shape (capacity,), ascending; then padding, the index one past the last row.
      values: of shape (capacity, ...); -0 where there is padding, for the reason that `sum` begins with it.
      lost: int32 scalar: not 0 where compiled code met more different rows than there is room for, or an index out of
        range.
      extent: an empty array of shape (rows, 0) and the dtype of the result.
    """

    indices: Array
    values: Array
    lost: Array
    extent: Array


def table_for(
    operation: str, backend: Backend, leaf: Any, capacity: int, settings: dtypes.Settings, path: str
) -> RowTable:
    """The empty table for contributions like a row-sparse leaf, or for the gradient of a dense one."""
    slices = row_slices(leaf)
    values = leaf if slices is None else slices.values
    shape, dtype = shape_of(operation, values, path), described(values).dtype(values)
    if dtypes.kind(dtype) not in ("float", "complex"):
        raise GradCombineError(operation, "a dtype that is float or complex", dtype, path)
    if not shape or (slices is not None and slices.rows is None):
        raise GradCombineError(operation, "a leaf with a known number of rows", f"shape {shape}", path)
    rows = shape[0] if slices is None or slices.rows is None else slices.rows
    if not 1 <= rows <= MOST_ROWS:
        raise GradCombineError(operation, f"from 1 to {MOST_ROWS} rows", rows, path)
    size = min(capacity, rows)
    running, output = settings.running(dtype), settings.output(dtype)
    return _empty(backend, size, rows, shape[1:], running, [values], extent(backend, rows, [values], output))


def empty_table(backend: Backend, table: RowTable) -> RowTable:
    """The empty table of the same shapes."""
    size, *shape = backend.shape(table.values)
    rows = backend.shape(table.extent)[0]
    return _empty(backend, size, rows, tuple(shape), dtype_of(table.values), [table.values], table.extent)


def _empty(
    backend: Backend, size: int, rows: int, shape: tuple[int, ...], running: Any, like: list[Any], limits: Array
) -> RowTable:
    return RowTable(
        backend.full((size,), rows, _INT32, like),
        backend.full((size, *shape), -0.0, running, like),
        backend.full((), 0, _INT32, like),
        limits,
    )


def single(
    operation: str, backend: Backend, table: RowTable, slices: RowSlices, weight: Weight, path: str
) -> RowTable | None:
    """One contribution as a table: each row once, times its weight; None for one without rows.

    Raises:
      GradCombineError: for an index out of range, and for more different rows than the table holds, where known.
    """
    rows, size = backend.shape(table.extent)[0], backend.shape(table.indices)[0]
    slices = require_rows(operation, backend, slices, path)
    n = backend.shape(slices.indices)[0]
    if n == 0:
        return None
    zero = weight.is_zero(backend)
    inside = slices.indices
    if not isinstance(zero, bool):
        # Whatever a contribution of weight 0 holds, it has no rows.
        inside = backend.where(zero, backend.full((n,), 0, backend.dtype(inside)), inside)
    outside = require_in_range(operation, backend, inside, rows, path)
    left_out = outside if isinstance(zero, bool) else outside | zero
    indices = backend.where(left_out, backend.full((n,), rows, _INT32), backend.cast(inside, _INT32))
    running = dtype_of(table.values)
    once = distinct(backend, indices, backend.cast(slices.values, running), rows, min(n, size))
    wrong = backend.total(backend.cast(outside, _INT32))
    lost = backend.maximum(wrong, _too_many(operation, backend, once, size, path))
    values = backend.cast(weighted(operation, backend, once.values, weight, running), running)
    return RowTable(once.indices, values, lost, table.extent)


def join(operation: str, backend: Backend, a: RowTable, b: RowTable, path: str) -> RowTable:
    """Two tables become one, of the first one's capacity: a row of both is ``a + b``.

    Raises:
      GradCombineError: for more different rows than the table holds, where known.
    """
    rows, size = backend.shape(a.extent)[0], backend.shape(a.indices)[0]
    both = union(backend, (a.indices, a.values), (b.indices, b.values), rows, size)
    lost = backend.maximum(backend.maximum(a.lost, b.lost), _too_many(operation, backend, both, size, path))
    return RowTable(both.indices, both.values, lost, a.extent)


def _too_many(operation: str, backend: Backend, found: Distinct, size: int, path: str) -> Array:
    """How many different rows there are above the capacity."""
    zero = backend.full((), 0, _INT32)
    known = backend.concrete(found.count)
    if known is not None and known > size:
        raise GradCombineError(operation, f"at most {size} different rows (the capacity)", int(known), path)
    return backend.maximum(found.count - size, zero)


def result(backend: Backend, table: RowTable, finish: Callable[[Array], Array]) -> RowSparse:
    """The rows as they leave: +0 where there is padding, NaN in every place where any row was lost.

    Where rows were lost padding becomes the last row, so that NaN shows wherever the result goes.
    """
    output = dtype_of(table.extent)
    rows, axes = backend.shape(table.extent)[0], len(backend.shape(table.values)) - 1
    finished = backend.cast(finish(table.values), output)
    size = backend.shape(table.indices)[0]
    padding = table.indices >= backend.full((), rows, _INT32)
    lost = table.lost > backend.full((), 0, _INT32)
    values = backend.where(across(padding, axes), backend.full((), 0, output), finished)
    values = backend.where(lost, backend.full((), float("nan"), output), values)
    last = backend.full((size,), rows - 1, _INT32)
    return RowSparse(backend.where(padding & lost, last, table.indices), values, table.extent)
