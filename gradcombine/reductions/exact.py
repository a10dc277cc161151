"""Exact sums: the same bits for any order, any grouping, any number of replicas, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend, Collective
from gradcombine.errors import GradCombineError
from gradcombine.reductions import digits, dtypes, grid, rounding, spill, terms, wire
from gradcombine.reductions.cell import Totals
from gradcombine.reductions.digits import Digits
from gradcombine.reductions.grid import FLOAT32, Grid
from gradcombine.reductions.spill import SpilledDigits
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Order

BLOCK = 16
"""The terms of one pass over the digits."""

_HALF = 13
"""The lower bits of a number of deposits."""


class ExactWeight(NamedTuple):
    """The sum of weights, in digits, and the number of deposits that each accumulator has had."""

    slot0: Array
    slot1: Array
    slot2: Array
    deposits: Array


class SpilledWeight(NamedTuple):
    """As `ExactWeight`, of a reduction with room for more."""

    slot0: Array
    slot1: Array
    slot2: Array
    spill0: Array
    spill1: Array
    spill2: Array
    deposits: Array


@dataclass(frozen=True)
class Exact:
    """The cell of exact sums and means of floats; see `gradcombine.reductions.digits`.

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
    compound: tuple[type, ...] = (Digits, SpilledDigits)
    additive: bool = False

    def running(self, dtype: np.dtype) -> np.dtype:
        return grid.of(dtype).word

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
        xs, weights = zip(*((x, w) for x, w in zip(xs, weights, strict=True) if x is not None), strict=True)
        own = grid.of(backend.dtype(a.slot0))
        parts = [[] if w.is_one else terms.weight_parts(backend, own, w) for w in weights]
        ones = [[] if w.known is not None else [_is_one(backend, w)] for w in weights]
        plan = tuple((w.whole, len(part), bool(one)) for w, part, one in zip(weights, parts, ones, strict=True))
        scalars = (array for part, one in zip(parts, ones, strict=True) for array in (*part, *one))
        return type(a)(*backend.fused(_deposit, (own, type(a), plan), [*a, *xs, *scalars]))

    def merge(self, backend: Backend, a: Any, b: Any, a_totals: Totals, b_totals: Totals) -> Any:
        return type(a)(*backend.fused(_merge, (grid.of(backend.dtype(a.slot0)), type(a)), [*a, *b]))

    def finish(self, backend: Backend, a: Any, totals: Totals, output: np.dtype) -> Array:
        own = grid.of(backend.dtype(a.slot0))
        full = _CAPACITY[type(a), own]
        scalars = [totals.weight.deposits > full]
        if self.divides:
            scalars.append(_rounded(backend, own, totals.weight))
        (result,) = backend.fused(_finish, (own, type(a), output), [*a, *scalars])
        return result

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Any]) -> Any:
        kind = self._kind(grid.of(dtype).word)
        words = (backend.full((), 0, grid.of(dtype).word, like) for _ in kind._fields)
        return _counted(kind(*words), backend.full((), 0, dtypes.INT32, like))

    def add_weight(self, backend: Backend, total: Any, weight: Weight) -> Any:
        return self.add_weights(backend, total, [weight], "sequential")

    @np.errstate(all="ignore")
    def add_weights(self, backend: Backend, total: Any, weights: Sequence[Weight], order: Order) -> Any:
        """The sum of weights with several more, which no order changes."""
        own, words = grid.of(backend.dtype(total.slot0)), self._words(backend, total)
        kind, known = type(words), [w for w in weights if w.known]
        if known:
            # Weights that are known while tracing are added up there.
            values = [part for w in known for part in terms.weight_parts(NUMPY, own, w)]
            zeros = (NUMPY.full((), 0, own.word) for _ in kind._fields)
            added = _deposit_all(NUMPY, own, kind(*zeros), values)
            words = _module(kind).merge(backend, own, words, kind(*(backend.full((), int(x), own.word) for x in added)))
        for w in weights:
            if w.known is None:
                words = _deposit_all(backend, own, words, terms.weight_parts(backend, own, w))
        count = sum(terms.deposits(backend, w) for w in weights)
        return _counted(words, _limited(backend, total.deposits + count))

    @np.errstate(all="ignore")
    def merge_weights(self, backend: Backend, a: Any, b: Any) -> Any:
        own, left, right = grid.of(backend.dtype(a.slot0)), self._words(backend, a), self._words(backend, b)
        words = _module(type(left)).merge(backend, own, left, right)
        return _counted(words, _limited(backend, a.deposits + b.deposits))

    @property
    def most_replicas(self) -> int:
        return wire.MOST_REPLICAS

    def all_merge(
        self, backend: Backend, collective: Collective, accumulators: Sequence[Any], totals: Totals
    ) -> tuple[list[Any], Totals]:
        # Counts up to a limit of 2**26 each: the sum of their halves does not overflow.
        deposits, half = totals.weight.deposits, (1 << _HALF) - 1
        counts = [totals.count, deposits & half, backend.shift_right(deposits, _HALF)]
        sums = [*accumulators, self._words(backend, totals.weight)]
        (*merged, words), (count, low, high) = wire.all_merge(backend, collective, sums, counts)
        many = backend.full((), (spill.CAPACITY >> _HALF) + 1, dtypes.INT32)
        high = backend.where(high < many, high, many)
        weight = _counted(words, _limited(backend, backend.shift_left(high, _HALF) + low))
        return merged, Totals(weight, count)

    def _words(self, backend: Backend, total: Any) -> Any:
        """The digits of a sum of weights.

        Raises:
          GradCombineError: for a state of a reduction with more or less room.
        """
        kind = self._kind(backend.dtype(total.slot0))
        if len(total) != len(kind._fields) + 1:
            raise GradCombineError(self.name, "a state made with room for as many terms", type(total).__name__)
        return kind(*total[:-1])

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
def _deposit_all(backend: Backend, own: Grid, a: Any, values: Sequence[Array]) -> Any:
    for start in range(0, len(values), BLOCK):
        a = _module(type(a)).deposit(backend, own, a, values[start : start + BLOCK])
    return a


