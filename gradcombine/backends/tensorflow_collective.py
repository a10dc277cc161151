# pyright: standard
"""The replicas of tf.distribute."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError
from gradcombine.types import Array


class TfReplicas(Collective):
    """The replicas of the tf.distribute strategy in scope; a single replica outside of a strategy."""

    framework = "tensorflow"

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
        # tf.distribute rejects bundles of mixed dtypes, and of int32 tensors if it placed some of them on the host: one
        # all-reduce per floating dtype, and one per integer array.
        context, arrays = self._context(), list(arrays)
        if context.num_replicas_in_sync == 1:  # MirroredStrategy's all-reduce fails on one device
            return arrays
        local = context.strategy.extended.worker_devices
        if len(local) == 1 and not tf.executing_eagerly():
            # Tensors in a conditional have no device, but an all-reduce between processes requires one.
            with tf.device(local[0]):
                arrays = [array if array.device else tf.identity(array) for array in arrays]
        # Keyed by the name, as a tf.DType equals its enum value (tf.float32 == 1).
        bundles: dict[tuple[str, int | None], list[int]] = {}
        for i, array in enumerate(arrays):
            bundles.setdefault((array.dtype.name, i if array.dtype.is_integer else None), []).append(i)
        sums: dict[int, Array] = {}
        for chosen in bundles.values():
            reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, [arrays[i] for i in chosen])
            sums.update(zip(chosen, reduced, strict=True))
        return [sums[i] for i in range(len(arrays))]

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        # tf.distribute has no max all-reduce.
        if self._context().num_replicas_in_sync == 1 or not arrays:
            return list(arrays)
        return [tf.reduce_max(gathered, axis=0) for gathered in self.all_gather(arrays)]

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        context = self._context()
        n = context.num_replicas_in_sync
        # tf.distribute cannot gather 8- and 16-bit integers: pack those of one dtype into one int32 array.
        narrow: dict[str, list[int]] = {}
        for i, array in enumerate(arrays):
            if array.dtype.is_integer and array.dtype.size < 4 and array.shape.num_elements() != 0:
                narrow.setdefault(array.dtype.name, []).append(i)
        packed = {i for chosen in narrow.values() for i in chosen}
        # A gather of an empty array crashes the process in a tf.function of several replicas.
        empty = {i: tf.zeros((n, *x.shape), x.dtype) for i, x in enumerate(arrays) if x.shape.num_elements() == 0}
        alone = [i for i in range(len(arrays)) if i not in packed and i not in empty]
        sent = [_as_int32([arrays[i] for i in chosen]) for chosen in narrow.values()] + [arrays[i] for i in alone]
        gathered = self._gathered(*sent) if sent else []
        results = empty | dict(zip(alone, gathered[len(narrow) :], strict=True))
        for chosen, words in zip(narrow.values(), gathered, strict=False):
            sizes = [math.prod(arrays[i].shape) for i in chosen]
            flat = tf.reshape(tf.bitcast(words, arrays[chosen[0]].dtype), [n, -1])
            parts = tf.split(flat[:, : sum(sizes)], sizes, axis=1)
            results |= {i: tf.reshape(part, (n, *arrays[i].shape)) for i, part in zip(chosen, parts, strict=True)}
        # In a graph, a gather between processes loses the static shapes.
        return [tf.ensure_shape(results[i], (n, *array.shape)) for i, array in enumerate(arrays)]

    @tf.custom_gradient
    def _gathered(self, *arrays: Array) -> tuple[list[Array], Callable[..., list[Array | None]]]:
        """Gathers arrays along a new first axis."""

        def derivative(*upstream: Array) -> list[Array | None]:
            # TensorFlow's own sums all dtypes in one all-reduce, which it rejects for integers beside floats.
            floats = [i for i, array in enumerate(arrays) if array.dtype.is_floating or array.dtype.is_complex]
            sums = dict(zip(floats, self.all_sum([upstream[i] for i in floats]), strict=True))
            return [sums[i][self.rank()] if i in sums else None for i in range(len(arrays))]

        return self._context().all_gather([array[tf.newaxis] for array in arrays], axis=0), derivative

    def of_each_rank(self, arrays: Sequence[Array]) -> Iterator[list[Array]]:
        # tf.unstack traces one operation per array; slicing traces four per replica.
        columns = [tf.unstack(gathered) for gathered in self.all_gather(arrays)]
        return ([column[rank] for column in columns] for rank in range(self.size()))

    def narrow_ways(self) -> tuple[str, ...]:
        return ("gathered",)

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        return [gathered[:, self.rank()] for gathered in self.all_gather(arrays)]

    def require_unreduced(self, leaves: Iterable[tuple[str, Array]]) -> None:
        self._context()


def _as_int32(arrays: Sequence[Array]) -> Array:
    """Packs arrays of one narrow integer dtype into an int32 vector, padded with zeros."""
    flat, dtype = tf.concat([tf.reshape(array, [-1]) for array in arrays], 0), arrays[0].dtype
    per_word = 4 // dtype.size
    flat = tf.concat([flat, tf.zeros([-flat.shape.num_elements() % per_word], dtype)], 0)
    return tf.bitcast(tf.reshape(flat, [-1, per_word]), tf.int32)


COLLECTIVE = TfReplicas
