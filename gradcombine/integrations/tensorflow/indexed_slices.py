# pyright: standard
"""tf.IndexedSlices: conversion to and from row-sparse leaves and to dense tensors, and all-gather."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradcombine.backends.protocol import Collective
from gradcombine.backends.tensorflow_functions import in_float32
from gradcombine.errors import invalid, operation, require_equal, require_given, translate_errors
from gradcombine.sparse import RowSparse, row_sparse
from gradcombine.types import Array, Scalar


@operation("from_indexed_slices")
def from_indexed_slices(slices: tf.IndexedSlices, rows: int | None = None, size: int | None = None) -> RowSparse:
    """Converts tf.IndexedSlices to a row-sparse leaf.

    `gradcombine.reductions.row_sum` and other row reductions accept tf.IndexedSlices directly. This function is for
    slices without a ``dense_shape``, and for a number of slices that is unknown while a tf.function is traced.

    Args:
      slices: slices with indices of shape (n,) and values of shape (n, ...).
      rows: number of rows of the dense tensor. None: from ``dense_shape``, which must then be static.
      size: number of rows of the leaf, n or more; the remaining ones are padding. None: n, which must then be static.

    Raises:
      GradCombineError: for a number of rows that is unknown or differs from ``dense_shape``; for an unknown number of
        slices; for more than ``size`` slices. If n is not static, the latter raises tf.errors.InvalidArgumentError at
        run time (XLA requires a static n).

    References: `tf.IndexedSlices <https://www.tensorflow.org/api_docs/python/tf/IndexedSlices>`_.

    >>> import tensorflow as tf
    >>> slices = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([3, 0]))
    >>> from_indexed_slices(slices, rows=5, size=3).indices.numpy().tolist()
    [3, 0, 5]
    """
    shape = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
    static_rows = None if shape is None else int(shape[0])
    rows = require_given("rows, or a static dense_shape", static_rows if rows is None else rows)
    require_equal("{} rows", rows, rows if static_rows is None else static_rows)
    values, indices = tf.convert_to_tensor(slices.values), tf.convert_to_tensor(slices.indices)
    n = indices.shape[0]
    if size is None:
        require_given("size, or a static number of slices", n)
        return row_sparse(indices, values, rows)
    if n is not None and n > size:
        raise invalid(f"at most {size} slices", n)
    # tf.pad raises for a negative number of paddings, i.e. for more slices.
    missing = size - tf.shape(indices)[0]
    paddings = tf.scatter_nd([[0, 1]], [missing], [values.shape.rank, 2])
    padded = tf.pad(indices, paddings[:1], constant_values=tf.cast(rows, indices.dtype))
    shape = [size, *values.shape[1:]]
    return row_sparse(tf.ensure_shape(padded, [size]), tf.ensure_shape(tf.pad(values, paddings), shape), rows)


@operation("to_indexed_slices")
def to_indexed_slices(rows: RowSparse) -> tf.IndexedSlices:
    """Converts a row-sparse leaf to tf.IndexedSlices without padding, e.g. for an optimizer.

    Their number depends on the data, so XLA (``jit_compile=True``) cannot compile the conversion.

    >>> import tensorflow as tf
    >>> from gradcombine import sparse
    >>> slices = to_indexed_slices(sparse.row_sparse(tf.constant([3, 5]), tf.constant([[1.0], [2.0]]), rows=5))
    >>> slices.indices.numpy().tolist(), slices.dense_shape.numpy().tolist()
    ([3], [5, 1])
    """
    is_row = rows.indices < tf.cast(rows.shape[0], rows.indices.dtype)
    values, indices = tf.boolean_mask(rows.values, is_row), tf.boolean_mask(rows.indices, is_row)
    return tf.IndexedSlices(values, indices, tf.constant(rows.shape, tf.int64))


def dense(slices: tf.IndexedSlices, shape: Any = None) -> tf.Tensor:
    """Converts slices to a dense tensor of this shape, or of ``dense_shape`` for None.

    Duplicate rows are added in the order of the slices; those of 16-bit values in float32, and rounded once.

    Raises:
      GradCombineError: for another or no ``dense_shape``, and for slices that are not rows of the tensor. In a graph,
        an index out of range raises tf.errors.InvalidArgumentError, and is dropped if XLA compiles the graph.
    """
    known = None if slices.dense_shape is None else tf.get_static_value(slices.dense_shape)
    stated = None if known is None else tuple(map(int, known))
    if shape is None:
        shape = require_given("slices with a dense_shape", slices.dense_shape if stated is None else stated)
    else:
        shape = tuple(shape)
        require_equal("slices of a tensor of shape {}", shape, shape if stated is None else stated)
    if isinstance(shape, tuple):
        _require_rows(slices, shape)
    # Not tf.convert_to_tensor, which warns about the memory of a dense tensor.
    with translate_errors("indices of rows of the tensor", tf.errors.InvalidArgumentError):
        rows = tf.cast(slices.indices, tf.int64)[:, tf.newaxis]
        values = in_float32(slices).values
        return tf.cast(tf.tensor_scatter_nd_add(tf.zeros(shape, values.dtype), rows, values), slices.dtype)


def _require_rows(slices: tf.IndexedSlices, shape: tuple[int, ...]) -> None:
    """Raises for slices whose shapes are not those of rows; TensorFlow's scatter ends the process for some of them."""
    indices, values = slices.indices.shape, slices.values.shape
    is_vector = indices.rank in (None, 1) and shape != ()
    if not is_vector or not values.is_compatible_with(indices.with_rank(1).concatenate(shape[1:])):
        raise invalid(f"rows of a tensor of shape {shape}", f"values of shape {values} at indices of shape {indices}")


def with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    """Replaces the values of ``slices``."""
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def gather(over: Collective, slices: tf.IndexedSlices, included: Array) -> tf.IndexedSlices:
    """Concatenates the slices of all ranks, of which each may have a different number.

    ``included``: 1 on the ranks that contribute, 0 on the others; None: all contribute.
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
    """Returns ``a`` if the scalar condition holds, else ``b``, whose number of rows may differ."""
    values, indices = tf.cond(condition, lambda: (a.values, a.indices), lambda: (b.values, b.indices))
    return tf.IndexedSlices(values, indices, a.dense_shape)
