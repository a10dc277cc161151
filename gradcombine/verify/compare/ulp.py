"""Elementwise distances between two arrays in units in the last place, for floats, complex numbers and integers."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcombine.errors import GradCombineError, invalid

NAN_DISTANCE = np.iinfo(np.uint64).max
"""The distance between NaN and a number, larger than between any two numbers."""


def ulp_distance(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """The number of representable values from ``a`` to ``b``, elementwise.

    The bits of floats, read as sign and magnitude, number the representable values in order; the distance is the
    difference of these numbers. +0 and -0 are 0 apart, the largest finite value and infinity are 1 apart. NaN is 0 from
    NaN of any payload, and `NAN_DISTANCE` from everything else.

    Args:
      a, b: arrays of the same shape and float dtype, of 8 to 64 bits, including those of ml_dtypes.

    Returns:
      uint64, of that shape.

    >>> import numpy as np
    >>> ulp_distance(np.float32([1, 0, np.nan]), np.float32([1.0000001, -0.0, np.nan]))
    array([1, 0, 0], dtype=uint64)
    """
    left, right = _native(a), _native(b)
    first, second = _ordered(left), _ordered(right)
    # The difference of two int64 may need a uint64, in which subtraction modulo 2**64 is exact.
    with np.errstate(over="ignore"):
        distance = np.maximum(first, second).view(np.uint64) - np.minimum(first, second).view(np.uint64)
    nans = np.isnan(left).astype(int) + np.isnan(right).astype(int)
    return np.select([nans == 1, nans == 2], [np.uint64(NAN_DISTANCE), np.uint64(0)], distance)


def equal_bits(a: npt.ArrayLike, b: npt.ArrayLike) -> bool:
    """Whether two arrays have the same shape, dtype and bits, including signs of zeros and NaN payloads.

    >>> import numpy as np
    >>> equal_bits(np.float32([0.0]), np.float32([-0.0]))
    False
    """
    left, right = _native(a), _native(b)
    return (left.shape, left.dtype) == (right.shape, right.dtype) and left.tobytes() == right.tobytes()


def _native(a: npt.ArrayLike) -> np.ndarray:
    array = np.asarray(a)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _ordered(array: np.ndarray) -> npt.NDArray[np.int64]:
    """Integers in the order of the floats: the bits of the magnitude, negated if the sign bit is set."""
    if array.dtype.itemsize == 1:
        # Some 8-bit floats have no sign bit or no zero; their 256 values are sorted instead.
        values = np.arange(256, dtype=np.uint8).view(array.dtype).astype(np.float32)
        return np.searchsorted(np.unique(values[~np.isnan(values)]), array.astype(np.float32))
    size = array.dtype.itemsize
    bits = np.ascontiguousarray(array).reshape(array.shape).view(f"i{size}")
    magnitude = bits & np.iinfo(bits.dtype).max
    return np.where(bits < 0, -magnitude, magnitude).astype(np.int64)


NAN_LENGTH = 66
"""Used as the bit length of the distance between NaN and a number."""

Kind: TypeAlias = Literal["float", "complex", "integer"]
"""Dtypes of one kind are comparable."""


class Distances(NamedTuple):
    """Elementwise distances between two arrays.

    Attributes:
      ulps: units in the last place; for integers the difference, modulo 2**64.
      beyond: where an integer difference is 2**64 larger; None if it cannot be.
    """

    ulps: npt.NDArray[np.uint64]
    beyond: npt.NDArray[np.bool_] | None = None

    def lengths(self, kind: Kind) -> npt.NDArray[np.int64]:
        """The bit length of each distance, from 0 to 65; `NAN_LENGTH` for NaN against a number."""
        high = self.ulps >> np.uint64(32)
        # 32-bit halves are exact in float64, whose exponent is the bit length.
        of_high, of_low = (np.frexp(x.astype(np.float64))[1] for x in (high, self.ulps & np.uint64(0xFFFFFFFF)))
        lengths = np.where(high > 0, 32 + of_high, of_low)
        if kind != "integer":
            return np.where(self.ulps == np.uint64(NAN_DISTANCE), NAN_LENGTH, lengths)
        return lengths if self.beyond is None else np.where(self.beyond, 65, lengths)

    def largest(self, where: npt.NDArray[np.bool_]) -> tuple[int, int]:
        """The position of the largest distance among the elements in ``where``, and that distance."""
        if self.beyond is not None and self.beyond.any():
            at = int(np.argmax(np.where(self.beyond, self.ulps, 0)))
            # A distance of exactly 2**64 is 0 modulo 2**64.
            at = at if self.beyond[at] else int(np.argmax(self.beyond))
            return at, (1 << 64) + int(self.ulps[at])
        at = int(np.argmax(np.where(where, self.ulps, 0)))
        at = at if where[at] else int(np.argmax(where))
        return at, int(self.ulps[at])


@cache
def kind_of(dtype: np.dtype) -> Kind:
    """The kind of a numeric dtype; booleans are integers.

    Raises:
      GradCombineError: for dtypes that are not numeric, and for `numpy.longdouble`, whose precision depends on the
        machine.
    """
    extended = dtype.type.__module__ == "ml_dtypes"
    if dtype.kind in "biu" or (extended and dtype.name.lstrip("u").startswith("int")):
        return "integer"
    if dtype.name in ("complex64", "complex128"):
        return "complex"
    extended = extended and "complex" not in dtype.name
    if dtype.name in ("float16", "float32", "float64") or extended:
        return "float"
    raise invalid("a dtype of numbers of up to 64 bits", dtype)


def comparable(a: np.dtype, b: np.dtype) -> bool:
    """Whether leaves of these dtypes can be compared."""
    try:
        return kind_of(a.newbyteorder("=")) == kind_of(b.newbyteorder("="))
    except GradCombineError:
        return False


def rounding_unit(dtype: np.dtype) -> float:
    """The unit roundoff of a float or complex dtype: half the distance from 1 to the next larger number."""
    return float(finfo(dtype).eps) / 2


def finfo(dtype: np.dtype) -> Any:
    """The `ml_dtypes.finfo` of a float or complex dtype."""
    return cast("Any", ml_dtypes.finfo(dtype))


def distances(kind: Kind, left: np.ndarray, right: np.ndarray) -> Distances:
    """The elementwise distances between two arrays of one kind, in native byte order."""
    if kind == "integer":
        # The 4-bit and 2-bit integers of ml_dtypes are compared as int8.
        return _integer_distances(*(x if x.dtype.kind in "biu" else x.astype(np.int8) for x in (left, right)))
    unit = max(left.dtype, right.dtype, key=rounding_unit)  # the narrower one
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # Some casts between narrow floats do not exist; all can be cast to float32, exactly.
        x, y = (
            (side if side.dtype == unit or side.itemsize > 1 else side.astype(np.float32)).astype(unit, copy=False)
            for side in (left, right)
        )
    if kind == "complex":
        ulps = np.maximum(*(ulp_distance(part(x), part(y)) for part in (np.real, np.imag)))
    else:
        ulps = ulp_distance(x, y)
    if left.dtype != right.dtype:
        # A number that overflows in the narrower dtype is not equal to an infinity, NaN or the largest number.
        lost = [np.isfinite(side) & ~np.isfinite(cast) for side, cast in ((left, x), (right, y))]
        lost.append(np.isnan(left) != np.isnan(right))
        ulps = np.where(np.any(lost, axis=0), np.uint64(NAN_DISTANCE), ulps)
    return Distances(ulps)


def bits_differ(left: np.ndarray, right: np.ndarray) -> npt.NDArray[np.bool_]:
    """Where two arrays of the same dtype differ in any bit."""
    words = np.dtype(f"u{min(left.dtype.itemsize, 8)}")
    x, y = (np.ascontiguousarray(side).view(words).reshape(left.size, -1) for side in (left, right))
    return (x[:, 0] != y[:, 0]) if x.shape[1] == 1 else (x != y).any(axis=1)


def same_specials(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether NaN and infinities are at the same positions, and infinities have the same signs."""
    x, y = (np.stack((np.real(side), np.imag(side))) for side in (left, right))
    special = ~(np.isfinite(x) & np.isfinite(y)).all(axis=0)
    x, y = x[:, special], y[:, special]
    return bool(np.all((x == y) | (np.isnan(x) & np.isnan(y))))


def _integer_distances(left: np.ndarray, right: np.ndarray) -> Distances:
    below = left < right
    # Differences modulo 2**64 are exact for any signs.
    x, y = left.astype(np.uint64), right.astype(np.uint64)
    apart = np.where(below, y - x, x - y)
    if {left.dtype.kind, right.dtype.kind} != {"i", "u"}:
        return Distances(apart)
    # The distance between a negative number and a uint64 may be 2**64 or more.
    upper = np.where(below, y, x)
    return Distances(apart, ((left < 0) ^ (right < 0)) & (apart < upper))
