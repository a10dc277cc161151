"""The cell of exact sums and means: the same bits for any order, grouping and number of replicas, on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.errors import invalid
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Accumulator, Cell, Totals
from gradcombine.reductions.exact import digits, over_replicas, rounding
from gradcombine.reductions.exact.digits import BETWEEN, FLOAT32, SPILLED_CAPACITY, Decoded, Digits, Grid, grid_for
from gradcombine.reductions.exact.weighted import (
    ExactWeight,
    Part,
    deposits,
    limited,
    linked,
    not_differentiable,
    of_weight,
    rounded,
    weight_parts,
    weighted,
)
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Leaf, Order

BLOCK = 16
"""The number of terms of one pass over the digits."""

_PERIOD = BETWEEN.bit_length() - 1
"""log2 of `BETWEEN`."""


@dataclass(frozen=True)
class Exact(Cell):
    """The cell of exact sums and means of floats; see `gradcombine.reductions.exact.digits`.

    Adds contributions as integers, in any order. Rounds once, to the dtype of the result: the sum, or for a mean its
    quotient by the exact sum of weights.

    Attributes:
      spills: whether float32 digits spill, to have room for more contributions.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    spills: bool
    kinds: tuple[str, ...] = ("float",)
    takes_lists: bool = True
    takes_traced: bool = True
    joins: bool = True
    most_replicas: int = over_replicas.MOST_REPLICAS

    def running(self, dtype: np.dtype) -> np.dtype:
        # `empty` raises for wider floats.
        return grid_for(dtype).word if dtype.itemsize <= 8 else dtype

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Digits:
        if running.itemsize > 8:
            raise invalid("a float dtype of at most 64 bits", running)
        return Digits.of([backend.full(shape, 0, running, [like]) for _ in range(self._words(running))])

    def update(self, backend: Backend, a: Accumulator, x: Array, weight: Weight, totals: Totals) -> Digits:
        return self.idle(backend, self._deposit(backend, a, [x], [weight]), weight, totals)

    def update_many(
        self, backend: Backend, a: Accumulator, xs: Sequence[Array | None], weights: Sequence[Weight], order: Order
    ) -> Digits:
        # The digits do not depend on the order.
        present = [(x, w) for x, w in zip(xs, weights, strict=True) if x is not None]
        masked = [
            x if isinstance(w.zero, bool) else backend.where(w.zero, backend.full((), 0, backend.dtype(x)), x)
            for x, w in present
        ]
        return self._deposit(backend, a, masked, [w for _, w in present])

    def _deposit(self, backend: Backend, a: Digits, xs: Sequence[Array], weights: Sequence[Weight]) -> Digits:
        """Adds weighted terms; settles the words in the same pass if there are several."""
        grid = digits.grid_of(backend, a)
        parts = [[] if w.known == 1 else _parts(backend, grid, w) for w in weights]
        plan = tuple((w.is_integer, len(part)) for w, part in zip(weights, parts, strict=True))
        scalars = (array for parts_of_weight in parts for part in parts_of_weight for array in part)
        return Digits.of(backend.fused(_deposit, (grid, len(a.words), plan), [*a.words, *xs, *scalars]))

    def idle(self, backend: Backend, a: Accumulator, weight: Weight, totals: Totals) -> Digits:
        # The count of deposits is one for all leaves, so leaves without a gradient are settled with the others.
        if not a.spills:
            return a
        new = deposits(backend, weight)

        def is_due() -> Array:
            before = totals.weight.deposits
            return backend.shift_right(before, _PERIOD) != backend.shift_right(before + new, _PERIOD)

        due = totals.once(("due", new), is_due)
        return Digits.of(backend.apply_if_rare(due, _settle, (FLOAT32,), a.words))

    def merge(self, backend: Backend, a: Accumulator, b: Accumulator, a_totals: Totals, b_totals: Totals) -> Digits:
        return Digits.of(backend.fused(_merge, (digits.grid_of(backend, a),), [*a.words, *b.words]))

    def finish(self, backend: Backend, a: Accumulator, totals: Totals, output: np.dtype) -> Array:
        grid = digits.grid_of(backend, a)
        full = SPILLED_CAPACITY if a.spills else grid.capacity
        scalars = [totals.once(("overfull", full), lambda: totals.weight.deposits > full)]
        if self.divides:
            scalars += totals.once(("divisor", grid), lambda: rounded(backend, grid, totals.weight))
        results = backend.fused(_finish, (grid, len(a.words), output), [*a.words, *scalars])
        return not_differentiable(self.name, backend, results, totals.weight.link)[0]

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf]) -> ExactWeight:
        word = grid_for(dtype).word
        words = [backend.full((), 0, word, like) for _ in range(self._words(word))]
        counts = (backend.full((), 0, dtype, like) for dtype in (dtypes.INT32, dtypes.FLOAT32))
        return ExactWeight(Digits.of(words), *counts)

    def add_weight(self, backend: Backend, total: Accumulator, weight: Weight) -> ExactWeight:
        return self._with_weights(backend, total, [weight])

    def total_weight(
        self, backend: Backend, dtype: np.dtype, like: Sequence[Leaf], weights: Sequence[Weight], order: Order
    ) -> ExactWeight:
        return self._with_weights(backend, self.empty_weight(backend, dtype, like), weights)

    @np.errstate(all="ignore")
    def _with_weights(self, backend: Backend, total: ExactWeight, weights: Sequence[Weight]) -> ExactWeight:
        """Adds weights to a sum of weights; the result does not depend on their order."""
        summed, known = self._digits(backend, total), [w for w in weights if w.known]
        grid = digits.grid_of(backend, summed)
        if known:
            # In NumPy, so that traced programs have a constant.
            words = _of_known(grid, len(summed.words), tuple((w.known, w.is_integer) for w in known))
            constants = [backend.full((), word, grid.word) for word in words]
            summed = digits.merge(backend, grid, summed, Digits.of(constants))
        unknown = [w for w in weights if w.known is None]
        summed = _deposit_all(backend, grid, summed, _weights(backend, grid, unknown))
        count = sum(deposits(backend, w) for w in weights)
        link = linked(backend, total.link, [w.array for w in unknown]) if unknown else total.link
        return ExactWeight(digits.settle(backend, grid, summed), limited(backend, total.deposits + count), link)

    def link(self, backend: Backend, total: Accumulator, leaves: Sequence[Leaf]) -> ExactWeight:
        return total._replace(link=linked(backend, total.link, leaves))

    @np.errstate(all="ignore")
    def merge_weights(self, backend: Backend, a: Accumulator, b: Accumulator) -> ExactWeight:
        left, right = self._digits(backend, a), self._digits(backend, b)
        merged = digits.merge(backend, digits.grid_of(backend, left), left, right)
        return ExactWeight(merged, limited(backend, a.deposits + b.deposits), a.link + b.link)

    def all_merge(
        self, backend: Backend, collective: Collective, accumulators: Sequence[Accumulator], totals: Totals
    ) -> tuple[list[Accumulator], Totals]:
        sums = [*accumulators, self._digits(backend, totals.weight)]
        tops = over_replicas.highest(backend, collective, sums)
        return over_replicas.merged(backend, collective, sums, tops, totals)

    def all_finish(
        self,
        backend: Backend,
        collective: Collective,
        accumulators: Sequence[Accumulator],
        outputs: Sequence[np.dtype],
        totals: Totals,
        weight: Weight,
    ) -> list[Array] | None:
        most = collective.size() * deposits(backend, weight)
        plans = [over_replicas.plan(backend, a, collective.size(), most) for a in accumulators]
        possible = [plan for plan in plans if plan is not None]
        if len(possible) < len(plans):
            return None
        weights = self._digits(backend, totals.weight)
        *tops, top = over_replicas.highest(backend, collective, [*accumulators, weights])
        _, merged = over_replicas.merged(backend, collective, [weights], [top], totals)
        divisors = [rounded(backend, grid, merged.weight) if self.divides else () for grid, _ in possible]
        leaves = list(zip(possible, accumulators, tops, outputs, strict=True))
        results = over_replicas.finish(backend, collective, leaves, divisors)
        return not_differentiable(self.name, backend, results, totals.weight.link)

    def _digits(self, backend: Backend, total: ExactWeight) -> Digits:
        """The digits of a sum of weights; raises for a state of a reduction with another ``max_terms``."""
        if len(total.digits.words) != self._words(digits.grid_of(backend, total.digits).word):
            raise invalid("a state for the same max_terms", total.digits.in_words)
        return total.digits

    def _words(self, word: np.dtype) -> int:
        """The number of words of an element."""
        return 6 if self.spills and word == FLOAT32.word else 3


