"""Exact sums: the same bits for any order, any grouping, any number of replicas, in every framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import GradCombineError
from gradcombine.reductions import digits, dtypes
from gradcombine.reductions.cell import Totals, weighted
from gradcombine.reductions.digits import FLOAT32, INT32, Digits
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array

_LOW_BITS = 12
_LOW = (1 << _LOW_BITS) - 1


class ExactWeight(NamedTuple):
    """The sum of weights, in digits, and the number of deposits that each accumulator has had."""

    slot0: Array
    slot1: Array
    slot2: Array
    deposits: Array


@dataclass(frozen=True)
class Exact:
    """The cell of exact sums and means of float32 and narrower floats; see `gradcombine.reductions.digits`.

    Every contribution is a multiple of a fixed unit, and integers add in any order. The one rounding is at the end: the
    digits, divided by the exact sum of weights for a mean, to the dtype of the result.

    A weight of an integer type multiplies exactly: value and weight are split into parts of 12 bits, whose products
    float32 holds, and each is deposited. Other weights multiply with one rounding to float32. Subnormal parts and
    products are 0 in every framework.
    """

    name: str
    settings: dtypes.Settings
    divides: bool
    kinds: tuple[str, ...] = ("float",)
    compound: type | None = Digits
    additive: bool = False

    def running(self, dtype: np.dtype) -> np.dtype:
        if dtype.itemsize > 4:
            raise GradCombineError(self.name, "float32 or a narrower float for precision 'exact'", dtype)
        return INT32

    def output(self, dtype: np.dtype) -> np.dtype:
        return self.settings.output(dtype)

    def empty(self, backend: Backend, shape: tuple[int, ...], running: np.dtype, like: Any) -> Digits:
        return Digits(*(backend.full(shape, 0, INT32, [like]) for _ in range(3)))

    def update(self, backend: Backend, a: Digits, x: Array, weight: Weight, totals: Totals) -> Digits:
        return digits.deposit(backend, a, _terms(self.name, backend, backend.cast(x, FLOAT32), weight))

    def merge(self, backend: Backend, a: Digits, b: Digits, a_totals: Totals, b_totals: Totals) -> Digits:
        return digits.merge(backend, a, b)

    def finish(self, backend: Backend, a: Digits, totals: Totals, output: np.dtype) -> Array:
        wide = digits.carry(backend, a)
        if self.divides:
            wide = digits.divide(backend, wide, _rounded(backend, totals.weight))
        # Rounded to odd first, a second rounding to a narrower format is the only one that counts.
        result = digits.special(backend, a, digits.to_float32(backend, wide, to_odd=output.itemsize < 4))
        overfull = totals.weight.deposits > digits.CAPACITY
        result = backend.where(overfull, backend.full((), np.nan, FLOAT32), result)
        return backend.cast(result, output)

    def empty_weight(self, backend: Backend, dtype: np.dtype, like: Sequence[Any]) -> ExactWeight:
        return ExactWeight(*(backend.full((), 0, INT32, like) for _ in range(4)))

    def add_weight(self, backend: Backend, total: ExactWeight, weight: Weight) -> ExactWeight:
        terms = _weight_parts(backend, weight)
        added = digits.deposit(backend, Digits(*total[:3]), terms)
        return ExactWeight(*added, total.deposits + _deposits(weight, backend))

    def merge_weights(self, backend: Backend, a: ExactWeight, b: ExactWeight) -> ExactWeight:
        return ExactWeight(*digits.merge(backend, Digits(*a[:3]), Digits(*b[:3])), a.deposits + b.deposits)


def _rounded(backend: Backend, total: ExactWeight) -> Array:
    """The sum of weights, rounded to float32 once; 1 where there were none."""
    weight = Digits(*total[:3])
    value = digits.to_float32(backend, digits.carry(backend, weight), to_odd=False)
    return backend.where(total.deposits == 0, backend.full((), 1, FLOAT32), digits.special(backend, weight, value))


def _terms(operation: str, backend: Backend, x: Array, weight: Weight) -> list[Array]:
    """Float32 values whose exact sum is ``weight * x``; for a weight of a floating type, its rounded value."""
    if weight.is_one:
        return [x]
    products = _products(operation, backend, x, weight)
    if weight.known is not None:
        return products
    # As for a known weight of 1: nothing is multiplied, and subnormal numbers stay.
    one, zero = weight.array == backend.full((), 1, backend.dtype(weight.array)), backend.full((), 0, FLOAT32)
    return [backend.where(one, kept, product) for kept, product in zip([x] + [zero] * 5, products, strict=False)]


def _products(operation: str, backend: Backend, x: Array, weight: Weight) -> list[Array]:
    if not weight.whole:
        scaled = weighted(operation, backend, _flushed(backend, x, _SUBNORMAL), weight, FLOAT32)
        return [_flushed(backend, scaled, _SMALLEST)]
    bits = backend.bitcast(x, INT32)
    high = backend.bitcast(bits & ~_LOW, FLOAT32)
    # The difference of an infinity and itself is NaN; its high part alone stands for it.
    low = backend.where((bits & 0x7F800000) == 0x7F800000, backend.full((), 0, FLOAT32), backend.add(x, -high))
    halves = [_flushed(backend, part, _SUBNORMAL) for part in (high, low)]
    products = (backend.product(part, scale) for scale in _weight_parts(backend, weight) for part in halves)
    return [_flushed(backend, product, _SMALLEST) for product in products]


_SMALLEST = 0x00800000
_SUBNORMAL = _SMALLEST - 1


def _flushed(backend: Backend, x: Array, most: int) -> Array:
    """0 where the magnitude's bits are ``most`` or less: what XLA and TensorFlow do to subnormal operands and results.

    A result counts up to the smallest normal number, since hardware looks for underflow after rounding.
    """
    tiny = (backend.bitcast(x, INT32) & 0x7FFFFFFF) <= most
    return backend.where(tiny, backend.full((), 0, FLOAT32), x)


def _weight_parts(backend: Backend, weight: Weight) -> list[Array]:
    """Float32 scalars of at most 12 significant bits whose exact sum is a whole weight; another weight as it is."""
    if not weight.whole:
        return [weight.cast(backend, FLOAT32)]
    if weight.known is not None:
        whole = int(weight.known)
        pieces = (((whole >> shift) & _LOW) << shift for shift in range(0, whole.bit_length(), _LOW_BITS))
        return [backend.full((), piece, FLOAT32) for piece in pieces if piece] or [backend.full((), 0, FLOAT32)]
    whole = weight.cast(backend, INT32)
    masks = (_LOW, _LOW << _LOW_BITS, 0x7F000000)
    return [backend.cast(whole & mask, FLOAT32) for mask in masks]


def _deposits(weight: Weight, backend: Backend) -> int:
    return 1 if weight.is_one or not weight.whole else 2 * len(_weight_parts(backend, weight))
