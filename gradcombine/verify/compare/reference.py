"""How far from a float64 reference two sides are, in units of the rounding noise of each.

A value that is rounded n times in a row, with unit roundoff u, is off by about ``u sqrt(n)`` times the size of what is
rounded, and by more than ``8 u sqrt(n)`` times with a probability of about ``2 exp(-32)``, as long as roundings are not
correlated (Higham and Mary, 2019, theorem 2.4). Of n nothing is known from the values, so it is given, or estimated of
the side that is nearer to the reference. From ``n = 1 / u`` on no digit is promised at all: n is never taken for more.
What is estimated is never taken for less than ``u**(-1/4)``, 64 in float32 and 4 in bfloat16: an exact sum, rounded
once, does not make a plain one wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from gradcombine.errors import require_number
from gradcombine.verify.compare.ulp import distances, finfo, kind_of, rounding_unit

LIMIT = 8.0
"""A side is off from here on: this many times its noise."""

Verdict: TypeAlias = Literal["within noise", "A is off", "B is off", "both are off", "the reference is off"]

Pieces: TypeAlias = Callable[[], Iterable[tuple[np.ndarray, ...]]]
"""Yields the elements of all sides in step; it may be called several times."""


class Error(NamedTuple):
    """How far one side of a leaf is from the reference.

    Attributes:
      unit: the unit roundoff of the side's dtype; 0 for integers.
      largest: the largest error of an element, over the largest one of its own magnitude, the root mean square of the
        reference's elements that are not 0, and the smallest normal number of the dtype. Infinite where only one of the
        two is NaN or infinite; an infinity, or a NaN, that the reference becomes in the side's dtype is none.
      absolute: the largest error itself.
    """

    unit: float
    largest: float
    absolute: float


class Errors(NamedTuple):
    """The errors of the two sides of a leaf.

    Attributes:
      name: of the leaf.
      size: the root mean square of the reference's elements that are not 0.
      a, b: how far each side is from it.
      apart: how far the sides are from each other, measured as ``largest`` is.
    """

    name: str
    size: float
    a: Error
    b: Error
    apart: float


class Judgement(NamedTuple):
    """The side of a leaf that is off.

    Attributes:
      name: of the leaf.
      roundings: how many in a row the noise is that of.
      a, b: the largest error of each side, over its noise ``u sqrt(roundings)``.
      verdict: a side is off that is more than `LIMIT` times its noise away. The reference is, or stands for another
        computation, where both are, but not from each other.
    """

    name: str
    roundings: float
    a: float
    b: float
    verdict: Verdict

    @property
    def passes(self) -> bool:
        return self.verdict == "within noise"

    def __str__(self) -> str:
        return f"{self.name}: {self.verdict}; A {_times(self.a)} its rounding noise away, B {_times(self.b)}"


def rounding_noise(unit: float, roundings: float) -> float:
    """The relative error that so many roundings in a row leave: ``u sqrt(n)``, of at most ``n = 1 / u``.

    References: N. J. Higham and T. Mary, `A New Approach to Probabilistic Rounding Error Analysis
    <https://doi.org/10.1137/18M1226312>`_, SIAM J. Sci. Comput. 41 (2019).

    >>> rounding_noise(2**-24, 100) / 2**-24
    10.0
    """
    return unit * math.sqrt(min(max(roundings, 1), 1 / unit)) if unit else 0.0


def unfit(dtype: np.dtype, reference: np.dtype) -> str:
    """The reference that values of a dtype would need, in words; empty if this one will do."""
    kind = kind_of(dtype)
    if kind != kind_of(reference):
        return f"{kind} numbers, as those that are compared"
    if kind == "integer":
        return ""
    if reference.name not in ("float64", "complex128"):
        return "a reference in float64"
    return "" if rounding_unit(dtype) > rounding_unit(reference) else "values that are narrower than the reference"


def errors(name: str, dtypes: tuple[np.dtype, np.dtype], pieces: Pieces) -> Errors:
    """The errors of both sides of a leaf, of these dtypes; the pieces of both and of the reference are read twice."""
    squares, count = 0.0, 0
    for *_, reference in pieces():
        magnitude = _magnitude(reference)
        squares += float(np.sum(magnitude**2))
        count += int(np.count_nonzero(magnitude))
    size = math.sqrt(squares / count) if count else 0.0
    units = [0.0 if kind_of(dtype) == "integer" else rounding_unit(dtype) for dtype in dtypes]
    least = [float(finfo(dtype).smallest_normal) if unit else 0.0 for dtype, unit in zip(dtypes, units, strict=True)]
    largest, absolute = np.zeros(3), np.zeros(3)
    for left, right, reference in pieces():
        exact = _wide(reference)
        scales = [np.maximum(_magnitude(reference), max(size, tiny)) for tiny in least]
        offs = [_error(side, exact, dtype) for side, dtype in zip((left, right), dtypes, strict=True)]
        offs.append(_error(left, _wide(right), dtypes[0]))
        for i, (off, scale) in enumerate(zip(offs, [*scales, np.maximum(*scales)], strict=True)):
            if off.size:
                absolute[i] = max(absolute[i], float(off.max()))
                largest[i] = max(largest[i], float(_over(off, scale).max()))
    a, b = (Error(units[i], float(largest[i]), float(absolute[i])) for i in range(2))
    return Errors(name, size, a, b, float(largest[2]))


def judge(leaves: Sequence[Errors], roundings: float | None = None) -> tuple[Judgement, ...]:
    """Judges which side of each leaf is off.

    Where ``roundings`` is not given, a leaf's n is what the error of the side that is nearer to the reference, in units
    of its own dtype, stands for (of the wider one, of two dtypes), or the median over all leaves, if that is more:
    small leaves are near by chance. A leaf that is no larger than the noise of the reference itself, as the gradient of
    a bias ahead of a normalization, is measured by the largest leaf: its terms cancel.

    Args:
      leaves: of a whole tree.
      roundings: how many in a row an element has been through; None to estimate.

    >>> import numpy as np
    >>> exact = np.linspace(1, 2, 100)
    >>> float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    >>> pieces = lambda: [(exact.astype(np.float32), np.float32(exact * 1.001), exact)]
    >>> print(judge([errors("w", (float32, float32), pieces)])[0].verdict)
    B is off
    """
    if roundings is not None:
        roundings = require_number("a number of roundings from 1 on", roundings, 1)
    estimates = [_estimate(leaf) for leaf in leaves]
    known = [n for n in estimates if math.isfinite(n)]
    usual = float(np.median(known)) if known else 1.0
    scale = max((leaf.size for leaf in leaves), default=0.0)
    chosen = [roundings or (max(n, usual) if math.isfinite(n) else 1.0) for n in estimates]
    return tuple(_judged(leaf, n, scale) for leaf, n in zip(leaves, chosen, strict=True))


def _judged(leaf: Errors, roundings: float, scale: float) -> Judgement:
    noises = [rounding_noise(side.unit, roundings) for side in (leaf.a, leaf.b)]
    of_reference = LIMIT * rounding_noise(2.0**-53, roundings) * scale
    if leaf.size <= of_reference and scale:
        parts = [side.absolute / scale for side in (leaf.a, leaf.b)]
    else:
        parts = [side.largest for side in (leaf.a, leaf.b)]
    a, b = (_quotient(part, noise) for part, noise in zip(parts, noises, strict=True))
    off = a > LIMIT, b > LIMIT
    if all(off):
        alike = _quotient(leaf.apart, sum(noises)) <= LIMIT
        verdict: Verdict = "the reference is off" if alike else "both are off"
    else:
        verdict = "A is off" if off[0] else "B is off" if off[1] else "within noise"
    most = max((1 / side.unit for side in (leaf.a, leaf.b) if side.unit), default=1.0)
    return Judgement(leaf.name, min(roundings, most), a, b, verdict)


def _estimate(leaf: Errors) -> float:
    """The roundings that one side's error stands for; NaN for integers."""
    if not (leaf.a.unit and leaf.b.unit):
        return math.nan
    a, b = (min(side.largest, 1.0) / side.unit for side in (leaf.a, leaf.b))
    nearer = min(a, b) if leaf.a.unit == leaf.b.unit else a if leaf.a.unit < leaf.b.unit else b
    return max(nearer**2, max(leaf.a.unit, leaf.b.unit) ** -0.25)