def _deposit(backend: Backend, own: Grid, kind: type, plan: tuple[tuple[bool, int, bool], ...], *arrays: Array) -> Any:
    """The kernel of `Exact.update_many`: accumulator, contributions, and of each weight its parts and whether it is 1.

    Args:
      backend: of the arrays.
      own: the grid.
      kind: the class of the accumulator.
      plan: of each weight, whether it is whole, the number of its parts, and whether it is traced.
      arrays: one after another.
    """
    size = len(kind._fields)
    words, xs, scalars = arrays[:size], arrays[size : size + len(plan)], iter(arrays[size + len(plan) :])
    values: list[Array] = []
    for x, (whole, count, traced) in zip(xs, plan, strict=True):
        weight = [next(scalars) for _ in range(count)]
        one = next(scalars) if traced else None
        values += terms.weighted(backend, own, backend.cast(x, own.value), weight, whole, one)
    return _deposit_all(backend, own, kind(*words), values)


@np.errstate(all="ignore")
def _merge(backend: Backend, own: Grid, kind: type, *arrays: Array) -> Any:
    size = len(kind._fields)
    return _module(kind).merge(backend, own, kind(*arrays[:size]), kind(*arrays[size:]))


@np.errstate(all="ignore")
def _finish(backend: Backend, own: Grid, kind: type, output: np.dtype, *arrays: Array) -> tuple[Array]:
    """The kernel of `Exact.finish`: accumulator, whether it has had too much, and the divisor of a mean."""
    size = len(kind._fields)
    overfull, *divisor = arrays[size:]
    wide = rounding.carry(backend, own, Digits(*arrays[:3]), arrays[3:size])
    if divisor:
        wide = rounding.divide(backend, own, wide, divisor[0])
    result = rounding.special(backend, own, arrays[0], rounding.to_float(backend, own, wide, output))
    result = backend.where(overfull, backend.full((), np.nan, own.value), result)
    return (backend.cast(result, output),)


@np.errstate(all="ignore")
def _rounded(backend: Backend, own: Grid, total: Any) -> Array:
    """The sum of weights, rounded once to the grid's float; 1 where there were none."""
    kept = grid.of(backend.dtype(total.slot0))
    wide = rounding.carry(backend, kept, Digits(*total[:3]), total[3:-1])
    value = rounding.special(backend, kept, total.slot0, rounding.to_float(backend, kept, wide, own.value))
    one = backend.full((), 1, own.value)
    return backend.where(total.deposits == 0, one, backend.cast(value, own.value))


def _is_one(backend: Backend, weight: Weight) -> Array:
    return weight.array == backend.full((), 1, backend.dtype(weight.array))


def _counted(words: Digits | SpilledDigits, deposits: Array) -> ExactWeight | SpilledWeight:
    if isinstance(words, SpilledDigits):
        return SpilledWeight(*words, deposits)
    return ExactWeight(*words, deposits)


def _limited(backend: Backend, deposits: Array) -> Array:
    """A count that stays above every capacity once it is there, in place of wrapping around."""
    most = backend.full((), spill.CAPACITY + 1, dtypes.INT32)
    return backend.where(deposits > most, most, deposits)
