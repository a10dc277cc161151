# pyright: standard
"""The replicas along the named axes of pmap, vmap and shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcombine.backends.jax_backend import vary, varying
from gradcombine.backends.jax_versions import all_gather
from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array

SMALL_LEAF_BYTES = 64 * 1024
"""Leaves that are received in at most this many bytes share one flat array per dtype; larger ones are sent alone.

On CPU an exchange costs about 0.1 ms per array. Copying into and out of a flat array costs more than that from about
128 KiB.
"""

BUCKETED_BYTES = 8 * 1024 * 1024
"""Most bytes that one exchange copies into flat arrays, smallest leaves first.

The copies are temporary buffers of the compiled program. From 32 MiB, malloc returns such buffers to the system after
every call, and the page faults of the next call cost more than the buckets save.
"""


_COUNT_BITS = 11
_COUNT_MASK = 2**_COUNT_BITS - 1
_MOST_COUNTED = 2**13
"""Most replicas for which the sums of an int32's digits are exact in float32."""


class JaxAxis(Collective):
    """The replicas along one or more named axes."""

    framework = "jax"

    def __init__(self, names: str | Sequence[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)

    def __repr__(self) -> str:
        return f"jax_axis({', '.join(map(repr, self.names))})"

    def is_bound(self) -> bool:
        """Whether an enclosing pmap, vmap or shard_map binds the axes; raises if it binds only some of them."""
        bound = [name for name in self.names if _binds(name)]
        if 0 < len(bound) < len(self.names):
            expected = "axes that are all bound by the surrounding pmap, vmap or shard_map, or none"
            raise GradCombineError(repr(self), expected, f"only {', '.join(bound)}")
        return bool(bound)

    def size(self) -> int:
        try:
            return lax.axis_size(self.names)
        except NameError as error:
            expected = "an axis that the surrounding pmap, vmap or shard_map binds"
            raise GradCombineError(repr(self), expected, str(error)) from None

    def rank(self) -> Array:
        self.size()  # raises for unbound axes
        return lax.axis_index(self.names)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        # XLA merges all-reduces of one dtype: an int32 counter among floats would cost an all-reduce of its own.
        together = any(x.dtype == jnp.float32 for x in arrays) and 1 < self.size() <= _MOST_COUNTED
        parts = [_digits(x) if together and _is_count(x) else [x] for x in arrays]
        sent = [x for part in parts for x in part]
        received = iter(self._in_buckets(sent, lambda bundle: lax.psum(tuple(bundle), self.names)))
        sums = [[next(received) for _ in part] for part in parts]
        return [_from_digits(*digits) if len(digits) > 1 else digits[0] for digits in sums]

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        return self._in_buckets(arrays, lambda bundle: lax.pmax(tuple(bundle), self.names))

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        to = "invarying" if self._checks_vma() else "varying"
        return self._in_buckets(arrays, lambda bundle: [self._gather(x, to) for x in bundle], growth=self.size())

    def narrow_ways(self) -> tuple[str, ...]:
        # Flattening an array that is sharded over an automatic axis would gather it.
        return () if self._automatic_axes() else ("gathered", "parts")

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        if not self._is_manual():  # under vmap nothing is sent
            return [gathered[:, self.rank()] for gathered in self.all_gather(arrays)]

        def exchange(bundle: Sequence[Array]) -> list[Array]:
            return [lax.all_to_all(array, self.names, 0, 0, tiled=True) for array in bundle]

        return self._in_buckets(arrays, exchange, kept=1)

    def sum_scatter(self, arrays: Sequence[Array]) -> list[Array]:
        """Reduce-scatters arrays with one row per replica: returns this replica's row of each sum."""
        return self._in_buckets(arrays, lambda bundle: [lax.psum_scatter(x, self.names) for x in bundle], kept=1)

    def reduce_scatter_map(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        if not self._is_manual():
            return super().reduce_scatter_map(function, summed, common)
        sums = self.sum_scatter([self.rows(array) for array in summed])
        shards = [self.rows(array)[self.rank()] for array in common]
        gathered = self.all_gather(function(sums, shards))
        flat = (rows.reshape(-1)[: array.size] for rows, array in zip(gathered, common, strict=True))
        return [vector.reshape(array.shape) for vector, array in zip(flat, common, strict=True)]

    def rows(self, array: Array) -> Array:
        """Reshapes an array into one row per replica, padded with zeros."""
        flat = array.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % self.size())).reshape(self.size(), -1)

    def _gather(self, array: Array, to: str) -> Array:
        if len(self.names) == 1 or to == "invarying":
            # Tiled over an axis added here: if JAX adds the axis of ranks, it mixes up explicit shardings.
            return all_gather(array[None], self.names, to)
        # Nested vmap axes have no joint all_gather: gather from the innermost out, then flatten row-major to ranks.
        gathered = array
        for name in reversed(self.names):
            gathered = lax.all_gather(gathered, name)
        return gathered.reshape((self.size(), *array.shape))

    def _in_buckets(
        self,
        arrays: Sequence[Array],
        exchange: Callable[[Sequence[Array]], Sequence[Array]],
        growth: int = 1,
        kept: int = 0,
    ) -> list[Array]:
        """Exchanges arrays once, as varying over the replicas, with small arrays of one dtype concatenated.

        Args:
          arrays: arrays to send.
          exchange: an elementwise collective. It may add leading axes, or remove the first ``kept`` axes.
          growth: number of received elements per element sent.
          kept: number of leading axes that are not flattened.
        """
        arrays = self.mark_varying(arrays)
        if not arrays:
            return []
        buckets = _buckets(arrays, growth) if self._is_manual() else []
        bucketed = {i for bucket in buckets for i in bucket}
        alone = [i for i in range(len(arrays)) if i not in bucketed]
        flat = [
            jnp.concatenate([arrays[i].reshape((*arrays[i].shape[:kept], -1)) for i in bucket], axis=-1)
            for bucket in buckets
        ]
        received = exchange([*flat, *(arrays[i] for i in alone)])
        results = dict(zip(alone, received[len(flat) :], strict=True))
        for bucket, joined in zip(buckets, received, strict=False):
            start = 0
            for i in bucket:
                shape = arrays[i].shape[kept:]
                part = lax.slice_in_dim(joined, start, start + math.prod(shape), axis=joined.ndim - 1)
                results[i] = part.reshape((*joined.shape[:-1], *shape))
                start += math.prod(shape)
        return [results[i] for i in range(len(arrays))]

    def _is_manual(self) -> bool:
        """Whether each array lives on one device, so that flattening it costs no communication.

        Under vmap an array is a slice of a batch; with an automatic axis in the mesh it may be sharded over that axis.
        """
        return set(self.names) <= set(jax.sharding.get_abstract_mesh().manual_axes) and not self._automatic_axes()

    def _automatic_axes(self) -> list[str]:
        """Names of the mesh axes that the enclosing shard_map leaves to the compiler."""
        mesh = jax.sharding.get_abstract_mesh()
        return [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in mesh.manual_axes]

    def mark_varying(self, arrays: Sequence[Array]) -> list[Array]:
        self.size()  # raises for unbound axes
        if not self._checks_vma():
            return list(arrays)
        return [vary(array, self.names) for array in arrays]

    def require_unreduced(self, leaves: Iterable[tuple[str, Array]]) -> None:
        self.size()  # raises for unbound axes
        if not self._checks_vma():
            return
        for path, leaf in leaves:
            if not set(self.names) <= varying(leaf):
                expected = (
                    f"a value that varies over {self!r} (under check_vma, shard_map has already summed the gradient of "
                    "a replicated parameter: apply jax.lax.pcast(params, axis, to='varying') before differentiating, "
                    "or to a value that is this replica's contribution)"
                )
                raise invalid(expected, "one that is the same on all replicas", path)

    def _checks_vma(self) -> bool:
        """Whether check_vma is on: only then is an axis index typed as varying over its axis."""
        return all(name in varying(lax.axis_index(name)) for name in self.names)