def _magnitude(array: np.ndarray) -> np.ndarray:
    """The magnitudes; 0 of NaN, and of what is beyond float32, infinite on every side."""
    with np.errstate(over="ignore", invalid="ignore"):
        magnitude = np.abs(_wide(array)).astype(np.float64)
    return np.where(magnitude <= np.finfo(np.float32).max, magnitude, 0.0)


def _wide(array: np.ndarray) -> np.ndarray:
    """Floats and complex numbers in float64; integers as they are."""
    if kind_of(array.dtype) == "integer":
        return array
    return array.astype(np.complex128 if kind_of(array.dtype) == "complex" else np.float64, copy=False)


def _error(side: np.ndarray, exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The elementwise error; infinite where only one of the two is a number."""
    if kind_of(dtype) == "integer":
        return np.where(distances("integer", side, exact).lengths("integer") > 0, np.inf, 0.0)
    with np.errstate(all="ignore"):
        value, rounded = _wide(side), _wide(exact.astype(dtype))
        off = np.abs(value - exact)
    same = (value == rounded) | (np.isnan(value) & np.isnan(rounded))
    return np.where(np.isfinite(value) & np.isfinite(exact), off, np.where(same, 0.0, np.inf))


def _over(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.where(part == 0, 0.0, part / whole)


def _quotient(part: float, whole: float) -> float:
    return 0.0 if part == 0 else part / whole if whole else math.inf


def _times(number: float) -> str:
    return f"{number:,.1f} times" if number < 1e4 else f"{number:.1e} times"
