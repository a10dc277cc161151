# pyright: standard
"""Conversions between JAX's BCOO and row-sparse leaves, and row-sparse gradients of embeddings."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import sparse

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, in_words, shape_of
from gradcombine.errors import invalid, operation, require_given, require_type, within
from gradcombine.reductions import dtypes
from gradcombine.settings import check
from gradcombine.sparse import RowSparse, row_slices, row_sparse
from gradcombine.types import Array, Tree


@operation("from_bcoo")
def from_bcoo(matrix: sparse.BCOO) -> RowSparse:
    """Converts a BCOO with ``n_batch=0`` and ``n_sparse=1``, whose first axis alone is sparse, to a row-sparse leaf.

    Reductions such as `gradcombine.reductions.row_sum` also take such a BCOO directly.

    Raises:
      GradCombineError: for any other BCOO or type.

    References: `jax.experimental.sparse <https://docs.jax.dev/en/latest/jax.experimental.sparse.html>`_.

    >>> import jax.numpy as jnp
    >>> from jax.experimental import sparse
    >>> matrix = sparse.BCOO((jnp.float32([[1, 2]]), jnp.int32([[4]])), shape=(6, 2))
    >>> from_bcoo(matrix).indices.tolist(), from_bcoo(matrix).shape
    ([4], (6, 2))
    """
    slices = require_given("a BCOO", row_slices(require_type("a BCOO", matrix, sparse.BCOO)))
    return row_sparse(slices.indices, slices.values, matrix.shape[0])


@operation("to_bcoo")
def to_bcoo(rows: RowSparse) -> sparse.BCOO:
    """Converts a row-sparse leaf to a BCOO. Both mark padding by an out-of-range index.

    >>> import jax.numpy as jnp
    >>> from gradcombine.sparse import row_sparse
    >>> to_bcoo(row_sparse(jnp.int32([1, 3]), jnp.float32([[1], [2]]), rows=3)).todense().tolist()
    [[0.0], [1.0], [0.0]]
    """
    rows = require_type("a RowSparse", rows, RowSparse)
    return sparse.BCOO((jnp.asarray(rows.values), jnp.asarray(rows.indices)[:, None]), shape=rows.shape)


@operation("value_and_row_grad")
def value_and_row_grad(loss: Callable[..., Tree], has_aux: bool = False) -> Callable[..., Tree]:
    """Differentiates a loss with respect to the embedding rows that it uses, without dense gradients of the tables.

    Args:
      loss: ``loss(embedded, params, *args)``, which returns a scalar, or with ``has_aux`` a pair (scalar, aux).
        ``embedded``: the rows that were looked up.
      has_aux: as for jax.value_and_grad.

    Returns:
      ``function(tables, ids, params, *args)``, which looks up the rows and returns
      ``(value, (row_grads, params_grads))`` like jax.value_and_grad. ``tables``: a tree of arrays of shape (rows, ...).
      ``ids``: a tree of the same structure of integer arrays of any shape, with values from 0 to rows; the id ``rows``
      is padding: it looks up zeros and has no gradient. ``row_grads``: a tree of the same structure of `RowSparse`,
      with one row per id, in the order of the ids; duplicate ids are added when the gradients are combined.

    Raises:
      GradCombineError: for trees that do not match, tables that are not floats or complex numbers, ids that are not
        integers, and ids out of range, if they are known.

    Under shard_map with check_vma, the gradients of the rows vary over replicas if the ids do; ``params`` are treated
    as by jax.grad.

    >>> import jax.numpy as jnp, gradcombine as gc
    >>> tables, ids = {"words": jnp.ones((1000, 2))}, {"words": jnp.int32([[7, 2], [7, 7]])}
    >>> def loss(embedded, scale):
    ...     return scale * embedded["words"].sum()
    >>> value, (rows, grad) = value_and_row_grad(loss)(tables, ids, jnp.float32(3))
    >>> out = gc.combine(gc.reductions.row_sum(capacity=4), [rows])["words"]
    >>> float(value), float(grad), out.indices.tolist(), out.values[:2].tolist()
    (24.0, 8.0, [2, 7, 1000, 1000], [[3.0, 3.0], [9.0, 9.0]])
    """

    check(loss=loss, has_aux=has_aux)

    @operation("value_and_row_grad")
    def function(tables: Tree, ids: Tree, params: Tree, *args: Tree) -> Tree:
        _require_tables(tables, ids)
        embedded = jax.tree.map(_look_up, tables, ids)
        value, (grads, rest) = jax.value_and_grad(loss, argnums=(0, 1), has_aux=has_aux)(embedded, params, *args)
        return value, (jax.tree.map(_row_grad, tables, ids, grads), rest)

    return function


def _require_tables(tables: Tree, ids: Tree) -> None:
    leaves, structure = tree.flatten(tables)
    for path, table, rows in zip(structure.paths(), leaves, tree.flatten_as(structure, ids), strict=True):
        if table is None and rows is None:
            continue
        with within(path):
            if dtypes.kind(dtype_of(table)) not in ("float", "complex") or not shape_of(table):
                raise invalid("a table of floats or complex numbers, with a first axis of rows", in_words(table))
            if dtype_of(rows).kind not in "iu":
                raise invalid("integers as ids of rows", in_words(rows))


def _look_up(table: Array, ids: Array) -> Array:
    return jnp.asarray(table).at[ids].get(mode="fill", fill_value=0)


def _row_grad(table: Array, ids: Array, grad: Array) -> RowSparse:
    rows, *shape = table.shape
    return row_sparse(jnp.reshape(ids, -1), jnp.reshape(grad, (-1, *shape)), rows)
