"""Row-sparse arrays, such as gradients of embeddings, in NumPy, JAX and TensorFlow.

Duplicate rows are added in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.backends.registry import in_words, loaded, owner, resolve
from gradcombine.errors import invalid, operation, require_equal, require_given, require_integer
from gradcombine.formats import holds_numbers
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Tree

__all__ = ["RowSparse", "add_rows", "densify", "row_sparse", "to_dense"]

INT32 = np.dtype(np.int32)
MOST_ROWS = np.iinfo(np.int32).max - 1
"""Indices are sorted as int32, and padding needs one more index."""


class RowSparse(NamedTuple):
    """An array of shape (rows, ...) of which only some rows are stored; the others are 0. Made by `row_sparse`.

    A pytree of arrays: it can pass through jit, scan, shard_map and tf.function (and its loops), and into files.

    Attributes:
      indices: integers of shape (n,), from 0 to rows. The values of duplicate indices are added. The index ``rows``,
        one past the last, marks padding, whose values are ignored.
      values: array of shape (n, ...).
      extent: the number of rows, as a constant in the structure (`gradcombine.tree.static_rows`), so that it is static
        in compiled functions.
    """

    indices: Array
    values: Array
    extent: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense array."""
        return (self.extent.rows, *map(int, self.values.shape[1:]))


@operation("row_sparse")
def row_sparse(indices: Array, values: Array, rows: int) -> RowSparse:
    """Makes a `RowSparse` from indices and values.

    Args:
      indices: integers of shape (n,), from 0 to rows - 1; ``rows`` marks padding.
      values: array of shape (n, ...).
      rows: the number of rows of the dense array.

    Raises:
      GradCombineError: for invalid shapes and dtypes, and for an index out of range unless the indices are traced.

    >>> import numpy as np
    >>> from gradcombine import sparse
    >>> sparse.to_dense(sparse.row_sparse(np.int32([2, 0, 2]), np.float32([[1], [5], [3]]), rows=3))
    array([[5.],
           [0.],
           [4.]], dtype=float32)
    """
    count = require_integer(f"a number of rows from 1 to {MOST_ROWS}", rows, highest=MOST_ROWS)
    backend = resolve([indices, values])
    indices, values = backend.asarray(indices), backend.asarray(values)
    slices = require_rows(backend, RowSlices(indices, values, count))
    require_in_range(backend, slices.indices, count)
    return RowSparse(indices, values, tree.static_rows(count))


def row_slices(leaf: Leaf) -> RowSlices | None:
    """The parts of a `RowSparse` or of a row-sparse array of a loaded framework; None for other leaves."""
    if isinstance(leaf, RowSparse):
        rows = getattr(leaf.extent, "rows", None)
        if rows is None or rows < 0 or owner(leaf.indices) is None or owner(leaf.values) is None:
            expected = "arrays as indices and values, and a constant as extent"
            raise invalid(expected, ", ".join(type(part).__name__ for part in leaf))
        return RowSlices(leaf.indices, leaf.values, rows)
    candidates = (backend.row_slices(leaf) for backend in loaded())
    return next((slices for slices in candidates if slices is not None), None)


def is_row_sparse(leaf: Leaf) -> bool:
    """Whether a leaf is row-sparse: a `RowSparse`, tf.IndexedSlices or BCOO."""
    return isinstance(leaf, RowSparse) or any(backend.row_slices(leaf) is not None for backend in loaded())


def require_dense(structure: tree.Structure) -> None:
    """Raises for a sparse container, whose leaves include indices: they must not be combined like gradients."""
    for path, kind in structure.containers():
        if kind is RowSparse or kind.__module__.startswith("jax.experimental.sparse"):
            expected = "dense arrays (of sparse rows: reductions.row_sum, row_mean or sparse_as_dense)"
            raise invalid(expected, kind.__name__, path or "(root)")


