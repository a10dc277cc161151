"""Plain accumulators that are added: one term after another, or a list of them in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import ArrayLeaves, CommonCell, Totals
from gradcombine.reductions.weights import Weight, factor, scaled, weighted
from gradcombine.types import Array, Order


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

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Array:
        return backend.full(shape, neutral(running), running, [like])

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        running = backend.dtype(a)
        return backend.add(a, backend.cast(weighted(self.name, backend, x, weight, running), running))

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
        factors = [factor(self.name, backend, weight, running) for weight in weights]
        plan = tuple(None if x is None else f is not None for x, f in zip(xs, factors, strict=True))
        arrays = [x for x in xs if x is not None]
        scalars = [f for x, f in zip(xs, factors, strict=True) if x is not None and f is not None]
        (total,) = backend.fused(_added, (running, order, plan), [a, *arrays, *scalars])
        return total

    def add_weights(self, backend: Backend, total: Array, weights: Sequence[Weight], order: Order) -> Array:
        values = [weight.cast(backend, backend.dtype(total)) for weight in weights]
        return reduce(backend.add, [fold_pairwise(backend.add, values)] if order == "tree" else values, total)


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
    weight = backend.cast(totals.weight, dtypes.part(working))
    one, infinity = (backend.full((), value, dtypes.part(working)) for value in (1, np.inf))
    # No array: JAX looks for NaN where one is made, if it is asked to.
    weight = backend.where(weight == infinity, dtypes.part(working).type(np.nan), weight)
    divisor = backend.where(totals.count == 0, one, weight)
    quotient = backend.divide(backend.cast(total, working), divisor)
    return zero_if_empty(backend, backend.cast(quotient, running), totals)


def zero_if_empty(backend: Backend, x: Array, totals: Totals) -> Array:
    """+0 where nothing was added."""
    count = backend.concrete(totals.count)
    if count is not None and count != 0:
        return x
    return backend.where(totals.count == 0, backend.full((), 0, backend.dtype(x)), x)
