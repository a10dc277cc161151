"""How far one leaf is from another, measured piece by piece, so that a leaf need not fit into memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from gradcombine.errors import GradCombineError
from gradcombine.verify.ulp import NAN_DISTANCE, ulp_distance

EXACT_COUNTS = 1024
"""Distances below this many ulp are counted one by one; larger ones by their bit length."""


class Element(NamedTuple):
    """One element of both leaves: where it is, counted in C order, and both values."""

    at: int
    a: complex
    b: complex


class LeafDifference(NamedTuple):
    """What was found about one leaf of a pair of trees.

    Attributes:
      name: the leaf's name in the first tree, and in the second one if it has another there.
      shape: of both.
      dtypes: of each.
      equal_bits: whether the two hold the same bits; the sign of a zero and a NaN's payload count.
      max_ulp: the largest distance, in units in the last place of the narrower dtype; of integers, their difference.
        `NAN_DISTANCE` where only one side is NaN.
      median_ulp: the (lower) median distance; from 1024 on, the power of two at or below it.
      ulp_counts: how many elements are 0, in [1, 2), [2, 4), [4, 8) ... ulp apart; the last count is of NaN pairs.
      relative: the largest absolute difference, over the largest magnitude of the second leaf; finite pairs alone.
      cosine: of the angle between the two as vectors; NaN where one is zero, 1 where both are.
      nans, infs: how many elements are NaN, or infinite, on each side.
      first: the first element whose bits differ, None if none does.
      worst: the first element at the largest distance, None if all bits are equal.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    equal_bits: bool
    max_ulp: int
    median_ulp: int
    ulp_counts: tuple[int, ...]
    relative: float
    cosine: float
    nans: tuple[int, int]
    infs: tuple[int, int]
    first: Element | None
    worst: Element | None

    @property
    def same_dtype(self) -> bool:
        return self.dtypes[0] == self.dtypes[1]


class Meter:
    """Measures a pair of leaves that arrives in pieces, in C order.

    Args:
      name: of the leaf.
      shape: of the whole leaf.
      a, b: the dtypes of the two sides: floats, complex numbers, integers or booleans, of one kind.

    Raises:
      GradCombineError: for dtypes that have no common measure.

    >>> import numpy as np
    >>> meter = Meter("w", (3,), np.dtype(np.float32), np.dtype(np.float32))
    >>> for a, b in ([1, 2], [1, 2]), ([3], [3.0000002]):
    ...     meter.add(np.float32(a), np.float32(b))
    >>> meter.result().max_ulp
    1
    """

    def __init__(self, name: str, shape: tuple[int, ...], a: np.dtype, b: np.dtype) -> None:
        self._name, self._shape, self._dtypes = name, shape, (a, b)
        kinds = _kind(a), _kind(b)
        if kinds[0] != kinds[1]:
            raise GradCombineError("compare", f"two leaves that are {kinds[0]}", f"{a} and {b}", name)
        self._kind, self._measured_in = kinds[0], _narrower(kinds[0], a, b)
        self._seen, self._equal, self._max_ulp = 0, True, -1
        self._small = np.zeros(EXACT_COUNTS, np.int64)
        self._long = np.zeros(66, np.int64)
        self._largest, self._apart = 0.0, 0.0
        self._dot, self._squares = 0.0, np.zeros(2)
        self._nans, self._infs = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._first: Element | None = None
        self._worst: Element | None = None

    def add(self, a: npt.ArrayLike, b: npt.ArrayLike) -> None:
        """The next elements of both sides, as many of one as of the other."""
        left, right = np.asarray(a).reshape(-1), np.asarray(b).reshape(-1)
        if left.size != right.size:
            raise GradCombineError("compare", f"{left.size} more elements", right.size, self._name)
        if left.size == 0:
            return
        same = self._dtypes[0] == self._dtypes[1]
        if same and np.array_equal(_bytes(left), _bytes(right)):
            self._small[0] += left.size
            self._long[0] += left.size
            self._max_ulp = max(self._max_ulp, 0)
            self._magnitudes(left, left)
        else:
            self._measure(left, right, same)
            self._magnitudes(left, right)
        self._seen += left.size

    def result(self) -> LeafDifference:
        """What all pieces so far have shown.

        Raises:
          GradCombineError: where fewer elements have come than the shape holds.
        """
        size = math.prod(self._shape)
        if self._seen != size:
            raise GradCombineError("compare", f"{size} elements", self._seen, self._name)
        norms = np.sqrt(self._squares)
        both_zero = not norms.any()
        cosine = 1.0 if both_zero else float(self._dot / (norms[0] * norms[1])) if norms.all() else math.nan
        used = int(np.flatnonzero(self._long[:-1]).max(initial=0)) + 1
        return LeafDifference(
            self._name,
            self._shape,
            (str(self._dtypes[0]), str(self._dtypes[1])),
            self._equal,
            max(self._max_ulp, 0),
            self._median(),
            (*map(int, self._long[:used]), int(self._long[-1])),
            self._apart / self._largest if self._largest else (math.inf if self._apart else 0.0),
            float(np.clip(cosine, -1, 1)),
            (int(self._nans[0]), int(self._nans[1])),
            (int(self._infs[0]), int(self._infs[1])),
            self._first,
            self._worst,
        )

    def _measure(self, left: np.ndarray, right: np.ndarray, same: bool) -> None:
        ulps = _distance(self._kind, left, right, self._measured_in)
        short = ulps < EXACT_COUNTS
        self._small += np.bincount(ulps[short].astype(np.int64), minlength=EXACT_COUNTS)
        self._long += np.bincount(_bit_lengths(ulps), minlength=66)
        different = _bits_differ(left, right) if same else left != right
        if not different.any():
            self._max_ulp = max(self._max_ulp, 0)
            return
        self._equal = False
        if self._first is None:
            self._first = self._element(left, right, int(np.argmax(different)))
        worst = int(np.argmax(np.where(different, ulps, 0))) if ulps.any() else int(np.argmax(different))
        if self._worst is None or int(ulps[worst]) > self._max_ulp:
            self._worst = self._element(left, right, worst)
        self._max_ulp = max(self._max_ulp, int(ulps[worst]))

    def _magnitudes(self, left: np.ndarray, right: np.ndarray) -> None:
        wide = np.dtype(np.complex128 if self._kind == "complex" else np.float64)
        x = left.astype(wide)
        y = x if right is left else right.astype(wide)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            for side, values in enumerate((x, y)):
                self._nans[side] += np.count_nonzero(np.isnan(values))
                self._infs[side] += np.count_nonzero(np.isinf(values))
            x, y = x[finite], y[finite]
        if not x.size:
            return
        self._largest = max(self._largest, float(np.abs(y).max()))
        square = float(np.vdot(y, y).real)
        if right is left:
            self._dot += square
            self._squares += square
            return
        self._apart = max(self._apart, float(np.abs(x - y).max()))
        self._dot += float(np.vdot(x, y).real)
        self._squares += np.array([np.vdot(x, x).real, square])

    def _element(self, left: np.ndarray, right: np.ndarray, i: int) -> Element:
        return Element(self._seen + i, left[i].item(), right[i].item())

    def _median(self) -> int:
        if self._seen == 0:
            return 0
        middle = (self._seen + 1) // 2
        counted = np.cumsum(self._small)
        if counted[-1] >= middle:
            return int(np.searchsorted(counted, middle))
        length = int(np.searchsorted(np.cumsum(self._long), middle))
        return NAN_DISTANCE if length == len(self._long) - 1 else 1 << max(length - 1, 0)