def require_rows(backend: Backend, slices: RowSlices) -> RowSlices:
    """Converts the slices to arrays of this backend; raises for shapes and dtypes that do not match."""
    indices, values = backend.asarray(slices.indices), backend.asarray(slices.values)
    dtype, vector, shape = np.dtype(backend.dtype(indices)), backend.shape(indices), backend.shape(values)
    if dtype.kind not in "iu" or len(vector) != 1:
        raise invalid("integer indices of shape (n,)", f"{dtype} of shape {vector}")
    if not holds_numbers(np.dtype(backend.dtype(values))):
        raise invalid("values that are numbers", backend.dtype(values))
    require_equal("values of {} rows, one per index", vector[0], shape[0] if shape else 0)
    return RowSlices(indices, values, slices.rows)


def require_in_range(backend: Backend, indices: Array, rows: int) -> Array:
    """Raises for an index out of range; while tracing, returns the mask of the indices that are."""
    dtype = backend.dtype(indices)
    lowest, highest = (backend.full((), bound, dtype) for bound in (0, min(rows, np.iinfo(dtype).max)))
    outside = (indices < lowest) | (indices > highest)
    mask = backend.concrete(outside)
    if mask is not None and mask.any():
        wrong = np.asarray(backend.concrete(indices))[mask]
        raise invalid(f"indices from 0 to {rows}", int(wrong[0]))
    return outside


class Distinct(NamedTuple):
    """Rows without duplicates.

    Attributes:
      indices: int32 of shape (size,), ascending; then padding, the index ``rows``.
      values: array of shape (size, ...); -0 in the padding.
      count: int32 scalar, the number of distinct rows in the input. If it exceeds ``size``, the last rows are missing.
    """

    indices: Array
    values: Array
    count: Array


def distinct(backend: Backend, indices: Array, values: Array, rows: int, size: int) -> Distinct:
    """Sorts rows and adds the values of duplicates in the canonical tree.

    The tree takes log2(k) passes over the values if the most frequent row occurs k times; a sequential sum would take
    k. The frameworks' segment sums are not used because their order of additions is not defined.

    Args:
      indices: int32 of shape (n,) with n >= 1, from 0 to rows; the index ``rows`` is padding.
      values: array of shape (n, ...).
      rows: the number of rows of the dense array.
      size: the number of rows to keep, at most n.
    """
    n, shape = backend.shape(indices)[0], backend.shape(values)[1:]
    order = backend.argsort(indices)
    ordered = backend.take(indices, order)
    here = backend.asarray(np.arange(n, dtype=np.int32))
    valid = ordered < backend.full((), rows, INT32)
    previous = backend.concat([backend.full((1,), -1, INT32, [indices]), ordered[:-1]])
    first = (ordered > previous) & valid
    # A run is a range of equal indices; run r, from 0, starts at starts[r].
    runs = backend.cumsum(backend.cast(first, INT32))
    past_end = backend.full((n,), n, INT32)
    starts = backend.put(backend.full((n,), 0, INT32, [indices]), backend.where(first, runs - 1, past_end), here)
    position = here - backend.take(starts, backend.maximum(runs - 1, backend.full((n,), 0, INT32)))
    added = _add_runs(backend, ordered, position, here, valid, backend.take(values, order))
    filled, kept = here[:size] < runs[-1], starts[:size]
    zeros = backend.full((size, *shape), -0.0, backend.dtype(values))
    return Distinct(
        backend.where(filled, backend.take(ordered, kept), backend.full((size,), rows, INT32)),
        backend.where(across(filled, len(shape)), backend.take(added, kept), zeros),
        runs[-1],
    )


def across(vector: Array, axes: int) -> Array:
    """Appends ``axes`` axes of length 1."""
    return vector[(slice(None), *[None] * axes)]


