"""Errors of two sides relative to a float64 reference, in units of each side's rounding noise.

After n successive roundings with unit roundoff u, the relative error is about ``u sqrt(n)``, and exceeds
``8 u sqrt(n)`` with a probability of about ``2 exp(-32)`` if the roundings are uncorrelated (Higham and Mary, 2019,
theorem 2.4). The values do not determine n: it is an argument, or estimated from the side closer to the reference. It
is at most ``1 / u``, where no digit is left. An estimate is at least ``u**(-1/4)``, 64 in float32 and 4 in bfloat16, so
that an exact sum, rounded once, does not make a plain sum look wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradcombine.errors import invalid, require_number
from gradcombine.verify.compare.ulp import distances, finfo, kind_of, rounding_unit

LIMIT = 8.0
"""A side is off if its error exceeds this many times its noise."""

Verdict: TypeAlias = Literal["within noise", "A is off", "B is off", "both are off", "the reference is off"]

Pieces: TypeAlias = Callable[[], Iterable[tuple[np.ndarray, ...]]]
"""Yields chunks of the two sides and the reference, of equal lengths. May be called several times."""


class Error(NamedTuple):
    """The error of one side of a leaf.

    Attributes:
      unit: the unit roundoff of the side's dtype; 0 for integers.
      largest: the largest error of an element, relative to the maximum of the element's magnitude, the root mean square
        of the reference's nonzero elements, and the smallest normal number of the dtype. Infinite if only one of the
        two is finite, unless the reference, rounded to the side's dtype, is the same infinity or NaN.
      absolute: the largest absolute error.
    """

    unit: float
    largest: float
    absolute: float


class Errors(NamedTuple):
    """The errors of the two sides of a leaf.

    Attributes:
      name: the leaf's name.
      size: the root mean square of the reference's nonzero elements.
      a, b: the error of each side.
      apart: the difference between the sides, measured like ``Error.largest``.
    """

    name: str
    size: float
    a: Error
    b: Error
    apart: float


class Judgement(NamedTuple):
    """The errors of both sides of a leaf, and a verdict on which of them is off.

    Attributes:
      name: the leaf's name.
      roundings: the number of successive roundings in the noise.
      a, b: the largest error of each side, in units of its noise ``u sqrt(roundings)``.
      verdict: a side is off if its error exceeds `LIMIT`. If both are, but they agree with each other, the reference is
        off, or is a different computation.
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
    """The relative error after n successive roundings: ``u sqrt(n)``, where n is at most ``1 / u``.

    References: N. J. Higham and T. Mary, `A New Approach to Probabilistic Rounding Error Analysis
    <https://doi.org/10.1137/18M1226312>`_, SIAM J. Sci. Comput. 41 (2019).

    >>> rounding_noise(2**-24, 100) / 2**-24
    10.0
    """
    return unit * math.sqrt(min(max(roundings, 1), 1 / unit)) if unit else 0.0


def unfit(dtype: np.dtype, reference: np.dtype) -> str:
    """The reference that values of a dtype need, in words; empty if ``reference`` is precise enough."""
    kind = kind_of(dtype)
    if kind != kind_of(reference):
        return f"{kind} numbers, as those that are compared"
    if kind == "integer":
        return ""
    if reference.name not in ("float64", "complex128"):
        return "a reference in float64"
    return "" if rounding_unit(dtype) > rounding_unit(reference) else "values that are narrower than the reference"


def errors(name: str, dtypes: tuple[np.dtype, np.dtype], pieces: Pieces) -> Errors:
    """Measures the errors of both sides of a leaf. ``dtypes`` are theirs; ``pieces`` is iterated twice."""
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
                largest[i] = max(largest[i], float(_quotient(off, scale).max()))
    a, b = (Error(units[i], float(largest[i]), float(absolute[i])) for i in range(2))
    return Errors(name, size, a, b, float(largest[2]))


def require_roundings(roundings: float, reference: object) -> None:
    """Raises for a number of roundings below 1 or without a reference."""
    require_number("a number of roundings from 1 on", roundings, 1)
    if reference is None:
        raise invalid("a reference, which roundings needs", "none")