@np.errstate(all="ignore")  # words wrap around on purpose
def _deposit_all(backend: Backend, grid: Grid, a: Digits, values: Sequence[Decoded]) -> Digits:
    for start in range(0, len(values), BLOCK):
        if start and start % BETWEEN == 0:
            a = digits.settle(backend, grid, a)
        a = digits.deposit(backend, grid, a, values[start : start + BLOCK])
    return a


@np.errstate(all="ignore")
def _settle(backend: Backend, grid: Grid, *words: Array) -> tuple[Array, ...]:
    return digits.settle(backend, grid, Digits.of(words)).words


def _parts(backend: Backend, grid: Grid, weight: Weight) -> list[Part]:
    return weight.once((backend.name, grid), lambda: weight_parts(backend, grid, weight))


def _weights(backend: Backend, grid: Grid, weights: Sequence[Weight]) -> list[Decoded]:
    """The decoded terms of a sum of weights."""
    parts = (part for weight in weights for part in _parts(backend, grid, weight))
    return [of_weight(backend, grid, part) for part in parts]


@lru_cache(256)
def _of_known(grid: Grid, size: int, weights: tuple[tuple[float | None, bool], ...]) -> list[int]:
    """The ``size`` words of a sum of known weights; cached, as most steps have the same ones."""
    values = _weights(NUMPY, grid, [Weight(known, None, is_integer, known == 0) for known, is_integer in weights])
    zeros = Digits.of([NUMPY.full((), 0, grid.word) for _ in range(size)])
    return [int(word) for word in _deposit_all(NUMPY, grid, zeros, values).words]


