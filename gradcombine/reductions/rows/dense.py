"""From rows to whole arrays."""

from __future__ import annotations

from typing import Any

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import resolve
from gradcombine.errors import GradCombineError, renamed
from gradcombine.reductions.accumulator import shape_of
from gradcombine.reductions.algebra import Reduction, require_reduction
from gradcombine.reductions.contributions import on_contributions
from gradcombine.reductions.rows.distinct import distinct
from gradcombine.reductions.rows.leaf import INT32, is_row_sparse, require_in_range, require_rows, row_slices
from gradcombine.types import Array, Tree, no_autograph


@no_autograph
def to_dense(rows: Any) -> Array:
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
    slices = row_slices(rows)
    if slices is None:
        raise GradCombineError("to_dense", "a RowSparse, tf.IndexedSlices or BCOO", type(rows).__name__)
    if slices.rows is None:
        raise GradCombineError("to_dense", "a known number of rows", "a dense_shape that is not static")
    backend = resolve("to_dense", [slices.indices, slices.values])
    with renamed("to_dense"):
        shape = (slices.rows, *backend.shape(slices.values)[1:])
    zeros = backend.full(shape, 0, backend.dtype(slices.values))
    once = _once("to_dense", backend, rows, slices.rows)
    return zeros if once is None else backend.put(zeros, *once)


@no_autograph
def densify(values: Tree) -> Tree:
    """A tree with `to_dense` of its row-sparse leaves, and the others as they are.

    Sparse and dense contributions to one sum are made dense by it, as tf.AggregationMethod does by itself.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> rows = sparse.row_sparse(np.int32([1]), np.float32([3]), rows=2)
    >>> gc.add_n(map(sparse.densify, [rows, np.float32([1, 1])]))
    array([1., 4.], dtype=float32)
    """
    leaves, structure = tree.flatten("densify", values, is_row_sparse)
    return tree.unflatten(structure, [to_dense(leaf) if is_row_sparse(leaf) else leaf for leaf in leaves])


@no_autograph
def add_rows(table: Array, rows: Any, unique: bool = False) -> Array:
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
    slices = row_slices(rows)
    if slices is None:
        raise GradCombineError("add_rows", "a RowSparse, tf.IndexedSlices or BCOO", type(rows).__name__)
    backend = resolve("add_rows", [table, slices.indices, slices.values])
    with renamed("add_rows"):
        whole = backend.asarray(table)
        expected = backend.shape(whole)
        received = (expected[0] if slices.rows is None else slices.rows, *backend.shape(slices.values)[1:])
    if received != expected:
        raise GradCombineError("add_rows", f"rows of shape {expected}", received)
    once = _once("add_rows", backend, rows, expected[0], unique)
    if once is None:
        return whole
    last = backend.full((), expected[0] - 1, INT32)
    indices, values = once
    inside = backend.where(indices > last, last, indices)
    changed = backend.add(backend.take(whole, inside), backend.cast(values, backend.dtype(whole)))
    return backend.put(whole, indices, changed)


def _once(operation: str, backend: Backend, leaf: Any, rows: int, unique: bool = False) -> tuple[Array, Array] | None:
    """Indices and values of each row once, those out of range left out; None where there are none at all."""
    found = row_slices(leaf)
    assert found is not None
    slices = require_rows(operation, backend, found)
    outside = require_in_range(operation, backend, slices.indices, rows)
    n = backend.shape(slices.indices)[0]
    if n == 0:
        return None
    indices = backend.where(outside, backend.full((n,), rows, INT32), backend.cast(slices.indices, INT32))
    return (indices, slices.values) if unique else distinct(backend, indices, slices.values, rows, n)[:2]


@no_autograph
def sparse_as_dense(reduction: Reduction) -> Reduction:
    """The same reduction, which takes row-sparse contributions as the dense arrays that they stand for.

    For sums of sparse and dense contributions, and where so many rows occur that a dense state is smaller. The result
    is dense, as that of tf.AggregationMethod is for mixed terms.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states, whose ``init`` and ``update`` make every `gradcombine.sparse.RowSparse`,
      tf.IndexedSlices and BCOO dense.

    Bits: those of the reduction over `gradcombine.sparse.to_dense` of the contributions.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> mean = gc.reductions.sparse_as_dense(gc.reductions.mean())
    >>> acc = gc.accumulate(mean, every=2)
    >>> state = acc.init(np.zeros((2, 1), np.float32))
    >>> state = acc.update(sparse.row_sparse(np.int32([1, 1]), np.float32([[4], [2]]), rows=2), state)
    >>> state = acc.update(np.float32([[1], [2]]), state)
    >>> acc.value(state)
    array([[0.5],
           [4. ]], dtype=float32)
    """
    require_reduction("sparse_as_dense", reduction)

    @no_autograph
    def dense_like(like: Tree) -> Tree:
        leaves, structure = tree.flatten(reduction.name, like, is_row_sparse)
        return tree.unflatten(structure, map(_whole, leaves))

    return on_contributions(reduction, lambda value, weight: (densify(value), weight), dense_like)


def _whole(leaf: Any) -> Any:
    """A dense array like a row-sparse one, which may be of specs; any other leaf itself."""
    slices = row_slices(leaf)
    if slices is None:
        return leaf
    if slices.rows is None:
        raise GradCombineError("sparse_as_dense", "a known number of rows", "a dense_shape that is not static")
    backend = resolve("sparse_as_dense", [slices.values])
    shape = (slices.rows, *shape_of("sparse_as_dense", slices.values, "")[1:])
    return backend.full(shape, 0, backend.dtype(slices.values), [slices.values])
