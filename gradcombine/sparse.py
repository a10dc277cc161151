"""Arrays of which some rows are held, as gradients of embeddings are: in NumPy, JAX and TensorFlow alike.

Rows that occur several times are added, in a fixed order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend, RowSlices
from gradcombine.backends.registry import loaded, owner, resolve
from gradcombine.errors import invalid, operation, require_equal, require_given, require_integer, within
from gradcombine.formats.entry import holds_numbers
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Tree

__all__ = ["RowSparse", "add_rows", "densify", "row_sparse", "to_dense"]

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


@operation("row_sparse")
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
    count = require_integer(f"a number of rows from 1 to {MOST_ROWS}", rows, highest=MOST_ROWS)
    backend = resolve([indices, values])
    indices, values = backend.asarray(indices), backend.asarray(values)
    made = RowSparse(indices, values, tree.static_rows(count))
    slices = require_rows(backend, RowSlices(made.indices, made.values, count))
    require_in_range(backend, slices.indices, count)
    return made


def row_slices(leaf: Leaf) -> RowSlices | None:
    """The parts of a `RowSparse` and of what the loaded frameworks have for it; None for anything else."""
    if isinstance(leaf, RowSparse):
        rows = getattr(leaf.extent, "rows", None)
        if rows is None or rows < 0 or owner(leaf.indices) is None or owner(leaf.values) is None:
            expected = "arrays as indices and values, and a constant as extent"
            raise invalid(expected, ", ".join(type(part).__name__ for part in leaf))
        return RowSlices(leaf.indices, leaf.values, rows)
    candidates = (backend.row_slices(leaf) for backend in loaded())
    return next((slices for slices in candidates if slices is not None), None)


def is_row_sparse(leaf: Leaf) -> bool:
    """Whether a leaf holds some rows only: a `RowSparse`, tf.IndexedSlices or BCOO."""
    return isinstance(leaf, RowSparse) or any(backend.row_slices(leaf) is not None for backend in loaded())


def require_rows(backend: Backend, slices: RowSlices, path: str = "") -> RowSlices:
    """The slices as arrays of this backend, whose shapes and dtypes fit one another."""
    with within(path):
        indices, values = backend.asarray(slices.indices), backend.asarray(slices.values)
        dtype, positions, shape = np.dtype(backend.dtype(indices)), backend.shape(indices), backend.shape(values)
        if dtype.kind not in "iu" or len(positions) != 1:
            raise invalid("integer indices of shape (n,)", f"{dtype} of shape {positions}")
        if not holds_numbers(np.dtype(backend.dtype(values))):
            raise invalid("values that are numbers", backend.dtype(values))
        require_equal("values of {} rows, one an index", positions[0], shape[0] if shape else 0)
    return RowSlices(indices, values, slices.rows)


def require_in_range(backend: Backend, indices: Array, rows: int, path: str = "") -> Array:
    """Whether any index is out of range, a boolean scalar while tracing; an error where that is known."""
    dtype = backend.dtype(indices)
    lowest, highest = (backend.full((), bound, dtype) for bound in (0, min(rows, np.iinfo(dtype).max)))
    outside = (indices < lowest) | (indices > highest)
    known = backend.concrete(outside)
    if known is not None and known.any():
        wrong = np.asarray(backend.concrete(indices))[known]
        raise invalid(f"indices from 0 to {rows}", int(wrong[0]), path)
    return outside


class Distinct(NamedTuple):
    """Rows that occur once each.

    Attributes:
      indices: int32 of shape (size,), ascending; then padding, the index ``rows``.
      values: of shape (size, ...); -0 where there is padding.
      count: int32 scalar, how many different rows there were. More than ``size``: the last ones are missing here.
    """

    indices: Array
    values: Array
    count: Array


def distinct(backend: Backend, indices: Array, values: Array, rows: int, size: int) -> Distinct:
    """The different rows among some, sorted; the values of a row are added in the canonical tree.

    A tree because it takes log2 of the most frequent row's occurrences in passes over the values, where a chain would
    take as many passes as occurrences; and because a framework's own segment sum adds in an order of its own.

    Args:
      indices: int32 of shape (n,), n of 1 or more, from 0 to rows; the index ``rows`` is padding.
      values: of shape (n, ...).
      rows: the number of rows of the whole array.
      size: how many rows to keep, at most n.
    """
    n, shape = backend.shape(indices)[0], backend.shape(values)[1:]
    order = backend.argsort(indices)
    ordered = backend.take(indices, order)
    here = backend.asarray(np.arange(n, dtype=np.int32))
    valid = ordered < backend.full((), rows, INT32)
    before = backend.concat([backend.full((1,), -1, INT32, [indices]), ordered[:-1]])
    first = (ordered > before) & valid
    number = backend.cumsum(backend.cast(first, INT32))
    past = backend.full((n,), n, INT32)
    starts = backend.put(backend.full((n,), 0, INT32, [indices]), backend.where(first, number - 1, past), here)
    position = here - backend.take(starts, backend.maximum(number - 1, backend.full((n,), 0, INT32)))
    added = _add_runs(backend, ordered, position, here, valid, backend.take(values, order))
    filled, kept = here[:size] < number[-1], starts[:size]
    nothing = backend.full((size, *shape), -0.0, backend.dtype(values))
    return Distinct(
        backend.where(filled, backend.take(ordered, kept), backend.full((size,), rows, INT32)),
        backend.where(across(filled, len(shape)), backend.take(added, kept), nothing),
        number[-1],
    )


def across(condition: Array, axes: int) -> Array:
    """A vector with so many more axes of length 1."""
    return condition[(slice(None), *[None] * axes)]


def _add_runs(backend: Backend, ordered: Array, position: Array, here: Array, valid: Array, values: Array) -> Array:
    """In each place, the sum of the run of equal indices from there on, in the canonical tree that begins there."""
    n, axes = backend.shape(ordered)[0], len(backend.shape(values)) - 1
    last = backend.full((n,), n - 1, INT32)

    def longer(span: Array, values: Array) -> Array:
        return backend.total(backend.cast(valid & (position >= span), INT32)) > 0

    def pairs(span: Array, values: Array) -> tuple[Array, Array]:
        later = here + span
        inside = backend.where(later > last, last, later)
        same = (backend.take(ordered, inside) == ordered) & (later <= last)
        return span * 2, backend.where(across(same, axes), backend.add(values, backend.take(values, inside)), values)

    return backend.loop(longer, pairs, backend.full((), 1, INT32), values)[1]


def union(backend: Backend, a: tuple[Array, Array], b: tuple[Array, Array], rows: int, size: int) -> Distinct:
    """The rows of two tables, sorted; a row of both is ``a + b``.

    Each place of the result finds where its row comes from, so that all values are read and written once.

    Args:
      a, b: indices and values, as `Distinct` has them.
      rows: the number of rows of the whole array.
      size: how many rows to keep.
    """
    (a_indices, a_values), (b_indices, b_values) = a, b
    m, n, shape = backend.shape(a_indices)[0], backend.shape(b_indices)[0], backend.shape(a_values)[1:]
    end, zero = backend.full((), rows, INT32), backend.full((n,), 0, INT32)
    held = backend.total(backend.cast(a_indices < end, INT32))
    smaller = backend.search_sorted(a_indices, b_indices)
    shared = backend.take(a_indices, _at_most(backend, smaller, m - 1)) == b_indices
    present = b_indices < end
    new = backend.cast(present & ~shared, INT32)
    more = backend.cumsum(new)
    # Places past the end are left out.
    past = backend.full((n,), size, INT32)
    place = backend.where(present, smaller + more - new, past)
    here = backend.asarray(np.arange(size, dtype=np.int32))
    like = [a_indices]
    none = backend.full((size,), n, INT32, like)
    b_from = backend.put(none, place, backend.asarray(np.arange(n, dtype=np.int32)))
    taken = backend.put(backend.full((size,), 0, INT32, like), backend.where(new > zero, place, past), new)
    a_from = here - backend.cumsum(taken)
    in_a, in_b = (taken == 0) & (a_from < held), b_from < none
    a_from, b_from = backend.where(in_a, a_from, here * 0), _at_most(backend, b_from, n - 1)
    left, right = backend.take(a_values, a_from), backend.take(b_values, b_from)
    from_a, from_b = across(in_a, len(shape)), across(in_b, len(shape))
    nothing = backend.full((size, *shape), -0.0, backend.dtype(a_values))
    either = backend.where(from_a, left, backend.where(from_b, right, nothing))
    padding = backend.full((size,), rows, INT32)
    b_or_padding = backend.where(in_b, backend.take(b_indices, b_from), padding)
    return Distinct(
        backend.where(in_a, backend.take(a_indices, a_from), b_or_padding),
        backend.where(from_a & from_b, backend.add(left, right), either),
        held + more[-1],
    )


def _at_most(backend: Backend, positions: Array, last: int) -> Array:
    limit = backend.full(backend.shape(positions), last, INT32)
    return backend.where(positions > limit, limit, positions)


@operation("to_dense")
def to_dense(rows: Leaf) -> Array:
    """The whole array of a `RowSparse`, tf.IndexedSlices or BCOO leaf.

    Returns:
      An array of the values' dtype. Values of a row that occurs several times are added in their own dtype.

    Raises:
      GradCombineError: for another type, for a number of rows that is not known, and where indices are known for one
        out of range. A traced index out of range is left out.

    Bits: the occurrences of a row are added in the canonical tree, in the order in which they stand.

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
    once = _once(backend, slices, extent)
    return zeros if once is None else backend.put(zeros, *once)


