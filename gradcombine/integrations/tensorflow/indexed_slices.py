# pyright: standard
"""tf.IndexedSlices: to and from the row-sparse leaf, made dense, or gathered from all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation, require_equal, require_given
from gradcombine.sparse import RowSparse, row_sparse
from gradcombine.types import Array, Scalar


@operation("from_indexed_slices")
def from_indexed_slices(slices: tf.IndexedSlices, rows: int | None = None, size: int | None = None) -> RowSparse:
    """The row-sparse leaf of some slices.

    `gradcombine.reductions.row_sum` and its like take tf.IndexedSlices as they are. This is for what they cannot know:
    a ``dense_shape`` that is missing, and slices whose number is not known while a tf.function is traced.

    Args:
      slices: with indices of shape (n,) and values of shape (n, ...).
      rows: the number of rows of the whole tensor. None: from ``dense_shape``, which must be static then.
      size: the number of rows of the leaf, n or more; what is left over is padding. None: n, which must be static then.

    Raises:
      GradCombineError: for a number of rows that is not known, or is not that of ``dense_shape``; for a number of
        slices that is not known; and for more than ``size`` of them, where that is known. Where it is not,
        tf.errors.InvalidArgumentError at run time (XLA needs a known number).

    References: `tf.IndexedSlices <https://www.tensorflow.org/api_docs/python/tf/IndexedSlices>`_.

    >>> import tensorflow as tf
    >>> slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([3, 0]))
    >>> from_indexed_slices(slices, rows=5, size=3).indices.numpy().tolist()
    [3, 0, 5]
    """
    known = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
    stated = None if known is None else int(known[0])
    whole = require_given("rows, or a static dense_shape", stated if rows is None else rows)
    require_equal("{} rows", whole, whole if stated is None else stated)
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    n = indices.shape[0]
    if size is None:
        require_given("size, or a static number of slices", n)
        return row_sparse(indices, values, whole)
    if n is not None and n > size:
        raise invalid(f"at most {size} slices", n)
    # With more slices the number of paddings is negative, which the operation itself refuses.
    missing = size - tf.shape(indices)[0]
    paddings = tf.scatter_nd([[0, 1]], [missing], [values.shape.rank, 2])
    padded = tf.pad(indices, paddings[:1], constant_values=tf.cast(whole, indices.dtype))
    shape = [size, *values.shape[1:]]
    return row_sparse(tf.ensure_shape(padded, [size]), tf.ensure_shape(tf.pad(values, paddings), shape), whole)


@operation("to_indexed_slices")
def to_indexed_slices(rows: RowSparse) -> tf.IndexedSlices:
    """The slices of a row-sparse leaf without its padding: what optimizers and ``tf.Variable.scatter_add`` take.

    Their number depends on the data, so that XLA (``jit_compile=True``) cannot compile it.

    >>> import tensorflow as tf
    >>> from gradcombine import sparse
    >>> slices = to_indexed_slices(sparse.row_sparse(tf.constant([3, 5]), tf.constant([[1.0], [2.0]]), rows=5))
    >>> slices.indices.numpy().tolist(), slices.dense_shape.numpy().tolist()
    ([3], [5, 1])
    """
    held = rows.indices < tf.cast(rows.shape[0], rows.indices.dtype)
    values, indices = tf.boolean_mask(rows.values, held), tf.boolean_mask(rows.indices, held)
    return tf.IndexedSlices(values, indices, tf.constant(rows.shape, tf.int64))


def dense(slices: tf.IndexedSlices, shape: Any = None) -> tf.Tensor:
    """The tensor that the slices stand for, rows that occur twice added in the order of the slices.

    Args:
      slices: with a ``dense_shape``, if ``shape`` is not given.
      shape: of the tensor.
    """
    if shape is None:
        if slices.dense_shape is None:
            return tf.convert_to_tensor(slices)
        known = tf.get_static_value(slices.dense_shape)
        shape = slices.dense_shape if known is None else tuple(known)
    # A plain conversion warns about the memory that a dense tensor takes.
    rows = tf.cast(slices.indices, tf.int64)[:, tf.newaxis]
    return tf.tensor_scatter_nd_add(tf.zeros(shape, slices.values.dtype), rows, slices.values)


def with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """``slices`` with other values in its rows."""
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def gather(over: Collective, slices: tf.IndexedSlices, included: Array) -> tf.IndexedSlices:
    """All ranks' slices one after another; ranks may hold different numbers of them.

    Args:
      included: 1 on the ranks that contribute, 0 on the others; None: all do.
    """
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    if included is not None:
        kept = tf.shape(indices)[0] * included
        values, indices = values[:kept], indices[:kept]
    if over.size() > 1:
        context = tf.distribute.get_replica_context()
        values, indices = (context.all_gather(x, axis=0) for x in (values, indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def choose(condition: Scalar, a: tf.IndexedSlices, b: tf.IndexedSlices) -> tf.IndexedSlices:
    """``a`` where the scalar condition holds, else ``b``: of different numbers of rows."""
    values, indices = tf.cond(condition, lambda: (a.values, a.indices), lambda: (b.values, b.indices))
    return tf.IndexedSlices(values, indices, a.dense_shape)
