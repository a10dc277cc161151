"""Distances between the elements of two leaves, of whatever kind of number."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcombine.errors import GradCombineError
from gradcombine.verify.ulp import NAN_DISTANCE, ulp_distance

NAN_LENGTH = 66
"""Stands for the bit length of the distance between NaN and a number."""


class Distances(NamedTuple):
    """How far the elements of two arrays are apart.

    Attributes:
      ulps: units in the last place; of integers their difference, modulo 2**64.
      beyond: where an integer difference is 2**64 more than that; None where none can be.
    """

    ulps: npt.NDArray[np.uint64]
    beyond: npt.NDArray[np.bool_] | None = None

    def lengths(self, kind: str) -> npt.NDArray[np.int64]:
        """The bit length of each distance, from 0 for 0 to 65; `NAN_LENGTH` for NaN against a number."""
        high = self.ulps >> np.uint64(32)
        # The halves are exact as float64, whose exponent is the bit length.
        of_high, of_low = (np.frexp(x.astype(np.float64))[1] for x in (high, self.ulps & np.uint64(0xFFFFFFFF)))
        lengths = np.where(high > 0, 32 + of_high, of_low)
        if kind != "whole":
            return np.where(self.ulps == np.uint64(NAN_DISTANCE), NAN_LENGTH, lengths)
        return lengths if self.beyond is None else np.where(self.beyond, 65, lengths)

    def largest(self, where: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """The first element of the largest distance among some of them, and that distance."""
        if self.beyond is not None and self.beyond.any():
            at = int(np.argmax(np.where(self.beyond, self.ulps, 0)))
            # A distance of 2**64 itself is 0 modulo 2**64.
            at = at if self.beyond[at] else int(np.argmax(self.beyond))
            return at, (1 << 64) + int(self.ulps[at])
        at = int(np.argmax(np.where(where, self.ulps, 0)))
        at = at if where[at] else int(np.argmax(where))
        return at, int(self.ulps[at])


def kind(dtype: np.dtype) -> str:
    """``"float"``, ``"complex"`` or ``"whole"``: what can be measured against each other.

    Raises:
      GradCombineError: for a dtype of anything else than numbers, and for `numpy.longdouble`, which is of another
        precision on every machine.
    """
    extended = dtype.type.__module__ == "ml_dtypes"
    if dtype.kind in "biu" or (extended and dtype.name.lstrip("u").startswith("int")):
        return "whole"
    if dtype in (np.complex64, np.complex128):
        return "complex"
    if dtype in (np.float16, np.float32, np.float64) or extended:
        return "float"
    raise GradCombineError("compare", "a dtype of numbers of up to 64 bits", dtype)


def comparable(a: np.dtype, b: np.dtype) -> bool:
    """Whether leaves of two dtypes have a common measure."""
    try:
        return kind(a.newbyteorder("=")) == kind(b.newbyteorder("="))
    except GradCombineError:
        return False


def narrower(a: np.dtype, b: np.dtype) -> np.dtype:
    """Of two float or complex dtypes, the one whose units distances are counted in."""
    precise = [ml_dtypes.finfo(x).nmant for x in (a, b)]
    return a if precise[0] <= precise[1] else b


def distances(kind: str, left: np.ndarray, right: np.ndarray) -> Distances:
    """The elementwise distances of two arrays of one kind, in native byte order."""
    if kind == "whole":
        return _whole(*(_standard(side) for side in (left, right)))
    unit = narrower(left.dtype, right.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        x, y = (side.astype(unit, copy=False) for side in (left, right))
    if kind == "complex":
        return Distances(np.maximum(*(ulp_distance(part(x), part(y)) for part in (np.real, np.imag))))
    found = ulp_distance(x, y)
    if left.dtype != right.dtype:
        # What has become an infinity by rounding to the narrower dtype is not one.
        found = np.maximum(found, (np.isinf(left) != np.isinf(right)).astype(np.uint64))
    return Distances(found)


def bits_differ(left: np.ndarray, right: np.ndarray) -> npt.NDArray[np.bool_]:
    """Where two arrays of one dtype differ in any bit."""
    words = np.dtype(f"u{min(left.dtype.itemsize, 8)}")
    x, y = (np.ascontiguousarray(side).view(words).reshape(left.size, -1) for side in (left, right))
    return (x[:, 0] != y[:, 0]) if x.shape[1] == 1 else (x != y).any(axis=1)


def same_specials(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether NaN and infinities stand in the same places, with the same signs; a NaN's sign and payload are free."""
    x, y = (np.stack((np.real(side), np.imag(side))) for side in (left, right))
    special = ~(np.isfinite(x) & np.isfinite(y)).all(axis=0)
    x, y = x[:, special], y[:, special]
    return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y))))


def _standard(array: np.ndarray) -> np.ndarray:
    """Integers of the 4 and 2 bits of ml_dtypes in 8."""
    return array if array.dtype.kind in "biu" else array.astype(np.int8)


def _whole(left: np.ndarray, right: np.ndarray) -> Distances:
    below = left < right
    # Modulo 2**64 a difference is exact, whatever the signs.
    x, y = left.astype(np.uint64), right.astype(np.uint64)
    apart = np.where(below, y - x, x - y)
    if {left.dtype.kind, right.dtype.kind} != {"i", "u"}:
        return Distances(apart)
    # From a negative number to one of 64 bits without a sign it may be 2**64 and more.
    upper = np.where(below, y, x)
    return Distances(apart, ((left < 0) ^ (right < 0)) & (apart < upper))