def _add_runs(backend: Backend, ordered: Array, position: Array, here: Array, valid: Array, values: Array) -> Array:
    """Sums each run of equal indices into its first element, in the canonical tree over the run.

    Each iteration adds the element ``span`` further on, if it has the same index, and doubles ``span``.
    """
    n, axes = backend.shape(ordered)[0], len(backend.shape(values)) - 1

    def has_longer_run(span: Array, values: Array) -> Array:
        return backend.total(backend.cast(valid & (position >= span), INT32)) > 0

    def add_pairs(span: Array, values: Array) -> tuple[Array, Array]:
        later = here + span
        clamped = _at_most(backend, later, n - 1)
        same = (backend.take(ordered, clamped) == ordered) & (later == clamped)
        return span * 2, backend.where(across(same, axes), backend.add(values, backend.take(values, clamped)), values)

    return backend.loop(has_longer_run, add_pairs, backend.full((), 1, INT32), values)[1]


def union(backend: Backend, a: tuple[Array, Array], b: tuple[Array, Array], rows: int, size: int) -> Distinct:
    """Merges two sorted tables of distinct rows; the value of a row in both is ``a + b``.

    Computes for each row of the result where it comes from, so that all values are read and written once.

    Args:
      a, b: indices and values as in `Distinct`.
      rows: the number of rows of the dense array.
      size: the number of rows to keep.
    """
    (a_indices, a_values), (b_indices, b_values) = a, b
    m, n, shape = backend.shape(a_indices)[0], backend.shape(b_indices)[0], backend.shape(a_values)[1:]
    end, zero = backend.full((), rows, INT32), backend.full((n,), 0, INT32)
    a_count = backend.total(backend.cast(a_indices < end, INT32))
    smaller = backend.search_sorted(a_indices, b_indices)
    shared = backend.take(a_indices, _at_most(backend, smaller, m - 1)) == b_indices
    present = b_indices < end
    only_b = backend.cast(present & ~shared, INT32)
    only_b_count = backend.cumsum(only_b)
    # Position in the result of each row of b. `put` drops positions past the end.
    past_end = backend.full((n,), size, INT32)
    position = backend.where(present, smaller + only_b_count - only_b, past_end)
    here = backend.asarray(np.arange(size, dtype=np.int32))
    like = [a_indices]
    none = backend.full((size,), n, INT32, like)
    b_from = backend.put(none, position, backend.asarray(np.arange(n, dtype=np.int32)))
    from_b_only = backend.where(only_b > zero, position, past_end)
    taken = backend.put(backend.full((size,), 0, INT32, like), from_b_only, only_b)
    a_from = here - backend.cumsum(taken)
    in_a, in_b = (taken == 0) & (a_from < a_count), b_from < none
    a_from, b_from = backend.where(in_a, a_from, here * 0), _at_most(backend, b_from, n - 1)
    left, right = backend.take(a_values, a_from), backend.take(b_values, b_from)
    from_a, from_b = across(in_a, len(shape)), across(in_b, len(shape))
    zeros = backend.full((size, *shape), -0.0, backend.dtype(a_values))
    either = backend.where(from_a, left, backend.where(from_b, right, zeros))
    padding = backend.full((size,), rows, INT32)
    b_or_padding = backend.where(in_b, backend.take(b_indices, b_from), padding)
    return Distinct(
        backend.where(in_a, backend.take(a_indices, a_from), b_or_padding),
        backend.where(from_a & from_b, backend.add(left, right), either),
        a_count + only_b_count[-1],
    )


def _at_most(backend: Backend, positions: Array, last: int) -> Array:
    limit = backend.full(backend.shape(positions), last, INT32)
    return backend.where(positions > limit, limit, positions)