def _binds(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def _buckets(arrays: Sequence[Array], growth: int) -> list[list[int]]:
    """Groups the indices of small arrays by dtype and varying axes: each group shares a flat array."""
    groups: dict[Any, list[int]] = {}
    budget = BUCKETED_BYTES
    for i in sorted(range(len(arrays)), key=lambda i: arrays[i].nbytes):
        received = growth * arrays[i].nbytes
        budget -= received
        if received > SMALL_LEAF_BYTES or budget < 0:
            break
        groups.setdefault((arrays[i].dtype, varying(arrays[i])), []).append(i)
    return [sorted(bucket) for bucket in groups.values() if len(bucket) > 1]


def _is_count(x: Array) -> bool:
    return x.shape == () and x.dtype == jnp.int32


def _digits(x: Array) -> list[Array]:
    """Splits an int32 into three float32 digits, whose sums determine the sum of the integers modulo 2**32."""
    # The shift is arithmetic: the highest digit carries the sign.
    parts = [x & _COUNT_MASK, (x >> _COUNT_BITS) & _COUNT_MASK, x >> 2 * _COUNT_BITS]
    return [part.astype(jnp.float32) for part in parts]


def _from_digits(*digits: Array) -> Array:
    low, middle, high = (x.astype(jnp.int32) for x in digits)
    return low + (middle << _COUNT_BITS) + (high << 2 * _COUNT_BITS)


COLLECTIVE = JaxAxis
