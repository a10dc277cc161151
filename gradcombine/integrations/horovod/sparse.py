"""tf.IndexedSlices: made dense, or gathered from all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradcombine.backends.protocol import Collective


def is_sparse(leaf: Any) -> bool:
    """Whether a gradient holds some rows only."""
    return isinstance(leaf, tf.IndexedSlices)


def dense(slices: tf.IndexedSlices) -> tf.Tensor:
    """The tensor that the slices stand for, rows that occur twice added in the order of the slices."""
    if slices.dense_shape is None:
        return tf.convert_to_tensor(slices)
    # A plain conversion warns about the memory that a dense tensor takes.
    rows = tf.cast(slices.indices, tf.int64)[:, tf.newaxis]
    shape = tf.get_static_value(slices.dense_shape)
    zeros = tf.zeros(slices.dense_shape if shape is None else tuple(shape), slices.values.dtype)
    return tf.tensor_scatter_nd_add(zeros, rows, slices.values)


def with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """The same rows with other values."""
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def gather(over: Collective, slices: tf.IndexedSlices, included: Any) -> tf.IndexedSlices:
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


def choose(condition: Any, a: tf.IndexedSlices, b: tf.IndexedSlices) -> tf.IndexedSlices:
    """``a`` where the scalar condition holds, else ``b``: of different numbers of rows."""
    values, indices = tf.cond(condition, lambda: (a.values, a.indices), lambda: (b.values, b.indices))
    return tf.IndexedSlices(values, indices, a.dense_shape)