@operation("to_dense")
def to_dense(rows: Leaf) -> Array:
    """Converts a `RowSparse`, tf.IndexedSlices or BCOO leaf to a dense array.

    Returns:
      An array of the values' dtype, in which duplicate rows are added.

    Raises:
      GradCombineError: for another type, for an unknown number of rows, and for an index out of range. Rows with a
        traced index out of range are dropped.

    Bits: duplicate rows are added in the canonical tree, in their order in ``indices``.

    >>> import numpy as np
    >>> from gradcombine import sparse
    >>> sparse.to_dense(sparse.row_sparse(np.int32([1, 1]), np.float32([3, 4]), rows=2))
    array([0., 7.], dtype=float32)
    """
    slices = _required_slices(rows)
    extent = require_given("a known number of rows", slices.rows, "a dense_shape that is not static")
    backend = resolve([slices.indices, slices.values])
    shape = (extent, *backend.shape(slices.values)[1:])
    dtype = backend.dtype(slices.values)
    if not holds_numbers(dtype):
        raise invalid("values of a dtype of numbers", dtype)
    zeros = backend.full(shape, 0, dtype)
    merged = _without_duplicates(backend, slices, extent)
    return zeros if merged is None else backend.put(zeros, *merged)


@operation("densify")
def densify(values: Tree) -> Tree:
    """Applies `to_dense` to the row-sparse leaves of a tree.

    Needed before adding sparse and dense contributions, which tf.AggregationMethod converts automatically.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> rows = sparse.row_sparse(np.int32([1]), np.float32([3]), rows=2)
    >>> gc.add_n(map(sparse.densify, [rows, np.float32([1, 1])]))
    array([1., 4.], dtype=float32)
    """
    return tree.map(lambda leaf: to_dense(leaf) if is_row_sparse(leaf) else leaf, values, is_leaf=is_row_sparse)


@operation("add_rows")
def add_rows(table: Array, rows: Leaf, unique: bool = False) -> Array:
    """Computes ``table + to_dense(rows)``, reading and writing only the stored rows.

    JAX updates a donated table in place. For a tf.Variable, use ``scatter_add`` of tf.IndexedSlices instead.

    Args:
      table: an array of shape (rows, ...).
      rows: a `RowSparse`, tf.IndexedSlices or BCOO of that shape; its values are cast to the table's dtype.
      unique: promises that there are no duplicate rows, as in the results of `row_sum` and `row_mean`, which avoids
        sorting. If there are, an undefined one of their values is added.

    Raises:
      GradCombineError: for different shapes, and for an index out of range unless the indices are traced.

    Bits: one addition per row, of the sum of its values, which are added as in `to_dense`.

    >>> import numpy as np
    >>> from gradcombine import sparse
    >>> sparse.add_rows(np.float32([1, 2]), sparse.row_sparse(np.int32([1]), np.float32([3]), rows=2))
    array([1., 5.], dtype=float32)
    """
    slices = _required_slices(rows)
    check(unique=unique)
    backend = resolve([table, slices.indices, slices.values])
    dense = backend.asarray(table)
    expected = backend.shape(dense)
    if not expected or not holds_numbers(np.dtype(backend.dtype(dense))):
        raise invalid("a table of numbers, of shape (rows, ...)", in_words(dense))
    received = (expected[0] if slices.rows is None else slices.rows, *backend.shape(slices.values)[1:])
    require_equal("rows of shape {}", expected, received)
    merged = _without_duplicates(backend, slices, expected[0], unique)
    if merged is None:
        return dense
    indices, values = merged
    clamped = _at_most(backend, indices, expected[0] - 1)
    changed = backend.add(backend.take(dense, clamped), backend.cast(values, backend.dtype(dense)))
    return backend.put(dense, indices, changed)


def _required_slices(leaf: Leaf) -> RowSlices:
    return require_given("a RowSparse, tf.IndexedSlices or BCOO", row_slices(leaf), type(leaf).__name__)


def _without_duplicates(
    backend: Backend, slices: RowSlices, rows: int, unique: bool = False
) -> tuple[Array, Array] | None:
    """Indices and values of distinct rows; indices out of range become padding. None if there are no rows."""
    slices = require_rows(backend, slices)
    outside = require_in_range(backend, slices.indices, rows)
    n = backend.shape(slices.indices)[0]
    if n == 0:
        return None
    indices = backend.where(outside, backend.full((n,), rows, INT32), backend.cast(slices.indices, INT32))
    return (indices, slices.values) if unique else distinct(backend, indices, slices.values, rows, n)[:2]
