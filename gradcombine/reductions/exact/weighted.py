"""Weights in exact sums: multiplies contributions by their weights, and adds up the weights.

A weight is split into parts of the precision of the float: a floating-point weight is one part, an integer weight has
one part for each 24 bits (float64: 53). The product of a contribution and a part has twice the bits: for integer
weights all are kept, for floating-point weights the product is rounded once. Only multiplies integers, and floats from
1 to 2, so that the results do not depend on how a device treats subnormal numbers.

Integers have no derivative, so a derivative through a state would silently be 0. Therefore the sum of weights has a
float scalar, the *link*. It is always 0, but depends on all contributions and weights as far as the frameworks know,
and a derivative with respect to it raises.
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


class Part(NamedTuple):
    """A number ``significand * 2**exponent``, as integer scalars.

    The significand is 0 or has the leading bit of the precision set. An infinity has the exponent `infinite`, a NaN the
    exponent ``infinite + 1``.
    """

    significand: Array
    exponent: Array


def infinite(grid: Grid) -> int:
    """The exponent of an infinite part, which products with finite contributions leave above the range."""
    return 4 * grid.top


def weight_parts(backend: Backend, grid: Grid, weight: Weight) -> list[Part]:
    """Splits a weight into one or more parts."""
    if weight.known is not None:
        pairs = _of_known(grid, weight.known, weight.is_integer)
        return [Part(*(backend.full((), x, grid.word) for x in pair)) for pair in pairs]
    if not weight.is_integer:
        return [_part(backend, grid, backend.cast(weight.array, grid.value), 0, weight.invalid)]
    size = backend.dtype(weight.array).itemsize
    word = np.dtype(np.int64) if size == 8 else grid.word  # an integer of fewer bits is widened
    # A bitcast, as the weight may be unsigned.
    integer = backend.bitcast(weight.array, word) if size == word.itemsize else backend.cast(weight.array, word)
    parts: list[Part] = []
    for shift in range(0, 8 * size, grid.precision):
        mask = (1 << min(grid.precision, 8 * size - shift)) - 1
        piece = backend.cast(backend.shift_right(integer, shift) & mask, grid.value)
        parts.append(_part(backend, grid, piece, shift, weight.invalid))
    return parts


def deposits(backend: Backend, weight: Weight) -> int:
    """The number of terms of a contribution of this weight on the float32 grid; the float64 grid has no more."""
    if weight.known is not None:
        return len(_of_known(FLOAT32, weight.known, weight.is_integer)) if weight.known else 0
    return -(-8 * backend.dtype(weight.array).itemsize // FLOAT32.precision) if weight.is_integer else 1


def _of_known(grid: Grid, known: float, is_integer: bool) -> list[tuple[int, int]]:
    """The significands and exponents of the parts of a known weight."""
    if not is_integer:
        value = float(NUMPY.cast(np.float64(known), grid.value))
        if value in (0, math.inf):
            # A nonzero weight that rounds to 0 is still a term, far below all digits.
            return [(grid.hidden, infinite(grid) if value else -infinite(grid))]
        fraction, exponent = math.frexp(value)
        return [(int(math.ldexp(fraction, grid.precision)), exponent - grid.precision)]
    parts: list[tuple[int, int]] = []
    integer = int(known)
    if integer.bit_length() > 2 * grid.top:  # overflows even if multiplied by the smallest subnormal number
        return [(grid.hidden, infinite(grid))]
    for shift in range(0, integer.bit_length(), grid.precision):
        piece = (integer >> shift) & ((1 << grid.precision) - 1)
        up = grid.precision - piece.bit_length()
        if piece:
            parts.append((piece << up, shift - up))
    return parts or [(0, 0)]


def _part(backend: Backend, grid: Grid, x: Array, shift: int, invalid: Array | None) -> Part:
    """``x * 2**shift`` for a float; NaN if the weight is invalid."""
    magnitude = backend.bitcast(x, grid.word) & grid.most
    significand, exponent = digits.normal(backend, grid, magnitude)
    finite = exponent + (shift - grid.unit)
    infinity, nan = (backend.full((), infinite(grid) + i, grid.word) for i in (0, 1))
    exponent = backend.where(magnitude >= grid.infinity, infinity, finite)
    return Part(significand, exponent if invalid is None else backend.where(invalid, nan, exponent))


def of_weight(backend: Backend, grid: Grid, part: Part) -> Decoded:
    """Decodes a part as a term of the sum of weights."""
    exponent = part.exponent + grid.unit
    exponent = backend.where(part.significand == 0, backend.full((), 0, grid.word), exponent)
    top, infinity, nan, zero = (backend.full((), n, grid.word) for n in (grid.top, grid.infinity, grid.infinity + 1, 0))
    over = exponent >= grid.top
    special = backend.where(part.exponent > infinite(grid), nan, infinity)
    exponent = backend.where(over, top, exponent)
    return Decoded(backend.where(over, special, zero), exponent, part.significand, zero)


def weighted(backend: Backend, grid: Grid, x: Array, parts: Sequence[Part], is_integer: bool) -> list[Decoded]:
    """Multiplies a contribution by the parts of a weight: exactly if the weight is an integer, else rounded once.

    Args:
      x: the contribution, in the float dtype of the grid.
      parts: the parts of the weight; empty for a weight that is known to be 1.
      is_integer: whether the type of the weight is an integer.

    Returns:
      Numbers whose sum is the product.
    """
    if not parts:
        return [digits.decode(backend, grid, x)]
    bits = backend.bitcast(x, grid.word)
    magnitude, sign = bits & grid.most, backend.shift_right(bits, grid.bits - 1)
    significand, exponent = digits.normal(backend, grid, magnitude)
    infinity, nan, zero = (backend.full((), n, grid.word) for n in (grid.infinity, grid.infinity + 1, 0))
    top, not_finite = backend.full((), grid.top, grid.word), magnitude >= grid.infinity

    def product(part: Part) -> Decoded:
        multiply = _product if is_integer else _rounded_product
        leading, up, rest = multiply(backend, grid, significand, part.significand)
        total = exponent + part.exponent + up
        total = backend.where(leading == 0, zero, total)
        special = backend.where(total >= grid.top, infinity, zero)
        special = backend.where(not_finite, magnitude, special)
        special = backend.where(part.exponent > infinite(grid), nan, special)
        total = backend.where(special == 0, total, top)
        if rest is None:
            return Decoded(special, total, leading, sign)
        rest = backend.where(special == 0, rest, zero)
        return Decoded(special, total, leading, sign, Lower(total - 2 * grid.half, rest))

    return [product(part) for part in parts]


def _rounded_product(backend: Backend, grid: Grid, a: Array, b: Array) -> tuple[Array, Array, None]:
    """`_product` rounded to the leading bits, by a float multiplication of numbers from 1 to 2; b is not 0."""
    bias, fraction = grid.top // 2, grid.hidden - 1
    one, zero = backend.full((), bias << (grid.precision - 1), grid.word), backend.full((), 0, grid.word)
    x, y = (backend.bitcast((n & fraction) | one, grid.value) for n in (a, b))
    bits = backend.bitcast(backend.product(x, y), grid.word)
    leading = backend.where(a == 0, zero, (bits & fraction) | grid.hidden)
    return leading, backend.shift_right(bits, grid.precision - 1) + (grid.precision - 1 - bias), None


def _product(backend: Backend, grid: Grid, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """The product of two significands: its leading `Grid.precision` bits, their exponent, and the bits below."""
    half, low = grid.half, (1 << grid.half) - 1
    a_high, b_high, a_low, b_low = backend.shift_right(a, half), backend.shift_right(b, half), a & low, b & low
    middle = a_high * b_low + a_low * b_high
    rest = backend.shift_left(middle & low, half) + a_low * b_low
    leading = a_high * b_high + backend.shift_right(middle, half) + backend.shift_right(rest, 2 * half)
    one, zero = (backend.full((), n, grid.word) for n in (1, 0))
    short = backend.where(leading < 1 << (2 * (grid.precision - half) - 1), one, zero)
    up = short + (2 * half - grid.precision)
    rest = backend.shift_left(rest & grid.lower, up)
    leading = backend.shift_left(leading, up) | backend.shift_right(rest, 2 * half)
    return leading, 2 * half - up, rest & grid.lower


_HALF = 13
"""The number of bits of the lower half of a number of deposits."""


class ExactWeight(NamedTuple):
    """The exact sum of weights, the number of deposits in each accumulator, and the link (see above)."""

    digits: Digits
    deposits: Array
    link: Array


def linked(backend: Backend, link: Array, leaves: Sequence[Leaf]) -> Array:
    """Makes the link depend on these arrays, too."""

    def depending(link: Array, *leaves: Leaf) -> list[Array]:
        for x in leaves:
            if x is not None and dtypes.kind(backend.dtype(x)) == "float":
                link = link + backend.cast(backend.total(x[None][:0]), backend.dtype(link))
        return [link]

    def alone(link: Array, *_: Leaf) -> list[Array]:
        return [link]

    return backend.custom_derivative(alone, depending, [link, *leaves])[0]


def not_differentiable(name: str, backend: Backend, results: Sequence[Array], link: Array) -> list[Array]:
    """Returns the results, whose derivative with respect to the link raises."""

    def derivative(*_: Array) -> list[Array]:
        expected = "reductions.differentiable(...) of this reduction, whose states are differentiable"
        raise GradCombineError(name, expected, "a derivative through a state of integers")

    return backend.custom_derivative(lambda *arrays: arrays[:-1], derivative, [*results, link])


def limited(backend: Backend, deposits: Array) -> Array:
    """Clips a count above all capacities, so that it cannot wrap around."""
    most = backend.full((), SPILLED_CAPACITY + 1, dtypes.INT32)
    return backend.where(deposits > most, most, deposits)


def halves(backend: Backend, deposits: Array) -> list[Array]:
    """Splits a `limited` count into two, whose sums over replicas do not overflow."""
    return [deposits & ((1 << _HALF) - 1), backend.shift_right(deposits, _HALF)]


def joined(backend: Backend, low: Array, high: Array) -> Array:
    """The `limited` count from sums of `halves` over up to 4096 replicas."""
    many = backend.full((), (SPILLED_CAPACITY >> _HALF) + 1, dtypes.INT32)
    return limited(backend, backend.shift_left(backend.where(high < many, high, many), _HALF) + low)


@np.errstate(all="ignore")
def rounded(backend: Backend, grid: Grid, total: ExactWeight) -> Divisor:
    """The sum of weights as a divisor, rounded once to the precision of the grid's float; 1 if there are no weights."""
    weight_grid = digits.grid_of(backend, total.digits)
    wide = rounding.carry(backend, weight_grid, total.digits)
    significand, carried = rounding.nearest(backend, weight_grid, wide, grid)
    exponent = wide.exponent + carried + (1 - weight_grid.top // 2)
    zero, one = backend.full((), 0, weight_grid.word), backend.full((), grid.hidden, weight_grid.word)
    undefined = wide.zero | ((total.digits.slots[0] & weight_grid.tag) == weight_grid.special)
    pairs = (backend.where(undefined, zero, significand), one), (exponent, zero)
    return Divisor(*(backend.cast(backend.where(total.deposits == 0, b, a), grid.word) for a, b in pairs))
