"""Replicas simulated in one process: each program is rerun until the results of all its exchanges are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import resolve
from gradcombine.errors import operation
from gradcombine.types import Array


def run_replicas(count: int, program: Callable[[int, Collective], Any]) -> list[Any]:
    """Returns ``program(rank, collective)`` for each replica. The program is pure, and runs once more per exchange."""
    exchanged: list[list[Sequence[Array]]] = []
    while True:
        results: list[Any] = []
        sent: list[Sequence[Array]] = []
        for rank in range(count):
            try:
                results.append(program(rank, _Replica(rank, count, exchanged)))
            except _Unknown as exchange:
                sent.append(exchange.arrays)
        if not sent:
            return results
        assert not results  # otherwise replicas differ in their number of exchanges
        exchanged.append(sent)


class _Unknown(BaseException):
    """Interrupts a program at its first exchange whose other operands are not known yet."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        super().__init__()
        self.arrays = arrays


class _Replica(Collective):
    def __init__(self, rank: int, count: int, exchanged: list[list[Sequence[Array]]]) -> None:
        self._rank, self._count, self._exchanged = rank, count, iter(exchanged)

    def size(self) -> int:
        return self._count

    def rank(self) -> Array:
        return np.int32(self._rank)

    def _columns(self, arrays: Sequence[Array]) -> list[tuple[Array, ...]]:
        """The operands of all replicas, for each array."""
        sent = next(self._exchanged, None)
        if sent is None:
            raise _Unknown(arrays)
        return list(zip(*sent, strict=True))

    @operation("all_sum")
    def all_sum(self, arrays: Sequence[Array]) -> list[Array]:
        return [reduce(resolve(column).add, column) for column in self._columns(arrays)]

    @operation("all_max")
    def all_max(self, arrays: Sequence[Array]) -> list[Array]:
        return [reduce(resolve(column).maximum, column) for column in self._columns(arrays)]

    @operation("all_gather")
    def all_gather(self, arrays: Sequence[Array]) -> list[Array]:
        return [resolve(column).stack(column) for column in self._columns(arrays)]

    def narrow_ways(self) -> tuple[str, ...]:
        return ("gathered", "parts")

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        return [gathered[:, self._rank] for gathered in self.all_gather(arrays)]
