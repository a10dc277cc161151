# pyright: standard
"""The replicas of tf.distribute."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError
from gradcombine.types import Array


class TfReplicas(Collective):
    """The replicas of the tf.distribute strategy in scope; one replica where there is none."""

    def __repr__(self) -> str:
        return "tf_replicas()"

    def _context(self) -> tf.distribute.ReplicaContext:
        context = tf.distribute.get_replica_context()
        if context is None:
            raise GradCombineError(
                repr(self), "a call inside strategy.run (replica context)", "a call in cross-replica context"
            )
        return context

    def size(self) -> int:
        return self._context().num_replicas_in_sync

    def rank(self) -> Array:
        return tf.convert_to_tensor(self._context().replica_id_in_sync_group)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        # tf.distribute refuses a bundle of several dtypes, or of int32 tensors some of which it has put on the host: so
        # one exchange for the arrays of each floating dtype, and one for each integer array.
        context, arrays = self._context(), list(arrays)
        if context.num_replicas_in_sync == 1:  # MirroredStrategy's all-reduce fails on one device
            return arrays
        local = context.strategy.extended.worker_devices
        if len(local) == 1 and not tf.executing_eagerly():
            # In a conditional tensors have no device, and an exchange between processes asks for one.
            with tf.device(local[0]):
                arrays = [array if array.device else tf.identity(array) for array in arrays]
        # A tf.DType equals the integer that numbers it (tf.float32 == 1), so a position and a DType are no keys of one
        # dict.
        bundles: dict[tuple[str, int | None], list[int]] = {}
        for i, array in enumerate(arrays):
            bundles.setdefault((array.dtype.name, i if array.dtype.is_integer else None), []).append(i)
        sums: dict[int, Array] = {}
        for chosen in bundles.values():
            reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [arrays[i] for i in chosen])
            sums.update(zip(chosen, reduced, strict=True))
        return [sums[i] for i in range(len(arrays))]

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        # Replicas of tf.distribute have no maximum, and no gather of bytes: they gather four in an int32.
        context, sizes = self._context(), [math.prod(array.shape) for array in arrays]
        if context.num_replicas_in_sync == 1 or not arrays:
            return list(arrays)
        rest = -sum(sizes) % 4
        flat = tf.concat([*(tf.reshape(array, [-1]) for array in arrays), tf.zeros([rest], tf.int8)], 0)
        (gathered,) = self.all_gather([tf.bitcast(tf.reshape(flat, [-1, 4]), tf.int32)])
        largest = tf.reshape(tf.reduce_max(tf.bitcast(gathered, tf.int8), axis=0), [-1])
        parts = tf.split(largest, [*sizes, rest])
        return [tf.reshape(part, array.shape) for part, array in zip(parts, arrays, strict=False)]

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        context = self._context()
        gathered = context.all_gather([array[tf.newaxis] for array in arrays], axis=0)
        # Between processes the shapes get lost in a graph.
        shapes = [(context.num_replicas_in_sync, *array.shape) for array in arrays]
        return [tf.ensure_shape(x, shape) for x, shape in zip(gathered, shapes, strict=True)]

    def require_unreduced(self, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        self._context()


COLLECTIVE = TfReplicas