def judge(leaves: Sequence[Errors], roundings: float | None = None) -> tuple[Judgement, ...]:
    """Determines which side of each leaf is off.

    Without ``roundings``, n is estimated for each leaf from the error of the side closer to the reference (of the wider
    side, if the dtypes differ), or is the median over all leaves if that is larger, since small leaves may be close by
    chance. A leaf that is no larger than the noise of the reference, such as the gradient of a bias before a
    normalization, is the result of cancellation; its error is measured relative to the largest leaf.

    Args:
      leaves: the errors of all leaves of a tree.
      roundings: the number of successive roundings of an element; None to estimate it.

    >>> import numpy as np
    >>> exact = np.linspace(1, 2, 100)
    >>> float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    >>> pieces = lambda: [(exact.astype(np.float32), np.float32(exact * 1.001), exact)]
    >>> print(judge([errors("w", (float32, float32), pieces)])[0].verdict)
    B is off
    """
    estimates = [_estimate(leaf) for leaf in leaves]
    known = [n for n in estimates if math.isfinite(n)]
    median = float(np.median(known)) if known else 1.0
    scale = max((leaf.size for leaf in leaves), default=0.0)
    chosen = [roundings or (max(n, median) if math.isfinite(n) else 1.0) for n in estimates]
    return tuple(_judged(leaf, n, scale) for leaf, n in zip(leaves, chosen, strict=True))


def _judged(leaf: Errors, roundings: float, scale: float) -> Judgement:
    noises = [rounding_noise(side.unit, roundings) for side in (leaf.a, leaf.b)]
    of_reference = LIMIT * rounding_noise(2.0**-53, roundings) * scale
    if leaf.size <= of_reference and scale:
        parts = [side.absolute / scale for side in (leaf.a, leaf.b)]
    else:
        parts = [side.largest for side in (leaf.a, leaf.b)]
    a, b = (float(_quotient(part, noise)) for part, noise in zip(parts, noises, strict=True))
    off = a > LIMIT, b > LIMIT
    if all(off):
        alike = _quotient(leaf.apart, sum(noises)) <= LIMIT
        verdict: Verdict = "the reference is off" if alike else "both are off"
    else:
        verdict = "A is off" if off[0] else "B is off" if off[1] else "within noise"
    most = max((1 / side.unit for side in (leaf.a, leaf.b) if side.unit), default=1.0)
    return Judgement(leaf.name, min(roundings, most), a, b, verdict)


def _estimate(leaf: Errors) -> float:
    """The number of roundings that explains the error of the closer side; NaN for integers."""
    if not (leaf.a.unit and leaf.b.unit):
        return math.nan
    a, b = (min(side.largest, 1.0) / side.unit for side in (leaf.a, leaf.b))
    nearer = min(a, b) if leaf.a.unit == leaf.b.unit else a if leaf.a.unit < leaf.b.unit else b
    return max(nearer**2, max(leaf.a.unit, leaf.b.unit) ** -0.25)


def _magnitude(array: np.ndarray) -> np.ndarray:
    """The magnitudes; 0 for NaN and for numbers beyond float32, which are infinite on both sides."""
    with np.errstate(over="ignore", invalid="ignore"):
        magnitude = np.abs(_wide(array)).astype(np.float64)
    return np.where(magnitude <= np.finfo(np.float32).max, magnitude, 0.0)


def _wide(array: np.ndarray) -> np.ndarray:
    """Floats and complex numbers in float64; integers unchanged."""
    if kind_of(array.dtype) == "integer":
        return array
    return array.astype(np.complex128 if kind_of(array.dtype) == "complex" else np.float64, copy=False)


def _error(side: np.ndarray, exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The elementwise error; infinite if only one of the two is finite, or integers differ."""
    if kind_of(dtype) == "integer":
        return np.where(distances("integer", side, exact).lengths("integer") > 0, np.inf, 0.0)
    with np.errstate(all="ignore"):
        value, rounded = _wide(side), _wide(exact.astype(dtype))
        off = np.abs(value - exact)
    same = (value == rounded) | (np.isnan(value) & np.isnan(rounded))
    return np.where(np.isfinite(value) & np.isfinite(exact), off, np.where(same, 0.0, np.inf))


def _quotient(error: npt.ArrayLike, unit: npt.ArrayLike) -> np.ndarray:
    """Errors in this unit; 0 for no error, also in units of 0."""
    with np.errstate(all="ignore"):
        return np.where(np.equal(error, 0), 0.0, np.divide(error, unit))


def _times(number: float) -> str:
    return f"{number:,.1f} times" if number < 1e4 else f"{number:.1e} times"
