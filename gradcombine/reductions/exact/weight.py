"""The sum of weights of an exact reduction, in digits, and how many deposits its accumulators have had.

Integers carry no derivative, so a derivative that goes through a state would be 0 unseen. A float scalar beside the
digits, the *link*, depends on all contributions and weights in the eyes of the frameworks, though it is always 0: where
a derivative comes upon it, the result refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.reductions.exact import digits, rounding
from gradcombine.reductions.exact.digits import SPILLED_CAPACITY, Digits
from gradcombine.reductions.exact.grid import Grid
from gradcombine.reductions.exact.rounding import Divisor
from gradcombine.types import Array

_HALF = 13
"""The lower bits of a number of deposits."""


class ExactWeight(NamedTuple):
    """The sum of weights, in digits, and the number of deposits that each accumulator has had."""

    digits: Digits
    deposits: Array
    link: Array


def linked(backend: Backend, link: Array, leaves: Sequence[Any]) -> Array:
    """The link, which depends on these arrays as well."""

    def depending(link: Array, *leaves: Any) -> list[Array]:
        for x in leaves:
            if x is not None and dtypes.kind(backend.dtype(x)) == "float":
                link = link + backend.cast(backend.total(x[None][:0]), backend.dtype(link))
        return [link]

    return backend.custom_derivative(lambda link, *_: [link], depending, [link, *leaves])[0]


def refusing(operation: str, backend: Backend, results: Sequence[Array], link: Array) -> list[Array]:
    """The results, of which a derivative that comes upon the link is an error."""

    def refuse(*_: Array) -> list[Array]:
        expected = "reductions.differentiable(...) of this reduction, whose states know their derivative"
        raise GradCombineError(operation, expected, "a derivative through a state of integers")

    return backend.custom_derivative(lambda *arrays: arrays[:-1], refuse, [*results, link])


def limited(backend: Backend, deposits: Array) -> Array:
    """A count that stays above every capacity once it is there, in place of wrapping around."""
    most = backend.full((), SPILLED_CAPACITY + 1, dtypes.INT32)
    return backend.where(deposits > most, most, deposits)


def halves(backend: Backend, deposits: Array) -> list[Array]:
    """A limited count in two: what many replicas have of them adds up without an overflow."""
    return [deposits & ((1 << _HALF) - 1), backend.shift_right(deposits, _HALF)]


def whole(backend: Backend, low: Array, high: Array) -> Array:
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
