"""Weights in exact sums: contributions multiplied by them, and their own sum.

A weight is split into parts of the precision of the float: one of a floating type is one part, and a whole number has
one for each 24 bits (float64: 53). The product of a contribution and a part has twice the bits. Of a whole number all
of them are kept, else it is rounded once. What multiplies are integers, or floats from 1 to 2, so that no step depends
on what a device does to subnormal numbers.

Integers carry no derivative, so a derivative that goes through a state would be 0 unseen. A float scalar beside the
digits of the sum of weights, the *link*, is always 0, but to the frameworks it depends on all contributions and
weights: a derivative that reaches it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.backends.protocol import Backend
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.exact import digits, rounding
from gradcombine.reductions.exact.digits import FLOAT32, SPILLED_CAPACITY, Decoded, Digits, Grid, Lower
from gradcombine.reductions.exact.rounding import Divisor
from gradcombine.reductions.weights import Weight
from gradcombine.types import Array, Leaf

INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


class Part(NamedTuple):
    """``significand * 2**exponent``: integer scalars. A significand is 0, or has the precision's leading bit set.

    Infinity has the exponent `infinite`, and NaN one above it.
    """

    significand: Array
    exponent: Array


def infinite(grid: Grid) -> int:
    """The exponent of an infinite part: above that of every finite product of it."""
    return 4 * grid.top


def weight_parts(backend: Backend, grid: Grid, weight: Weight) -> list[Part]:
    """The parts of a weight, one or more."""
    if weight.known is not None:
        known = _of_known(grid, weight.known, weight.whole)
        return [Part(*(backend.full((), x, grid.word) for x in pair)) for pair in known]
    if not weight.whole:
        return [_part(backend, grid, backend.cast(weight.array, grid.value), 0, weight.refused)]
    size = backend.dtype(weight.array).itemsize
    word = INT64 if size == 8 else max(INT32, grid.word, key=lambda dtype: dtype.itemsize)
    # The bits of unsigned integers are the same.
    whole = backend.bitcast(weight.array, word) if size == word.itemsize else backend.cast(weight.array, word)
    parts: list[Part] = []
    for shift in range(0, 8 * size, grid.precision):
        mask = (1 << min(grid.precision, 8 * size - shift)) - 1
        piece = backend.cast(backend.shift_right(whole, shift) & mask, grid.value)
        parts.append(_part(backend, grid, piece, shift, weight.refused))
    return parts


def deposits(backend: Backend, weight: Weight) -> int:
    """How many terms a contribution of this weight has on the grid of float32; on a finer one it has no more."""
    if weight.known is not None:
        return len(_of_known(FLOAT32, weight.known, weight.whole)) if weight.known else 0
    return -(-8 * backend.dtype(weight.array).itemsize // FLOAT32.precision) if weight.whole else 1


def _of_known(grid: Grid, known: float, whole: bool) -> list[tuple[int, int]]:
    if not whole:
        value = float(NUMPY.cast(np.float64(known), grid.value))
        if value in (0, math.inf):
            # What is rounded to 0 is far below all digits.
            return [(grid.hidden, infinite(grid) if value else -infinite(grid))]
        fraction, exponent = math.frexp(value)
        return [(int(math.ldexp(fraction, grid.precision)), exponent - grid.precision)]
    parts: list[tuple[int, int]] = []
    whole_number = int(known)
    if whole_number.bit_length() > 2 * grid.top:  # times the smallest subnormal number it is above the range
        return [(grid.hidden, infinite(grid))]
    for shift in range(0, whole_number.bit_length(), grid.precision):
        piece = (whole_number >> shift) & ((1 << grid.precision) - 1)
        up = grid.precision - piece.bit_length()
        if piece:
            parts.append((piece << up, shift - up))
    return parts or [(0, 0)]


def _part(backend: Backend, grid: Grid, x: Array, shift: int, refused: Array | None) -> Part:
    """``x * 2**shift``, of a float; NaN where it is refused."""
    magnitude = backend.bitcast(x, grid.word) & grid.most
    significand, exponent = digits.normal(backend, grid, magnitude)
    finite = exponent + (shift - grid.unit)
    infinity, nan = (backend.full((), infinite(grid) + i, grid.word) for i in (0, 1))
    exponent = backend.where(magnitude >= grid.infinity, infinity, finite)
    return Part(significand, exponent if refused is None else backend.where(refused, nan, exponent))


def of_weight(backend: Backend, grid: Grid, part: Part) -> Decoded:
    """A part as a term of the sum of weights."""
    exponent = part.exponent + grid.unit
    exponent = backend.where(part.significand == 0, backend.full((), 0, grid.word), exponent)
    top, infinity, nan, none = (backend.full((), n, grid.word) for n in (grid.top, grid.infinity, grid.infinity + 1, 0))
    over = exponent >= grid.top
    special = backend.where(part.exponent > infinite(grid), nan, infinity)
    exponent = backend.where(over, top, exponent)
    return Decoded(backend.where(over, special, none), exponent, part.significand, none)


def weighted(backend: Backend, grid: Grid, x: Array, parts: Sequence[Part], whole: bool) -> list[Decoded]:
    """Numbers whose exact sum is the weighted x; for a weight of a floating type, its value rounded to the precision.

    Args:
      backend: of the arrays.
      grid: of the digits.
      x: the contribution, in the grid's float.
      parts: of the weight; none for a weight that is known to be 1.
      whole: whether the type of the weight is an integer one.
    """
    if not parts:
        return [digits.decode(backend, grid, x)]
    bits = backend.bitcast(x, grid.word)
    magnitude, sign = bits & grid.most, backend.shift_right(bits, grid.bits - 1)
    significand, exponent = digits.normal(backend, grid, magnitude)
    infinity, nan, none = (backend.full((), n, grid.word) for n in (grid.infinity, grid.infinity + 1, 0))
    top, not_finite = backend.full((), grid.top, grid.word), magnitude >= grid.infinity

    def product(part: Part) -> Decoded:
        multiplied = _product if whole else _rounded_product
        leading, up, rest = multiplied(backend, grid, significand, part.significand)
        reached = exponent + part.exponent + up
        reached = backend.where(leading == 0, none, reached)
        special = backend.where(reached >= grid.top, infinity, none)
        special = backend.where(not_finite, magnitude, special)
        special = backend.where(part.exponent > infinite(grid), nan, special)
        reached = backend.where(special == 0, reached, top)
        if rest is None:
            return Decoded(special, reached, leading, sign)
        rest = backend.where(special == 0, rest, none)
        return Decoded(special, reached, leading, sign, Lower(reached - 2 * grid.half, rest))

    return [product(part) for part in parts]


def _rounded_product(backend: Backend, grid: Grid, a: Array, b: Array) -> tuple[Array, Array, None]:
    """As `_product` of two significands, rounded to the leading bits; b is not 0."""
    bias, fraction = grid.top // 2, grid.hidden - 1
    one, none = backend.full((), bias << (grid.precision - 1), grid.word), backend.full((), 0, grid.word)
    x, y = (backend.bitcast((n & fraction) | one, grid.value) for n in (a, b))
    bits = backend.bitcast(backend.product(x, y), grid.word)
    leading = backend.where(a == 0, none, (bits & fraction) | grid.hidden)
    return leading, backend.shift_right(bits, grid.precision - 1) + (grid.precision - 1 - bias), None


def _product(backend: Backend, grid: Grid, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """``a * b`` of two significands: its leading bits, `Grid.precision` of them, their exponent, and the bits below."""
    half, low = grid.half, (1 << grid.half) - 1
    a_high, b_high, a_low, b_low = backend.shift_right(a, half), backend.shift_right(b, half), a & low, b & low
    middle = a_high * b_low + a_low * b_high
    rest = backend.shift_left(middle & low, half) + a_low * b_low
    leading = a_high * b_high + backend.shift_right(middle, half) + backend.shift_right(rest, 2 * half)
    one, none = (backend.full((), n, grid.word) for n in (1, 0))
    short = backend.where(leading < 1 << (2 * (grid.precision - half) - 1), one, none)
    up = short + (2 * half - grid.precision)
    rest = backend.shift_left(rest & grid.lower, up)
    leading = backend.shift_left(leading, up) | backend.shift_right(rest, 2 * half)
    return leading, 2 * half - up, rest & grid.lower


_HALF = 13
"""The lower bits of a number of deposits."""


class ExactWeight(NamedTuple):
    """The sum of weights, in digits, and the number of deposits that each accumulator has had."""

    digits: Digits
    deposits: Array
    link: Array


def linked(backend: Backend, link: Array, leaves: Sequence[Leaf]) -> Array:
    """The link, which depends on these arrays as well."""

    def depending(link: Array, *leaves: Leaf) -> list[Array]:
        for x in leaves:
            if x is not None and dtypes.kind(backend.dtype(x)) == "float":
                link = link + backend.cast(backend.total(x[None][:0]), backend.dtype(link))
        return [link]

    def alone(link: Array, *_: Leaf) -> list[Array]:
        return [link]

    return backend.custom_derivative(alone, depending, [link, *leaves])[0]


def refusing(name: str, backend: Backend, results: Sequence[Array], link: Array) -> list[Array]:
    """The results, of which a derivative that comes upon the link is an error."""

    def refuse(*_: Array) -> list[Array]:
        expected = "reductions.differentiable(...) of this reduction, whose states know their derivative"
        raise GradCombineError(name, expected, "a derivative through a state of integers")

    return backend.custom_derivative(lambda *arrays: arrays[:-1], refuse, [*results, link])


def limited(backend: Backend, deposits: Array) -> Array:
    """A count that stays above every capacity once it is there, in place of wrapping around."""
    most = backend.full((), SPILLED_CAPACITY + 1, dtypes.INT32)
    return backend.where(deposits > most, most, deposits)


def halves(backend: Backend, deposits: Array) -> list[Array]:
    """A limited count in two: what many replicas have of them adds up without an overflow."""
    return [deposits & ((1 << _HALF) - 1), backend.shift_right(deposits, _HALF)]


def joined(backend: Backend, low: Array, high: Array) -> Array:
    """The limited count from sums of `halves`, of up to 4096 replicas."""
    many = backend.full((), (SPILLED_CAPACITY >> _HALF) + 1, dtypes.INT32)
    return limited(backend, backend.shift_left(backend.where(high < many, high, many), _HALF) + low)


@np.errstate(all="ignore")
def rounded(backend: Backend, grid: Grid, total: ExactWeight) -> Divisor:
    """The sum of weights, rounded once to the precision of the grid's float; 1 where there were none."""
    kept = digits.grid_of(backend, total.digits)
    wide = rounding.carry(backend, kept, total.digits)
    significand, carried = rounding.nearest(backend, kept, wide, grid)
    exponent = wide.exponent + carried + (1 - kept.top // 2)
    none, one = backend.full((), 0, kept.word), backend.full((), grid.hidden, kept.word)
    undefined = wide.zero | ((total.digits.slots[0] & kept.tag) == kept.special)
    pairs = (backend.where(undefined, none, significand), one), (exponent, none)
    return Divisor(*(backend.cast(backend.where(total.deposits == 0, b, a), grid.word) for a, b in pairs))
