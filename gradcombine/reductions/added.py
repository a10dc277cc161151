"""Plain accumulators that are added: one term after another, or a list of them in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import load, shape_of
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import ArrayLeaves, CommonCell, Totals
from gradcombine.reductions.weights import Weight, factor, scaled, weighted
from gradcombine.types import Array, Order

_BLOCK = 32
"""So many terms are added by one kernel, which compiled code may share between blocks: a power of two."""


@dataclass(frozen=True)
class Added(ArrayLeaves, CommonCell):
    """The cell of plain sums and means: one running value.

    Attributes:
      result: ``result(backend, a, totals)``: the accumulator as it leaves, before it is cast.
      settings: of accumulator and result.
    """

    name: str
    kinds: tuple[str, ...]
    result: Callable[[Backend, Array, Totals], Array]
    settings: dtypes.Settings
    additive: bool = True
    adds_terms: bool = True
    takes_lists: bool = True

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Array:
        return backend.full(shape, neutral(running), running, [like])

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        return backend.add(a, self.term(backend, a, x, weight))

    def term(self, backend: Backend, a: Array, x: Array, weight: Weight) -> Array:
        """What a contribution adds to an accumulator."""
        running = backend.dtype(a)
        return backend.cast(weighted(self.name, backend, x, weight, running), running)

    def merge(self, backend: Backend, a: Array, b: Array, a_totals: Totals, b_totals: Totals) -> Array:
        return backend.add(a, b)

    def finish(self, backend: Backend, a: Array, totals: Totals, output: np.dtype) -> Array:
        return backend.cast(self.result(backend, a, totals), output)

    def takes_many(self, weights: Sequence[Weight]) -> bool:
        """Whether all weights are known: one that is traced may be 0, and then it must leave no trace, not even +0."""
        return all(weight.known is not None for weight in weights)

    def update_many(
        self,
        backend: Backend,
        a: Array,
        xs: Sequence[Array | None],
        weights: Sequence[Weight],
        totals: Totals,
        order: Order,
    ) -> Array:
        running = backend.dtype(a)
        if (add_rows := backend.row_sum(shape_of(a), len(xs))) is not None:
            return add_rows(a, self._rows(backend, running, xs, weights), order)
        factors = [factor(self.name, backend, weight, running) for weight in weights]
        pairs = list(zip(xs, factors, strict=True))

        def added(total: Array, part: Sequence[tuple[Array | None, Array | None]]) -> Array:
            plan = tuple(None if x is None else f is not None for x, f in part)
            arrays = [x for x, _ in part if x is not None]
            scalars = [f for x, f in part if x is not None and f is not None]
            return backend.fused(_added, (running, order, plan), [total, *arrays, *scalars])[0] if arrays else total

        blocks = [pairs[i : i + _BLOCK] for i in range(0, len(pairs), _BLOCK)]
        if order == "sequential" or len(blocks) == 1:
            return reduce(added, blocks, a)
        # Each is a node of the tree. An accumulator of nothing adds nothing to it.
        nodes = [added(self.empty(backend, shape_of(a), running, a), block) for block in blocks]
        return backend.add(a, fold_pairwise(backend.add, nodes))

    def _rows(
        self, backend: Backend, running: np.dtype, xs: Sequence[Array | None], weights: Sequence[Weight]
    ) -> Array:
        """The terms along a first axis. What is missing keeps its place in the tree, and adds nothing."""
        first = next(x for x in xs if x is not None)
        dtype = backend.dtype(first)
        nothing = backend.full(shape_of(first), neutral(dtype), dtype, [first])
        rows = backend.stack([nothing if x is None else x for x in xs])
        if not all(weight.is_one for weight, x in zip(weights, xs, strict=True) if x is not None):
            factors = [factor(self.name, load("numpy"), weight, running) for weight in weights]
            column = np.asarray([1 if f is None else f for f in factors], dtypes.part(dtypes.working(running)))
            column = np.reshape(column, (-1, *(1 for _ in shape_of(first))))
            rows = scaled(backend, rows, backend.asarray(column), running)
        return backend.cast(rows, running)

    def add_weights(self, backend: Backend, total: Array, weights: Sequence[Weight], order: Order) -> Array:
        dtype, known = backend.dtype(total), backend.concrete(total)
        # A total that is known stays known: compiled code need not add up numbers.
        where = backend if known is None else load("numpy")
        values = [weight.cast(where, dtype) for weight in weights]
        start = total if known is None else np.asarray(known)
        added = reduce(where.add, [fold_pairwise(where.add, values)] if order == "tree" else values, start)
        return added if known is None else backend.full((), added, dtype, [total])


def _added(
    backend: Backend, running: np.dtype, order: Order, plan: tuple[bool | None, ...], total: Array, *arrays: Array
) -> tuple[Array]:
    """The kernel of `Added.update_many`.

    Args:
      backend: of the arrays.
      running: the accumulator's dtype.
      order: of the additions.
      plan: for each contribution whether it has a factor; None where there is no contribution, which keeps its place.
      total: the accumulator.
      arrays: the contributions that there are, then the factors that they have.
    """
    present = [has for has in plan if has is not None]
    contributions, factors = iter(arrays[: len(present)]), iter(arrays[len(present) :])

    def term(has: bool | None) -> tuple[Array, ...]:
        if has is None:
            return ()
        x = next(contributions)
        return (backend.cast(scaled(backend, x, next(factors) if has else None, running), running),)

    # A term is a tuple of one array or of none: None would be a free place in the tree.
    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        return (backend.add(*a, *b),) if a and b else a or b

    terms = [term(has) for has in plan]
    if order == "tree":
        terms = [fold_pairwise(add, terms)]
    (total,) = reduce(add, terms, (total,))
    return (total,)


def neutral(dtype: np.dtype) -> Any:
    """-0, which leaves every addend as it is: 0 + -0 would lose the sign."""
    return 0 if dtype.kind in "iu" else -0.0


def over_weight(backend: Backend, total: Array, totals: Totals) -> Array:
    """``total / weight`` in at least float32, correctly rounded; +0 where nothing was added.

    NaN where the sum of weights has overflowed: the quotient by infinity would be 0, a wrong number.
    """
    running = backend.dtype(total)
    working = dtypes.working(running)
    part = dtypes.part(working)

    def divisor() -> Array:
        weight = backend.cast(totals.weight, part)
        one, infinity = (backend.full((), value, part) for value in (1, np.inf))
        # No array: JAX looks for NaN where one is made, if it is asked to.
        weight = backend.where(weight == infinity, part.type(np.nan), weight)
        return backend.where(_empty(totals), one, weight)

    quotient = backend.divide(backend.cast(total, working), totals.once(("divisor", part), divisor))
    return zero_if_empty(backend, backend.cast(quotient, running), totals)


def zero_if_empty(backend: Backend, x: Array, totals: Totals) -> Array:
    """+0 where nothing was added."""
    count = backend.concrete(totals.count)
    if count is not None and count != 0:
        return x
    dtype = backend.dtype(x)
    zero = totals.once(("zero", dtype), lambda: backend.full((), 0, dtype))
    return backend.where(_empty(totals), zero, x)


def _empty(totals: Totals) -> Array:
    return totals.once("empty", lambda: totals.count == 0)
