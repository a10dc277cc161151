"""The row-sparse leaf, in NumPy, JAX and TensorFlow alike."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.backends.registry import loaded, owner, resolve
from gradcombine.errors import GradCombineError, renamed, require_integer
from gradcombine.types import Array, no_autograph

INT32 = np.dtype(np.int32)
MOST_ROWS = np.iinfo(np.int32).max - 1
"""Rows are sorted by int32 indices, and padding needs one more."""


class RowSparse(NamedTuple):
    """An array of shape (rows, ...) that is 0 except in some rows; made by `row_sparse`.

    A plain tree of arrays: it passes through jit, scan, shard_map and tf.function and its loops, and into files.

    Attributes:
      indices: integers of shape (n,), from 0 to rows. A row may occur several times: its values are added. The index
        ``rows``, one past the last, marks padding, which counts for nothing.
      values: of shape (n, ...).
      extent: the number of rows, as a constant in the structure (`gradcombine.tree.static_rows`), which every compiler
        knows.
    """

    indices: Array
    values: Array
    extent: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (self.extent.rows, *map(int, self.values.shape[1:]))


@no_autograph
def row_sparse(indices: Array, values: Array, rows: int) -> RowSparse:
    """Makes a `RowSparse` of rows and their indices.

    Args:
      indices: integers of shape (n,), from 0 to rows - 1; ``rows`` marks padding.
      values: of shape (n, ...).
      rows: the number of rows of the whole array.

    Raises:
      GradCombineError: for shapes and dtypes that do not fit, and where indices are known for one out of range.

    >>> import numpy as np
    >>> from gradcombine import sparse
    >>> sparse.to_dense(sparse.row_sparse(np.int32([2, 0, 2]), np.float32([[1], [5], [3]]), rows=3))
    array([[5.],
           [0.],
           [4.]], dtype=float32)
    """
    count = require_integer("row_sparse", f"a number of rows from 1 to {MOST_ROWS}", rows, highest=MOST_ROWS)
    backend = resolve("row_sparse", [indices, values])
    with renamed("row_sparse"):
        indices, values = backend.asarray(indices), backend.asarray(values)
    made = RowSparse(indices, values, tree.static_rows(count))
    slices = require_rows("row_sparse", backend, RowSlices(made.indices, made.values, count))
    require_in_range("row_sparse", backend, slices.indices, count)
    return made


def row_slices(leaf: Any) -> RowSlices | None:
    """The parts of a `RowSparse` and of what the loaded frameworks have for it; None for anything else."""
    if isinstance(leaf, RowSparse):
        rows = getattr(leaf.extent, "rows", None)
        if rows is None or owner(leaf.indices) is None or owner(leaf.values) is None:
            expected = "arrays as indices and values, and a constant as extent"
            raise GradCombineError("RowSparse", expected, ", ".join(type(part).__name__ for part in leaf))
        return RowSlices(leaf.indices, leaf.values, rows)
    found = (backend.row_slices(leaf) for backend in loaded())
    return next((slices for slices in found if slices is not None), None)


def is_row_sparse(leaf: Any) -> bool:
    """Whether a leaf holds some rows only: a `RowSparse`, tf.IndexedSlices or BCOO."""
    return isinstance(leaf, RowSparse) or any(backend.row_slices(leaf) is not None for backend in loaded())


def require_rows(operation: str, backend: Backend, slices: RowSlices, path: str = "") -> RowSlices:
    """The slices as arrays of this backend, whose shapes and dtypes fit one another."""
    with renamed(operation, path):
        indices, values = backend.asarray(slices.indices), backend.asarray(slices.values)
        dtype, positions, shape = np.dtype(backend.dtype(indices)), backend.shape(indices), backend.shape(values)
    if dtype.kind not in "iu" or len(positions) != 1:
        raise GradCombineError(operation, "integer indices of shape (n,)", f"{dtype} of shape {positions}", path)
    if shape[:1] != positions:
        raise GradCombineError(operation, f"values of {positions[0]} rows, one an index", f"shape {shape}", path)
    return RowSlices(indices, values, slices.rows)


def require_in_range(operation: str, backend: Backend, indices: Array, rows: int, path: str = "") -> Array:
    """Whether any index is out of range, a boolean scalar while tracing; an error where that is known."""
    dtype = backend.dtype(indices)
    lowest, highest = (backend.full((), bound, dtype) for bound in (0, min(rows, np.iinfo(dtype).max)))
    outside = (indices < lowest) | (indices > highest)
    known = backend.concrete(outside)
    if known is not None and known.any():
        wrong = np.asarray(backend.concrete(indices))[known]
        raise GradCombineError(operation, f"indices from 0 to {rows}", int(wrong[0]), path)
    return outside
