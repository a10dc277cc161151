"""A collective whose sums of scalar counts travel with the floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from gradcombine.backends.protocol import Collective
from gradcombine.types import Array

_BITS = 11
_MASK = 2**_BITS - 1


@dataclass(frozen=True)
class OneExchange:
    """A collective that sums int32 scalars as float32 digits, so that they share the all-reduce of float32 arrays.

    XLA combines all-reduces of one dtype into one operation, and a count would need one of its own. An int32 has three
    digits of 11 bits, whose sums over up to 2**13 replicas are exact in float32; it comes back modulo 2**32.
    """

    inner: Collective

    def size(self) -> int:
        return self.inner.size()

    def rank(self) -> Array:
        return self.inner.rank()

    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        if self.size() > 2**13 or not any(x.dtype == jnp.float32 for x in arrays):
            return self.inner.all_sum(arrays)
        sent: list[Array] = []
        for x in arrays:
            sent.extend(_digits(x) if _is_count(x) else [x])
        received = iter(self.inner.all_sum(sent))
        return [_number(*(next(received) for _ in range(3))) if _is_count(x) else next(received) for x in arrays]

    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        return self.inner.all_max(arrays)

    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        return self.inner.all_gather(arrays)

    def of_sums(
        self,
        function: Callable[[Sequence[Array], Sequence[Array]], list[Array]],
        summed: Sequence[Array],
        common: Sequence[Array],
    ) -> list[Array]:
        return self.inner.of_sums(function, summed, common)

    def vary(self, arrays: Sequence[Array]) -> list[Array]:
        return self.inner.vary(arrays)

    def require_own(self, operation: str, paths: Sequence[str], leaves: Sequence[Array]) -> None:
        self.inner.require_own(operation, paths, leaves)


def _is_count(x: Array) -> bool:
    return x.shape == () and x.dtype == jnp.int32


def _digits(x: Array) -> list[Array]:
    # An arithmetic shift: the highest digit carries the sign.
    parts = [x & _MASK, (x >> _BITS) & _MASK, x >> 2 * _BITS]
    return [part.astype(jnp.float32) for part in parts]


def _number(low: Array, middle: Array, high: Array) -> Array:
    digits = [x.astype(jnp.int32) for x in (low, middle, high)]
    return digits[0] + (digits[1] << _BITS) + (digits[2] << 2 * _BITS)
