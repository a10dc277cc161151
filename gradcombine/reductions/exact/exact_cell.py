"""Exact sums: the same bits for any order, any grouping, any number of replicas, in every framework."""

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
    of_weight,
    refusing,
    rounded,
    weight_parts,
    weighted,
)
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Leaf, Order

BLOCK = 16
"""The terms of one pass over the digits."""

_PERIOD = BETWEEN.bit_length() - 1
"""``2**_PERIOD`` deposits may come between two settlements."""


@dataclass(frozen=True)
class Exact(Cell):
    """The cell of exact sums and means of floats; see `gradcombine.reductions.exact.digits`.

    Every contribution is a multiple of a fixed unit, and integers add in any order. The one rounding is at the end: the
    digits, divided by the exact sum of weights for a mean, to the dtype of the result.

    Attributes:
      many: whether float32 digits spill, since their words may not hold the contributions.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    many: bool
    kinds: tuple[str, ...] = ("float",)
    takes_lists: bool = True
    takes_traced: bool = True
    joins: bool = True
    most_replicas: int = over_replicas.MOST_REPLICAS

    def running(self, dtype: np.dtype) -> np.dtype:
        # No state has the words of a wider float.
        return grid_for(dtype).word if dtype.itemsize <= 8 else dtype

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Leaf) -> Digits:
        if running.itemsize > 8:
            raise invalid("a dtype that is float of at most 64 bits", running)
        return Digits.of([backend.full(shape, 0, running, [like]) for _ in range(self._words(running))])

    def update(self, backend: Backend, a: Accumulator, x: Array, weight: Weight, totals: Totals) -> Digits:
        return self.idle(backend, self._deposited(backend, a, [x], [weight]), weight, totals)

    def update_many(
        self, backend: Backend, a: Accumulator, xs: Sequence[Array | None], weights: Sequence[Weight], order: Order
    ) -> Digits:
        # No order changes the digits.
        present = [(x, w) for x, w in zip(xs, weights, strict=True) if x is not None]
        masked = [
            x if isinstance(w.zero, bool) else backend.where(w.zero, backend.full((), 0, backend.dtype(x)), x)
            for x, w in present
        ]
        return self._deposited(backend, a, masked, [w for _, w in present])

    def _deposited(self, backend: Backend, a: Digits, xs: Sequence[Array], weights: Sequence[Weight]) -> Digits:
        """The digits with these terms; several are settled in the same pass."""
        grid = digits.grid_of(backend, a)
        parts = [[] if w.known == 1 else _parts(backend, grid, w) for w in weights]
        plan = tuple((w.whole, len(part)) for w, part in zip(weights, parts, strict=True))
        scalars = (array for several in parts for part in several for array in part)
        return Digits.of(backend.fused(_deposit, (grid, len(a.words), plan), [*a.words, *xs, *scalars]))

    def idle(self, backend: Backend, a: Accumulator, weight: Weight, totals: Totals) -> Digits:
        if not a.spills:
            return a
        added = deposits(backend, weight)

        def is_due() -> Array:
            before = totals.weight.deposits
            return backend.shift_right(before, _PERIOD) != backend.shift_right(before + added, _PERIOD)

        due = totals.once(("due", added), is_due)
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
        return refusing(self.name, backend, results, totals.weight.link)[0]

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
        """The sum of weights with several more, which no order changes."""
        summed, known = self._digits(backend, total), [w for w in weights if w.known]
        grid = digits.grid_of(backend, summed)
        if known:
            # Weights that are known while tracing are added up there.
            words = _of_known(grid, len(summed.words), tuple((w.known, w.whole) for w in known))
            constants = [backend.full((), word, grid.word) for word in words]
            summed = digits.merge(backend, grid, summed, Digits.of(constants))
        summed = _deposit_all(backend, grid, summed, _weights(backend, grid, [w for w in weights if w.known is None]))
        count = sum(deposits(backend, w) for w in weights)
        arrays = [w.array for w in weights if w.known is None]
        link = linked(backend, total.link, arrays) if arrays else total.link
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
        fitting = [plan for plan in plans if plan is not None]
        if len(fitting) < len(plans):
            return None
        weights = self._digits(backend, totals.weight)
        *tops, top = over_replicas.highest(backend, collective, [*accumulators, weights])
        _, merged = over_replicas.merged(backend, collective, [weights], [top], totals)
        divisors = [rounded(backend, grid, merged.weight) if self.divides else () for grid, _ in fitting]
        leaves = list(zip(fitting, accumulators, tops, outputs, strict=True))
        results = over_replicas.finish(backend, collective, leaves, divisors)
        return refusing(self.name, backend, results, totals.weight.link)

    def _digits(self, backend: Backend, total: ExactWeight) -> Digits:
        """The digits of a sum of weights.

        Raises:
          GradCombineError: for a state of a reduction with more or less room.
        """
        if len(total.digits.words) != self._words(digits.grid_of(backend, total.digits).word):
            raise invalid("a state made for as many terms", total.digits.in_words)
        return total.digits

    @property
    def room(self) -> int | None:
        """For how many terms sums have room, where that is more than by default."""
        return SPILLED_CAPACITY if self.many else None

    def _words(self, word: np.dtype) -> int:
        """How many words an element has."""
        return 6 if self.many and word == FLOAT32.word else 3


@np.errstate(all="ignore")  # words wrap around, as meant
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
    """The addends of the sum of weights, decoded."""
    parts = (part for weight in weights for part in _parts(backend, grid, weight))
    return [of_weight(backend, grid, part) for part in parts]


@lru_cache(256)
def _of_known(grid: Grid, size: int, weights: tuple[tuple[float | None, bool], ...]) -> list[int]:
    """The words, so many of them, of the sum of known weights: of most steps the same ones."""
    values = _weights(NUMPY, grid, [Weight(known, None, whole, known == 0) for known, whole in weights])
    zeros = Digits.of([NUMPY.full((), 0, grid.word) for _ in range(size)])
    return [int(word) for word in _deposit_all(NUMPY, grid, zeros, values).words]


def _deposit(
    backend: Backend, grid: Grid, size: int, plan: tuple[tuple[bool, int], ...], *arrays: Array
) -> tuple[Array, ...]:
    """The kernel of `Exact.update_many`: accumulator, contributions, and of each weight its parts.

    Args:
      backend: of the arrays.
      grid: of the accumulator.
      size: the number of the accumulator's words.
      plan: of each weight, whether it is whole, and the number of its parts: none where it is known to be 1.
      arrays: one after another.
    """
    words, xs, scalars = arrays[:size], arrays[size : size + len(plan)], iter(arrays[size + len(plan) :])
    values: list[Decoded] = []
    for x, (whole, count) in zip(xs, plan, strict=True):
        parts = [Part(next(scalars), next(scalars)) for _ in range(count)]
        values += weighted(backend, grid, backend.cast(x, grid.value), parts, whole)
    total = _deposit_all(backend, grid, Digits.of(words), values)
    return (digits.settle(backend, grid, total) if len(plan) > 1 else total).words


@np.errstate(all="ignore")
def _merge(backend: Backend, grid: Grid, *arrays: Array) -> tuple[Array, ...]:
    size = len(arrays) // 2
    return digits.merge(backend, grid, Digits.of(arrays[:size]), Digits.of(arrays[size:])).words


@np.errstate(all="ignore")
def _finish(backend: Backend, grid: Grid, size: int, output: np.dtype, *arrays: Array) -> tuple[Array]:
    """The kernel of `Exact.finish`: accumulator, whether it has had too much, and the divisor of a mean."""
    overfull, *divisor = arrays[size:]
    wide = rounding.carry(backend, grid, Digits.of(arrays[:size]))
    result = rounding.finished(backend, grid, wide, arrays[0], divisor, output)
    return (backend.where(overfull, backend.full((), np.nan, output), result),)
