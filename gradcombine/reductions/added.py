"""Plain accumulators that are added: one term after another, or a list of them in one pass over memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions.cell import Plain, Totals
from gradcombine.reductions.weights import Weight, factor, scaled, weighted
from gradcombine.types import Array, Order


@dataclass(frozen=True)
class Added(Plain):
    """A plain accumulator whose ``combine`` is addition."""

    additive: bool = True

    def update(self, backend: Backend, a: Array, x: Array, weight: Weight, totals: Totals) -> Array:
        running = backend.dtype(a)
        return backend.add(a, backend.cast(weighted(self.name, backend, x, weight, running), running))

    def merge(self, backend: Backend, a: Array, b: Array, a_totals: Totals, b_totals: Totals) -> Array:
        return backend.add(a, b)

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