def _kind(dtype: np.dtype) -> str:
    if dtype == np.bool_ or np.issubdtype(dtype, np.integer):
        return "whole"
    if np.issubdtype(dtype, np.complexfloating):
        return "complex"
    if np.issubdtype(dtype, np.floating) or _is_extended(dtype):
        return "float"
    raise GradCombineError("compare", "a dtype of numbers", dtype)


def _is_extended(dtype: np.dtype) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return True


def _narrower(kind: str, a: np.dtype, b: np.dtype) -> np.dtype:
    """The dtype whose units distances are counted in."""
    if kind == "whole":
        return np.dtype(np.int64)
    precise = [ml_dtypes.finfo(x).nmant for x in (a, b)]
    return a if precise[0] <= precise[1] else b


def _distance(kind: str, left: Any, right: Any, measured_in: np.dtype) -> npt.NDArray[np.uint64]:
    if kind == "whole":
        lower, upper = np.minimum(left, right), np.maximum(left, right)
        # Modulo 2**64, a difference of two 64-bit integers is exact.
        return upper.astype(np.uint64) - lower.astype(np.uint64)
    with np.errstate(over="ignore", invalid="ignore"):
        x, y = (side.astype(measured_in) for side in (left, right))
    if kind == "complex":
        return np.maximum(ulp_distance(x.real, y.real), ulp_distance(x.imag, y.imag))
    if measured_in.itemsize == 1:
        # The steps of an 8-bit float are counted in bfloat16, which holds them all.
        x, y = x.astype(ml_dtypes.bfloat16), y.astype(ml_dtypes.bfloat16)
    return ulp_distance(x, y)


def _bytes(array: np.ndarray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


def _bits_differ(left: np.ndarray, right: np.ndarray) -> npt.NDArray[np.bool_]:
    words = np.dtype(f"u{min(left.dtype.itemsize, 8)}")
    x, y = (np.ascontiguousarray(side).view(words).reshape(left.size, -1) for side in (left, right))
    return (x[:, 0] != y[:, 0]) if x.shape[1] == 1 else (x != y).any(axis=1)


def _bit_lengths(ulps: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """0 for 0, n for [2**(n-1), 2**n), 65 for NaN against a number."""
    high = ulps >> np.uint64(32)
    # The halves are exact as float64, whose exponent is the bit length.
    lengths = np.where(high > 0, 32 + np.frexp(high.astype(np.float64))[1], np.frexp(ulps.astype(np.float64))[1])
    return np.where(ulps == np.uint64(NAN_DISTANCE), 65, lengths)