@operation("densify")
def densify(values: Tree) -> Tree:
    """A tree with `to_dense` of its row-sparse leaves, and the others as they are.

    Sparse and dense contributions to one sum are made dense by it, as tf.AggregationMethod does by itself.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> rows = sparse.row_sparse(np.int32([1]), np.float32([3]), rows=2)
    >>> gc.add_n(map(sparse.densify, [rows, np.float32([1, 1])]))
    array([1., 4.], dtype=float32)
    """
    leaves, structure = tree.flatten(values, is_row_sparse)
    return tree.unflatten(structure, [to_dense(leaf) if is_row_sparse(leaf) else leaf for leaf in leaves])


@operation("add_rows")
def add_rows(table: Array, rows: Leaf, unique: bool = False) -> Array:
    """``table + to_dense(rows)``, reading and writing only the rows that occur.

    In JAX, where the table's buffer is donated, it is written in place. A tf.Variable takes ``scatter_add`` of
    tf.IndexedSlices instead.

    Args:
      table: an array of shape (rows, ...).
      rows: a `RowSparse`, tf.IndexedSlices or BCOO of that shape; its values are cast to the table's dtype.
      unique: states that no row occurs twice, as in the results of `row_sum` and `row_mean`, which spares the sorting.
        Of a row that does, one value counts, and which one is not defined.

    Raises:
      GradCombineError: for shapes that differ, and where indices are known for one out of range.

    Bits: one addition to each row that occurs, of the sum of its values, as `to_dense` adds them.

    >>> import numpy as np
    >>> from gradcombine import sparse
    >>> sparse.add_rows(np.float32([1, 2]), sparse.row_sparse(np.int32([1]), np.float32([3]), rows=2))
    array([1., 5.], dtype=float32)
    """
    slices = _required_slices(rows)
    check(unique=unique)
    backend = resolve([table, slices.indices, slices.values])
    whole = backend.asarray(table)
    expected = backend.shape(whole)
    received = (expected[0] if slices.rows is None else slices.rows, *backend.shape(slices.values)[1:])
    if not holds_numbers(np.dtype(backend.dtype(whole))):
        raise invalid("a table of numbers", backend.dtype(whole))
    require_equal("rows of shape {}", expected, received)
    once = _once(backend, slices, expected[0], unique)
    if once is None:
        return whole
    last = backend.full((), expected[0] - 1, INT32)
    indices, values = once
    inside = backend.where(indices > last, last, indices)
    changed = backend.add(backend.take(whole, inside), backend.cast(values, backend.dtype(whole)))
    return backend.put(whole, indices, changed)


def _required_slices(leaf: Leaf) -> RowSlices:
    return require_given("a RowSparse, tf.IndexedSlices or BCOO", row_slices(leaf), type(leaf).__name__)


def _once(backend: Backend, held: RowSlices, rows: int, unique: bool = False) -> tuple[Array, Array] | None:
    """Indices and values of each row once, those out of range left out; None where there are none at all."""
    slices = require_rows(backend, held)
    outside = require_in_range(backend, slices.indices, rows)
    n = backend.shape(slices.indices)[0]
    if n == 0:
        return None
    indices = backend.where(outside, backend.full((n,), rows, INT32), backend.cast(slices.indices, INT32))
    return (indices, slices.values) if unique else distinct(backend, indices, slices.values, rows, n)[:2]
