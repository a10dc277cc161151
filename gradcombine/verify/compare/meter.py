"""Measurement of the differences between two arrays, chunk by chunk."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradcombine.verify.compare.ulp import (
    NAN_DISTANCE,
    NAN_LENGTH,
    Kind,
    bits_differ,
    distances,
    equal_bits,
    kind_of,
    same_specials,
)

EXACT_COUNTS = 1024
"""Distances below this many ulp are counted individually, larger ones by bit length."""


class Element(NamedTuple):
    """One element of both leaves: its position in C order, and both values."""

    at: int
    a: complex
    b: complex


class LeafDifference(NamedTuple):
    """The difference between the two sides of a leaf.

    Attributes:
      name: the leaf's name in the first tree, and in the second if it differs there.
      shape: the common shape.
      dtypes: the dtype of each side.
      equal_bits: whether both sides have the same bits, including signs of zeros and NaN payloads.
      max_ulp: the largest distance, in units in the last place of the narrower dtype; for integers, the difference.
        `NAN_DISTANCE` if only one side is NaN, or overflows in the narrower dtype.
      median_ulp: the (lower) median distance; from 1024 on, rounded down to a power of two.
      ulp_counts: the number of elements that are 0, in [1, 2), [2, 4), [4, 8) ... ulp apart; last, the number of
        elements that are NaN, or overflow in the narrower dtype, on one side only.
      absolute: the largest absolute difference over finite elements. Exact for integers.
      largest: the largest magnitude of a finite element in the second leaf.
      relative: ``absolute / largest``.
      cosine: the cosine of the angle between the sides as vectors; NaN if only one is zero, 1 if both are.
      nans, infs: the number of NaN and of infinite elements on each side.
      same_specials: whether NaN and infinities, which ``relative`` ignores, are at the same positions, and infinities
        have the same signs.
      first: the first element whose bits differ, or None.
      worst: the first element at the largest distance; None if all bits are equal.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    equal_bits: bool
    max_ulp: int
    median_ulp: int
    ulp_counts: tuple[int, ...]
    absolute: float
    largest: float
    relative: float
    cosine: float
    nans: tuple[int, int]
    infs: tuple[int, int]
    same_specials: bool
    first: Element | None
    worst: Element | None

    @property
    def same_dtype(self) -> bool:
        return self.dtypes[0] == self.dtypes[1]

    @property
    def nan_against_number(self) -> bool:
        """Whether an element is NaN, or overflows in the narrower dtype, on one side only."""
        return self.ulp_counts[-1] > 0

    @property
    def badness(self) -> tuple[bool, int, float, str]:
        """A sort key: leaves that differ come first, in descending order of distance."""
        return self.equal_bits, -self.max_ulp, -self.relative, self.name

    def position(self, element: Element) -> str:
        """An element's index along each axis of ``shape``, as "[0, 2]"."""
        return f"[{', '.join(map(str, np.unravel_index(element.at, self.shape)))}]"

    @property
    def distance(self) -> str:
        """The largest distance in words."""
        return "NaN or overflow on one side" if self.nan_against_number else f"up to {self.max_ulp:,} ulp"