def _deposit(
    backend: Backend, grid: Grid, size: int, plan: tuple[tuple[bool, int], ...], *arrays: Array
) -> tuple[Array, ...]:
    """The kernel of `Exact.update_many`.

    Args:
      size: the number of words of the accumulator.
      plan: for each weight, whether its type is an integer, and the number of its parts; no parts if it is known to be
        1.
      arrays: the words of the accumulator, the contributions, and the parts of the weights.
    """
    words, xs, scalars = arrays[:size], arrays[size : size + len(plan)], iter(arrays[size + len(plan) :])
    values: list[Decoded] = []
    for x, (is_integer, count) in zip(xs, plan, strict=True):
        parts = [Part(next(scalars), next(scalars)) for _ in range(count)]
        values += weighted(backend, grid, backend.cast(x, grid.value), parts, is_integer)
    total = _deposit_all(backend, grid, Digits.of(words), values)
    return (digits.settle(backend, grid, total) if len(plan) > 1 else total).words


@np.errstate(all="ignore")
def _merge(backend: Backend, grid: Grid, *arrays: Array) -> tuple[Array, ...]:
    size = len(arrays) // 2
    return digits.merge(backend, grid, Digits.of(arrays[:size]), Digits.of(arrays[size:])).words


@np.errstate(all="ignore")
def _finish(backend: Backend, grid: Grid, size: int, output: np.dtype, *arrays: Array) -> tuple[Array]:
    """The kernel of `Exact.finish`; arrays: accumulator, whether the capacity is exceeded, and the mean's divisor."""
    overfull, *divisor = arrays[size:]
    wide = rounding.carry(backend, grid, Digits.of(arrays[:size]))
    result = rounding.finished(backend, grid, wide, arrays[0], divisor, output)
    return (backend.where(overfull, backend.full((), np.nan, output), result),)
