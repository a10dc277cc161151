# pyright: standard
"""The replicas along the named axes of pmap, vmap and shard_map."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gradcombine.backends.jax_versions import all_gather, varying
from gradcombine.backends.protocol import Collective
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Array

SMALL_LEAF_BYTES = 64 * 1024
"""Leaves up to this size, as they are received, travel in one flat array for each dtype; larger ones travel alone.

On CPU an exchange costs about 0.1 ms for each array of the bundle, and copying into and out of a flat array costs more
than that from about 128 KiB on.
"""

BUCKETED_BYTES = 8 * 1024 * 1024
"""At most so many bytes of one exchange are copied, those of the smallest leaves.

Copies are temporary memory of the compiled program. From 32 MiB on, the allocator of the C library returns such memory
to the system after every call, and the page faults of the next call cost more than the buckets save.
"""


_COUNT_BITS = 11
_COUNT_MASK = 2**_COUNT_BITS - 1
_MOST_COUNTED = 2**13
"""Replicas over which the sums of a count's digits are exact in float32."""


class JaxAxis(Collective):
    """The replicas along one or several named axes."""

    framework = "jax"

    def __init__(self, names: str | Sequence[str]) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(names)

    def __repr__(self) -> str:
        return f"jax_axis({', '.join(map(repr, self.names))})"

    def is_bound(self) -> bool:
        """Whether a surrounding pmap, vmap or shard_map binds all of the axes; refuses some of them."""
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
        return lax.axis_index(self.names)

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        # XLA combines all-reduces of one dtype into one operation: a count beside floats would need one of its own.
        together = 1 < self.size() <= _MOST_COUNTED and any(x.dtype == jnp.float32 for x in arrays)
        parts = [_digits(x) if together and _is_count(x) else [x] for x in self.mark_varying(arrays)]
        sent = [x for part in parts for x in part]
        received = iter(self._in_buckets(sent, lambda bundle: list(lax.psum(tuple(bundle), self.names)), growth=1))
        sums = [[next(received) for _ in part] for part in parts]
        return [_number(*digits) if len(digits) > 1 else digits[0] for digits in sums]

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        if not arrays:
            return []
        return self._in_buckets(
            self.mark_varying(arrays), lambda bundle: list(lax.pmax(tuple(bundle), self.names)), growth=1
        )

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        to = "invarying" if self._tracked() else "varying"

        def exchange(bundle: Sequence[Array]) -> list[Array]:
            return [self._gather(array, to) for array in bundle]

        return self._in_buckets(self.mark_varying(arrays), exchange, growth=self.size())

    def narrow_ways(self) -> tuple[str, ...]:
        # To flatten an array that is split over an axis which shard_map leaves to the compiler would gather it first.
        return () if self._left() else ("gathered", "parts")

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        if not self._local():  # under vmap nothing is sent
            return [gathered[:, self.rank()] for gathered in self.all_gather(arrays)]

        def exchange(bundle: Sequence[Array]) -> list[Array]:
            return [lax.all_to_all(array, self.names, 0, 0, tiled=True) for array in bundle]

        return self._in_buckets(self.mark_varying(arrays), exchange, growth=1, kept=1)

    def sum_scatter(self, arrays: Sequence[Array]) -> list[Array]:
        """This replica's row of the elementwise sum over replicas; arrays have one row per replica."""
        if not arrays:
            return []

        def exchange(bundle: Sequence[Array]) -> list[Array]:
            return [lax.psum_scatter(array, self.names) for array in bundle]

        return self._in_buckets(self.mark_varying(arrays), exchange, growth=1, kept=1)

    def reduce_scatter_map(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        if not self._local():
            return super().reduce_scatter_map(function, summed, common)
        parts = self.sum_scatter([self.rows(array) for array in summed])
        own = [self.rows(array)[self.rank()] for array in common]
        gathered = self.all_gather(function(parts, own))
        whole = (rows.reshape(-1)[: array.size] for rows, array in zip(gathered, common, strict=True))
        return [flat.reshape(array.shape) for flat, array in zip(whole, common, strict=True)]

    def rows(self, array: Array) -> Array:
        """An array's elements, one row per replica, filled up with zeros."""
        flat = array.reshape(-1)
        return jnp.pad(flat, (0, -flat.size % self.size())).reshape(self.size(), -1)

    def _gather(self, array: Array, to: str) -> Array:
        if len(self.names) == 1 or to == "invarying":
            # Tiled: JAX gives an axis of ranks that it adds itself the first axis' place in explicit shardings.
            return all_gather(array[None], self.names, to)
        # Nested vmap axes have no joint all_gather: innermost first, then flattened to ranks in row-major order.
        gathered = array
        for name in reversed(self.names):
            gathered = lax.all_gather(gathered, name)
        return gathered.reshape((self.size(), *array.shape))

    def _in_buckets(
        self,
        arrays: Sequence[Array],
        exchange: Callable[[Sequence[Array]], Sequence[Array]],
        growth: int,
        kept: int = 0,
    ) -> list[Array]:
        """One exchange, in which small arrays of one type are one flat array.

        ``exchange`` works on each element by itself, and adds leading axes, ``growth`` results per element; or takes
        away the first ``kept`` axes, which are not flattened.
        """
        buckets = _buckets(arrays, growth) if self._local() else []
        travelling = {i for bucket in buckets for i in bucket}
        alone = [i for i in range(len(arrays)) if i not in travelling]
        flat = [
            jnp.concatenate([arrays[i].reshape((*arrays[i].shape[:kept], -1)) for i in bucket], axis=-1)
            for bucket in buckets
        ]
        received = exchange([*flat, *(arrays[i] for i in alone)])
        results = dict(zip(alone, received[len(flat) :], strict=True))
        for bucket, whole in zip(buckets, received, strict=False):
            start = 0
            for i in bucket:
                shape = arrays[i].shape[kept:]
                part = lax.slice_in_dim(whole, start, start + math.prod(shape), axis=whole.ndim - 1)
                results[i] = part.reshape((*whole.shape[:-1], *shape))
                start += math.prod(shape)
        return [results[i] for i in range(len(arrays))]

    def _local(self) -> bool:
        """Whether the arrays are whole arrays of one device, which can be copied into a flat one where they lie.

        Under vmap they are slices of a batch, and beside an axis that shard_map leaves to the compiler they may be
        sharded over it.
        """
        return set(self.names) <= set(jax.sharding.get_abstract_mesh().manual_axes) and not self._left()

    def _left(self) -> list[str]:
        """The axes that a surrounding shard_map leaves to the compiler."""
        mesh = jax.sharding.get_abstract_mesh()
        return [name for name in mesh.axis_names if mesh.shape[name] > 1 and name not in mesh.manual_axes]

    def mark_varying(self, arrays: Sequence[Array]) -> list[Array]:
        self.size()
        if not self._tracked():
            return list(arrays)
        return [self._vary(array) for array in arrays]

    def _vary(self, array: Array) -> Array:
        missing = tuple(name for name in self.names if name not in varying(array))
        return lax.pcast(array, missing, to="varying") if missing else array

    def require_unreduced(self, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        self.size()
        if not self._tracked():
            return
        for path, leaf in zip(paths, leaves, strict=True):
            if not set(self.names) <= varying(leaf):
                expected = (
                    f"a value of each replica's own over {self!r} (under check_vma, shard_map has already summed the "
                    "gradient of a replicated parameter: apply jax.lax.pcast(params, axis, to='varying') before "
                    "differentiating, or to a value that is this replica's contribution)"
                )
                raise invalid(expected, "one that is the same on all replicas", path)

    def _tracked(self) -> bool:
        """Whether check_vma is on: then an axis index is typed as varying over its axis."""
        return all(name in varying(lax.axis_index(name)) for name in self.names)


def _binds(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def _buckets(arrays: Sequence[Array], growth: int) -> list[list[int]]:
    """The positions of the arrays that share a flat array: small, of one dtype, and varying over the same axes."""
    together: dict[Any, list[int]] = {}
    left = BUCKETED_BYTES
    for i in sorted(range(len(arrays)), key=lambda i: arrays[i].nbytes):
        received = growth * arrays[i].nbytes
        left -= received
        if received > SMALL_LEAF_BYTES or left < 0:
            break
        together.setdefault((arrays[i].dtype, varying(arrays[i])), []).append(i)
    return [sorted(bucket) for bucket in together.values() if len(bucket) > 1]


def _is_count(x: Array) -> bool:
    return x.shape == () and x.dtype == jnp.int32


def _digits(x: Array) -> list[Array]:
    """An int32 as three float32 digits; their sums make the sum modulo 2**32."""
    # An arithmetic shift: the highest digit carries the sign.
    parts = [x & _COUNT_MASK, (x >> _COUNT_BITS) & _COUNT_MASK, x >> 2 * _COUNT_BITS]
    return [part.astype(jnp.float32) for part in parts]


def _number(*digits: Array) -> Array:
    low, middle, high = (x.astype(jnp.int32) for x in digits)
    return low + (middle << _COUNT_BITS) + (high << 2 * _COUNT_BITS)


COLLECTIVE = JaxAxis
