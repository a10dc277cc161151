"""Compensated sums: a running value, and beside it the sum of what its roundings have lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.added import over_weight
from gradcombine.reductions.cell import ArrayLeaves, CommonCell, Totals
from gradcombine.reductions.weights import Weight, weighted
from gradcombine.types import Array


class Pair(NamedTuple):
    """An accumulator: ``high + low`` is the sum, and ``high`` alone its rounded value."""

    high: Array
    low: Array


@dataclass(frozen=True)
class Compensated(ArrayLeaves, CommonCell):
    """The cell of compensated sums and means.

    TwoSum gives the rounding error of an addition exactly; the errors are added up in ``low``. The result of n terms is
    off by at most ``u |S| + gamma(n - 1)**2 * sum |x|``, with u = 2**-24 and gamma(n) = n u / (1 - n u): as if the sum
    had been formed in twice the precision and rounded once.

    References: D. E. Knuth, *The Art of Computer Programming* 2, 4.2.2; A. Neumaier, `Rundungsfehleranalyse einiger
    Verfahren zur Summation endlicher Summen <https://doi.org/10.1002/zamm.19740540106>`_, 1974; T. Ogita, S. M. Rump
    and S. Oishi, `Accurate sum and dot product <https://doi.org/10.1137/030601818>`_, 2005, Sum2.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    kinds: tuple[str, ...] = ("float", "complex")

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Pair:
        return Pair(*(backend.full(shape, 0, running, [like]) for _ in range(2)))

    def update(self, backend: Backend, a: Pair, x: Array, weight: Weight, totals: Totals) -> Pair:
        running = backend.dtype(a.high)
        high, error = two_sum(backend, a.high, backend.cast(weighted(self.name, backend, x, weight, running), running))
        return Pair(high, backend.add(a.low, error))

    def merge(self, backend: Backend, a: Pair, b: Pair, a_totals: Totals, b_totals: Totals) -> Pair:
        high, error = two_sum(backend, a.high, b.high)
        return Pair(high, backend.add(backend.add(a.low, b.low), error))

    def finish(self, backend: Backend, a: Pair, totals: Totals, output: np.dtype) -> Array:
        # What an infinite value has "lost" is NaN, and means nothing.
        finite = backend.add(a.high, -a.high) == backend.full((), 0, backend.dtype(a.high))
        total = backend.where(finite, backend.add(a.high, a.low), a.high)
        return backend.cast(over_weight(backend, total, totals) if self.divides else total, output)


def two_sum(backend: Backend, a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum, and exactly what the rounding has lost: no order of the operands' sizes is assumed.

    Compilers keep it: with operands that are not constants, no framework here reassociates floating additions.
    """
    total = backend.add(a, b)
    b_part = backend.add(total, -a)
    a_part = backend.add(total, -b_part)
    return total, backend.add(backend.add(a, -a_part), backend.add(b, -b_part))
