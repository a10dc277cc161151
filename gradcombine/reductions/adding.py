"""The cells of sums and means with plain and with compensated additions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import load, shape_of
from gradcombine.pairwise import fold_pairwise, sum_rows
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Cell, Totals
from gradcombine.reductions.weights import Weight, factor, rounded, scaled, weighted
from gradcombine.types import Array, Leaf, Order, Scalar

_BLOCK = 32
"""Number of terms that one kernel adds, so that all blocks share a compiled kernel; a power of two."""

_UNROLL = 8
"""Rows that an iteration of the loop adds: more take longer to trace, fewer take longer to run."""


@dataclass(frozen=True)
class Added(Cell):
    """The cell of plain sums and means: one running value.

    Attributes:
      divides: whether the result is divided by the sum of weights.
      settings: the dtypes of accumulator and result.
    """

    name: str
    kinds: tuple[str, ...]
    divides: bool
    settings: dtypes.Settings
    additive: bool = True
    adds_terms: bool = True
    takes_lists: bool = True

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Array:
        return backend.full(shape, neutral(running), running, [like])

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        return backend.add(a, self.term(backend, a, x, weight))

    def term(self, backend: Backend, a: Array, x: Array, weight: Weight) -> Array:
        """``w * x`` in the accumulator dtype."""
        running = backend.dtype(a)
        if weight.known != 1:
            x = weighted(backend, x, weight, running)
        return backend.cast(x, running)

    def merge(self, backend: Backend, a: Array, b: Array, a_totals: Totals, b_totals: Totals) -> Array:
        return backend.add(a, b)

    def finish(self, backend: Backend, a: Array, totals: Totals, output: np.dtype) -> Array:
        return backend.cast(finished(backend, a, totals, self.divides), output)

    def update_many(
        self, backend: Backend, a: Array, xs: Sequence[Array | None], weights: Sequence[Weight], order: Order
    ) -> Array:
        running, shape = backend.dtype(a), backend.shape(a)
        if backend.prefers_rows(shape, len(xs)):
            rows = self._rows(backend, running, xs, weights)
            return backend.traced_once(_added_rows, (order,), [a, rows])[0]
        # In order "tree" each block is a node of the tree, and starts from an empty accumulator, which is neutral.
        splits, nodes = order == "tree" and len(xs) > _BLOCK, list[Array]()
        for start in range(0, len(xs), _BLOCK):
            node = self.empty(backend, shape, running, a) if splits else a
            plan, arrays, factors = list[bool | None](), [node], list[Array]()
            for x, weight in zip(xs[start : start + _BLOCK], weights[start : start + _BLOCK], strict=True):
                if x is None:
                    plan.append(None)
                    continue
                arrays.append(x)
                plan.append(weight.known != 1)
                if weight.known != 1:
                    factors.append(factor(backend, weight, running))
            if len(arrays) > 1:
                (node,) = backend.fused(_added, (running, order, tuple(plan)), [*arrays, *factors])
            if splits:
                nodes.append(node)
            else:
                a = node
        return backend.add(a, fold_pairwise(backend.add, nodes)) if splits else a

    def _rows(
        self, backend: Backend, running: np.dtype, xs: Sequence[Array | None], weights: Sequence[Weight]
    ) -> Array:
        """Stacks the terms along a new first axis, with a neutral row for each missing contribution."""
        first = next(x for x in xs if x is not None)
        dtype = backend.dtype(first)
        missing = backend.full(shape_of(first), neutral(dtype), dtype, [first])
        items = [missing if x is None else x for x in xs]
        if any(backend.dtype(x) != dtype for x in items):
            items = [backend.cast(x, running) for x in items]
        rows = backend.stack(items)
        if not all(weight.known == 1 for weight, x in zip(weights, xs, strict=True) if x is not None):
            numpy = load("numpy")
            factors = [1 if x is None else factor(numpy, w, running) for w, x in zip(weights, xs, strict=True)]
            column = np.asarray(factors, dtypes.part(dtypes.working(running)))
            column = np.reshape(column, (-1, *(1 for _ in shape_of(first))))
            rows = scaled(backend, rows, backend.asarray(column), running)
        return backend.cast(rows, running)

    def total_weight(
        self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf], weights: Sequence[Weight], order: Order
    ) -> Array:
        # In NumPy, so that compiled programs have a constant.
        values = [rounded(weight.known, dtype) for weight in weights]
        with np.errstate(over="ignore"):
            total = reduce(np.add, [fold_pairwise(np.add, values)] if order == "tree" else values, dtype.type(0))
        return backend.full((), total, dtype, like)


def _added(
    backend: Backend, running: np.dtype, order: Order, plan: tuple[bool | None, ...], total: Array, *arrays: Array
) -> tuple[Array]:
    """The kernel of `Added.update_many`.

    Args:
      running: the accumulator dtype.
      order: the order of the additions.
      plan: whether each contribution has a factor; None for a missing contribution, which keeps its tree position.
      total: the accumulator.
      arrays: the contributions that are not missing, then the factors.
    """
    count = len(plan) - plan.count(None)
    contributions, factors = iter(arrays[:count]), iter(arrays[count:])
    # A term is a tuple of one array, or an empty one: None would be a free level in fold_pairwise.
    terms: list[tuple[Array, ...]] = []
    for has_factor in plan:
        if has_factor is None:
            terms.append(())
            continue
        x = next(contributions)
        terms.append((backend.cast(scaled(backend, x, next(factors), running) if has_factor else x, running),))
    if order == "tree":
        terms = [fold_pairwise(lambda a, b: (backend.add(*a, *b),) if a and b else a or b, terms)]
    for term in terms:
        total = backend.add(total, *term) if term else total
    return (total,)


def _added_rows(backend: Backend, order: Order, total: Array, rows: Array) -> tuple[Array]:
    """Adds the rows of an array to the total, in this order."""
    if order == "tree":
        return (backend.add(total, sum_rows(backend, rows)[0]),)
    count = shape_of(rows)[0]
    unrolled = count - count % _UNROLL

    def has_rows(i: Array, _: Array) -> Array:
        return i < unrolled

    def add_rows(i: Array, total: Array) -> tuple[Array, Array]:
        block = (backend.slice_at(rows, i + j) for j in range(_UNROLL))
        return i + _UNROLL, reduce(backend.add, block, total)

    _, total = backend.loop(has_rows, add_rows, backend.full((), 0, dtypes.INT32), total)
    return (reduce(backend.add, [rows[i] for i in range(unrolled, count)], total),)


def neutral(dtype: np.dtype) -> Scalar:
    """The neutral element of addition: -0 for floats, as +0 would change an addend of -0."""
    return 0 if dtype.kind in "iu" else -0.0


def finished(backend: Backend, total: Array, totals: Totals, divides: bool) -> Array:
    """The total, or ``total / weight`` in at least float32, correctly rounded; +0 if there are no contributions."""
    if divides:
        running = backend.dtype(total)
        working = dtypes.working(running)
        quotient = backend.divide(backend.cast(total, working), totals.divisor(backend, dtypes.part(working)))
        total = backend.cast(quotient, running)
    return totals.unless_empty(backend, total)


class Pair(NamedTuple):
    """An accumulator: ``high + low`` is the sum, and ``high`` the sum rounded at each addition."""

    high: Array
    low: Array


@dataclass(frozen=True)
class Compensated(Cell):
    """The cell of compensated sums and means.

    Computes the exact rounding error of each addition by TwoSum, and adds the errors in ``low``. The error of the sum S
    of n terms is at most ``u |S| + gamma(n - 1)**2 * sum |x|``, with u = 2**-24 and gamma(n) = n u / (1 - n u), as if
    it had been computed in twice the precision and rounded once.

    References: D. E. Knuth, *The Art of Computer Programming* 2, 4.2.2; A. Neumaier, `Rundungsfehleranalyse einiger
    Verfahren zur Summation endlicher Summen <https://doi.org/10.1002/zamm.19740540106>`_, 1974; T. Ogita, S. M. Rump
    and S. Oishi, `Accurate sum and dot product <https://doi.org/10.1137/030601818>`_, 2005, Sum2.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    kinds: tuple[str, ...] = ("float", "complex")

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Pair:
        return Pair(*(backend.full(shape, 0, running, [like]) for _ in range(2)))

    def update(self, backend: Backend, a: Pair, x: Array, weight: Weight, totals: Totals) -> Pair:
        running = backend.dtype(a.high)
        high, error = two_sum(backend, a.high, backend.cast(weighted(backend, x, weight, running), running))
        return Pair(high, backend.add(a.low, error))

    def merge(self, backend: Backend, a: Pair, b: Pair, a_totals: Totals, b_totals: Totals) -> Pair:
        high, error = two_sum(backend, a.high, b.high)
        return Pair(high, backend.add(backend.add(a.low, b.low), error))

    def finish(self, backend: Backend, a: Pair, totals: Totals, output: np.dtype) -> Array:
        # The compensation of an infinite sum is NaN, and is ignored.
        finite = backend.add(a.high, -a.high) == backend.full((), 0, backend.dtype(a.high))
        total = backend.where(finite, backend.add(a.high, a.low), a.high)
        return backend.cast(finished(backend, total, totals, True) if self.divides else total, output)


def two_sum(backend: Backend, a: Array, b: Array) -> tuple[Array, Array]:
    """The rounded sum and its exact rounding error, for operands of any magnitudes.

    Compilers preserve it: none of the frameworks reassociates floating-point additions of variables, though XLA does
    those of constants.
    """
    total = backend.add(a, b)
    b_part = backend.add(total, -a)
    a_part = backend.add(total, -b_part)
    return total, backend.add(backend.add(a, -a_part), backend.add(b, -b_part))