class Meter:
    """Measures the difference between two leaves, passed in chunks in C order.

    Args:
      name: the leaf's name.
      shape: the shape of the full leaf.
      a, b: the dtypes of the two sides, which must be `comparable`.

    >>> import numpy as np
    >>> meter = Meter("w", (3,), np.dtype(np.float32), np.dtype(np.float32))
    >>> for a, b in ([1, 2], [1, 2]), ([3], [3.0000002]):
    ...     meter.add(np.float32(a), np.float32(b))
    >>> meter.result().max_ulp
    1
    """

    def __init__(self, name: str, shape: tuple[int, ...], a: np.dtype, b: np.dtype) -> None:
        self._name, self._shape = name, shape
        self._dtypes = a.newbyteorder("="), b.newbyteorder("=")
        self._kind: Kind = kind_of(self._dtypes[0])
        self._seen, self._equal, self._max_ulp = 0, True, 0
        self._small = np.zeros(EXACT_COUNTS, np.int64)
        self._long = np.zeros(NAN_LENGTH + 1, np.int64)
        self._largest, self._apart = 0, 0
        self._same_specials = True
        self._dot, self._squares = 0.0, np.zeros(2)
        self._nans, self._infs = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._first: Element | None = None
        self._worst: Element | None = None

    def add(self, a: npt.ArrayLike, b: npt.ArrayLike) -> None:
        """Adds the next elements of both sides, equally many of each."""
        left, right = (
            np.asarray(side).reshape(-1).astype(dtype, copy=False)
            for side, dtype in zip((a, b), self._dtypes, strict=True)
        )
        if left.size == 0:
            return
        if equal_bits(left, right):
            self._small[0] += left.size
            self._long[0] += left.size
            self._magnitudes(left, left)
        else:
            self._measure(left, right)
            self._magnitudes(left, right)
        self._seen += left.size

    def result(self) -> LeafDifference:
        """The difference of the full leaf."""
        assert self._seen == math.prod(self._shape)
        norms = np.sqrt(self._squares)
        both_zero = not norms.any()
        cosine = 1.0 if both_zero else float(self._dot / (norms[0] * norms[1])) if norms.all() else math.nan
        absolute = self._max_ulp if self._kind == "integer" else self._apart
        used = int(np.flatnonzero(self._long[:-1]).max(initial=0)) + 1
        return LeafDifference(
            self._name,
            self._shape,
            (str(self._dtypes[0]), str(self._dtypes[1])),
            self._equal,
            self._max_ulp,
            self._median(),
            (*map(int, self._long[:used]), int(self._long[-1])),
            absolute,
            self._largest,
            self._relative(absolute),
            float(np.clip(cosine, -1, 1)),
            (int(self._nans[0]), int(self._nans[1])),
            (int(self._infs[0]), int(self._infs[1])),
            self._same_specials,
            self._first,
            self._worst,
        )

    def _measure(self, left: np.ndarray, right: np.ndarray) -> None:
        apart = distances(self._kind, left, right)
        lengths = apart.lengths(self._kind)
        short = apart.ulps[lengths <= (EXACT_COUNTS - 1).bit_length()]
        self._small += np.bincount(short.astype(np.int64), minlength=EXACT_COUNTS)
        self._long += np.bincount(lengths, minlength=len(self._long))
        different = bits_differ(left, right) if left.dtype == right.dtype else left != right
        if not different.any():
            return
        self._equal = False
        if self._first is None:
            self._first = self._element(left, right, int(np.argmax(different)))
        worst, distance = apart.largest(different)
        if self._worst is None or distance > self._max_ulp:
            self._worst = self._element(left, right, worst)
        self._max_ulp = max(self._max_ulp, distance)

    def _magnitudes(self, left: np.ndarray, right: np.ndarray) -> None:
        if self._kind == "integer":
            # Python integers do not round.
            self._largest = max(self._largest, abs(int(right.max())), abs(int(right.min())))
        wide = np.dtype(np.complex128 if self._kind == "complex" else np.float64)
        x = left.astype(wide)
        y = x if right is left else right.astype(wide)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            for side, values in enumerate((x, y)):
                self._nans[side] += np.count_nonzero(np.isnan(values))
                self._infs[side] += np.count_nonzero(np.isinf(values))
            self._same_specials &= same_specials(x, y)
            x, y = x[finite], y[finite]
        if not x.size:
            return
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            self._add(x, y)

    def _add(self, x: np.ndarray, y: np.ndarray) -> None:
        square = float(np.vdot(y, y).real)
        if self._kind != "integer":
            self._largest = max(self._largest, float(np.abs(y).max()))
        if y is x:
            self._dot += square
            self._squares += square
            return
        if self._kind != "integer":
            self._apart = max(self._apart, float(np.abs(x - y).max()))
        self._dot += float(np.vdot(x, y).real)
        self._squares += np.array([np.vdot(x, x).real, square])

    def _relative(self, absolute: float) -> float:
        if self._largest and math.isfinite(self._largest):  # the absolute value of a complex number may overflow
            return absolute / self._largest  # correctly rounded, also for two Python integers
        return math.inf if absolute else 0.0

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
        return NAN_DISTANCE if length == NAN_LENGTH else 1 << max(length - 1, 0)
