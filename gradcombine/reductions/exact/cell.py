"""Exact sums: the same bits for any order, any grouping, any number of replicas, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import ArrayLeaves, Totals
from gradcombine.reductions.exact import digits, grid, rounding, scatter, spill, terms, wire
from gradcombine.reductions.exact.digits import Decoded, Digits
from gradcombine.reductions.exact.grid import FLOAT32, Grid
from gradcombine.reductions.exact.spill import SpilledDigits
from gradcombine.reductions.exact.terms import Part
from gradcombine.reductions.exact.weight import counted, limited, linked, refusing, rounded
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Order

BLOCK = 16
"""The terms of one pass over the digits."""

_PERIOD = spill.BETWEEN.bit_length() - 1
"""``2**_PERIOD`` deposits may come between two settlements."""


@dataclass(frozen=True)
class Exact(ArrayLeaves):
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
    kinds: tuple[str, ...] = (dtypes.FLOAT_OF_BITS,)
    additive: bool = False

    def running(self, dtype: np.dtype) -> np.dtype:
        # No state has the words of a wider float.
        return grid.of(dtype).word if dtype.itemsize <= 8 else dtype

    def output(self, dtype: np.dtype) -> np.dtype:
        return self.settings.output(dtype)

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Digits | SpilledDigits:
        kind = self._kind(running)
        return kind(*(backend.full(shape, 0, running, [like]) for _ in kind._fields))

    def update(self, backend: Backend, a: Any, x: Array, weight: Weight, totals: Totals) -> Any:
        return self.update_many(backend, a, [x], [weight], totals, "sequential")

    def takes_many(self, weights: Sequence[Weight]) -> bool:
        return True

    def update_many(
        self,
        backend: Backend,
        a: Any,
        xs: Sequence[Array | None],
        weights: Sequence[Weight],
        totals: Totals,
        order: Order,
    ) -> Any:
        # No order changes the digits.
        every = weights
        xs, weights = zip(*((x, w) for x, w in zip(xs, weights, strict=True) if x is not None), strict=True)
        own = grid.of(backend.dtype(a.slot0))
        parts = [[] if w.is_one else terms.weight_parts(backend, own, w) for w in weights]
        plan = tuple((w.whole, len(part)) for w, part in zip(weights, parts, strict=True))
        scalars = (array for several in parts for part in several for array in part)
        words = type(a)(*backend.fused(_deposit, (own, type(a), plan), [*a, *xs, *scalars]))
        # A list is settled in the same pass.
        return words if len(plan) > 1 else self.idle(backend, words, every, totals)

    def idle(self, backend: Backend, a: Any, weights: Sequence[Weight], totals: Totals) -> Any:
        if not isinstance(a, SpilledDigits):
            return a
        before = totals.weight.deposits
        after = before + sum(terms.deposits(backend, w) for w in weights)
        due = backend.shift_right(before, _PERIOD) != backend.shift_right(after, _PERIOD)
        return SpilledDigits(*backend.seldom(due, _settle, (FLOAT32,), a))

    def merge(self, backend: Backend, a: Any, b: Any, a_totals: Totals, b_totals: Totals) -> Any:
        return type(a)(*backend.fused(_merge, (grid.of(backend.dtype(a.slot0)), type(a)), [*a, *b]))

    def finish(self, backend: Backend, a: Any, totals: Totals, output: np.dtype) -> Array:
        own = grid.of(backend.dtype(a.slot0))
        full = _CAPACITY[type(a), own]
        scalars = [totals.weight.deposits > full]
        if self.divides:
            scalars += rounded(backend, own, totals.weight)
        results = backend.fused(_finish, (own, type(a), output), [*a, *scalars])
        return refusing(self.name, backend, results, totals.weight.link)[0]

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Any]) -> Any:
        kind = self._kind(grid.of(dtype).word)
        words = (backend.full((), 0, grid.of(dtype).word, like) for _ in kind._fields)
        counts = (backend.full((), 0, dtype, like) for dtype in (dtypes.INT32, dtypes.FLOAT32))
        return counted(kind(*words), *counts)

    def add_weight(self, backend: Backend, total: Any, weight: Weight) -> Any:
        return self.add_weights(backend, total, [weight], "sequential")

    @np.errstate(all="ignore")
    def add_weights(self, backend: Backend, total: Any, weights: Sequence[Weight], order: Order) -> Any:
        """The sum of weights with several more, which no order changes."""
        own, words = grid.of(backend.dtype(total.slot0)), self._words(backend, total)
        kind, known = type(words), [w for w in weights if w.known]
        if known:
            # Weights that are known while tracing are added up there.
            values = _weights(NUMPY, own, known)
            zeros = (NUMPY.full((), 0, own.word) for _ in kind._fields)
            added = _deposit_all(NUMPY, own, kind(*zeros), values)
            words = _module(kind).merge(backend, own, words, kind(*(backend.full((), int(x), own.word) for x in added)))
        words = _deposit_all(backend, own, words, _weights(backend, own, [w for w in weights if w.known is None]))
        if isinstance(words, SpilledDigits):
            words = spill.settle(backend, own, words)
        count = sum(terms.deposits(backend, w) for w in weights)
        arrays = [w.array for w in weights if w.known is None]
        link = linked(backend, total.link, arrays) if arrays else total.link
        return counted(words, limited(backend, total.deposits + count), link)

    def link(self, backend: Backend, total: Any, leaves: Sequence[Any]) -> Any:
        return total._replace(link=linked(backend, total.link, leaves))

    @np.errstate(all="ignore")
    def merge_weights(self, backend: Backend, a: Any, b: Any) -> Any:
        own, left, right = grid.of(backend.dtype(a.slot0)), self._words(backend, a), self._words(backend, b)
        words = _module(type(left)).merge(backend, own, left, right)
        return counted(words, limited(backend, a.deposits + b.deposits), a.link + b.link)

    @property
    def most_replicas(self) -> int:
        return wire.MOST_REPLICAS

    def all_merge(
        self, backend: Backend, collective: Collective, accumulators: Sequence[Any], totals: Totals
    ) -> tuple[list[Any], Totals]:
        sums = [*accumulators, self._words(backend, totals.weight)]
        tops = wire.highest(backend, collective, sums)
        return wire.merged(backend, collective, sums, tops, totals)

    def all_finish(
        self,
        backend: Backend,
        collective: Collective,
        accumulators: Sequence[Any],
        outputs: Sequence[np.dtype],
        totals: Totals,
        weight: Weight,
    ) -> list[Array] | None:
        most = collective.size() * terms.deposits(backend, weight)
        plans = [scatter.plan(grid.of(backend.dtype(a.slot0)), collective.size(), most) for a in accumulators]
        fitting = [plan for plan in plans if plan is not None]
        if len(fitting) < len(plans):
            return None
        words = self._words(backend, totals.weight)
        *tops, top = wire.highest(backend, collective, [*accumulators, words])
        _, merged = wire.merged(backend, collective, [words], [top], totals)
        divisors = [rounded(backend, own, merged.weight) if self.divides else () for own, _ in fitting]
        leaves = list(zip(fitting, accumulators, tops, outputs, strict=True))
        results = scatter.finish(backend, collective, leaves, divisors)
        return refusing(self.name, backend, results, totals.weight.link)

    def _words(self, backend: Backend, total: Any) -> Any:
        """The digits of a sum of weights.

        Raises:
          GradCombineError: for a state of a reduction with more or less room.
        """
        kind = self._kind(backend.dtype(total.slot0))
        if len(total) != len(kind._fields) + 2:
            raise GradCombineError(self.name, "a state made with room for as many terms", type(total).__name__)
        return kind(*total[:-2])

    def _kind(self, word: np.dtype) -> type[Digits] | type[SpilledDigits]:
        return SpilledDigits if self.many and word == FLOAT32.word else Digits


_CAPACITY = {
    (Digits, grid.FLOAT32): grid.FLOAT32.capacity,
    (Digits, grid.FLOAT64): grid.FLOAT64.capacity,
    (SpilledDigits, grid.FLOAT32): spill.CAPACITY,
}


def _module(kind: type) -> Any:
    return spill if kind is SpilledDigits else digits


@np.errstate(all="ignore")  # words wrap around, as meant
def _deposit_all(backend: Backend, own: Grid, a: Any, values: Sequence[Decoded]) -> Any:
    for start in range(0, len(values), BLOCK):
        if start and start % spill.BETWEEN == 0 and isinstance(a, SpilledDigits):
            a = spill.settle(backend, own, a)
        a = _module(type(a)).deposit(backend, own, a, values[start : start + BLOCK])
    return a


@np.errstate(all="ignore")
def _settle(backend: Backend, own: Grid, *words: Array) -> SpilledDigits:
    return spill.settle(backend, own, SpilledDigits(*words))


def _weights(backend: Backend, own: Grid, weights: Sequence[Weight]) -> list[Decoded]:
    """What weights add to their sum."""
    parts = (part for weight in weights for part in terms.weight_parts(backend, own, weight))
    return [terms.of_weight(backend, own, part) for part in parts]


def _deposit(backend: Backend, own: Grid, kind: type, plan: tuple[tuple[bool, int], ...], *arrays: Array) -> Any:
    """The kernel of `Exact.update_many`: accumulator, contributions, and of each weight its parts.

    Args:
      backend: of the arrays.
      own: the grid.
      kind: the class of the accumulator.
      plan: of each weight, whether it is whole, and the number of its parts: none where it is known to be 1.
      arrays: one after another.
    """
    size = len(kind._fields)
    words, xs, scalars = arrays[:size], arrays[size : size + len(plan)], iter(arrays[size + len(plan) :])
    values: list[Decoded] = []
    for x, (whole, count) in zip(xs, plan, strict=True):
        parts = [Part(next(scalars), next(scalars)) for _ in range(count)]
        values += terms.weighted(backend, own, backend.cast(x, own.value), parts, whole)
    total = _deposit_all(backend, own, kind(*words), values)
    return spill.settle(backend, own, total) if len(plan) > 1 and kind is SpilledDigits else total


@np.errstate(all="ignore")
def _merge(backend: Backend, own: Grid, kind: type, *arrays: Array) -> Any:
    size = len(kind._fields)
    return _module(kind).merge(backend, own, kind(*arrays[:size]), kind(*arrays[size:]))


@np.errstate(all="ignore")
def _finish(backend: Backend, own: Grid, kind: type, output: np.dtype, *arrays: Array) -> tuple[Array]:
    """The kernel of `Exact.finish`: accumulator, whether it has had too much, and the divisor of a mean."""
    size = len(kind._fields)
    overfull, *divisor = arrays[size:]
    spilled = spill.beside(backend, own, kind(*arrays[:size])) if kind is SpilledDigits else ()
    wide = rounding.carry(backend, own, Digits(*arrays[:3]), spilled)
    result = rounding.finished(backend, own, wide, arrays[0], divisor, output)
    return (backend.where(overfull, backend.full((), np.nan, output), result),)
