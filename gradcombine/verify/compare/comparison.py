"""How far apart two leaves, and two trees of any frameworks, are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError, require_number
from gradcombine.statefile.header import value_of
from gradcombine.types import Tree
from gradcombine.verify.compare.reference import Errors, Judgement, errors, judge, require_reference
from gradcombine.verify.compare.ulp import (
    NAN_DISTANCE,
    NAN_LENGTH,
    Kind,
    bits_differ,
    comparable,
    distances,
    kind_of,
    same_specials,
)
from gradcombine.verify.diff.pytorch import converted

EXACT_COUNTS = 1024
"""Distances below this many ulp are counted exactly; larger ones by their bit length."""


class Element(NamedTuple):
    """One element of both leaves: where it is, counted in C order, and both values."""

    at: int
    a: complex
    b: complex


class LeafDifference(NamedTuple):
    """How far apart the two sides of one leaf are.

    Attributes:
      name: the leaf's name in the first tree, and in the second one if it has another there.
      shape: of both.
      dtypes: of each side.
      equal_bits: whether the two hold the same bits; the sign of a zero and a NaN's payload count.
      max_ulp: the largest distance, in units in the last place of the narrower dtype; of integers, their difference.
        `NAN_DISTANCE` where only one side is NaN.
      median_ulp: the (lower) median distance; from 1024 on, the power of two at or below it.
      ulp_counts: how many elements are 0, in [1, 2), [2, 4), [4, 8) ... ulp apart; the last count is of NaN pairs.
      relative: the largest absolute difference, over the largest magnitude of the second leaf; finite pairs alone.
        Exact for integers.
      cosine: of the angle between the two as vectors; NaN where one is zero, 1 where both are.
      nans, infs: how many elements are NaN, or infinite, on each side.
      same_specials: whether NaN and infinities, which ``relative`` leaves out, are in the same places, and infinities
        of the same sign.
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
    same_specials: bool
    first: Element | None
    worst: Element | None

    @property
    def same_dtype(self) -> bool:
        return self.dtypes[0] == self.dtypes[1]

    @property
    def nan_against_number(self) -> bool:
        """Whether an element is NaN on one side only."""
        return self.ulp_counts[-1] > 0


class Meter:
    """Measures a pair of leaves that arrives in pieces, in C order.

    Args:
      name: of the leaf.
      shape: of the whole leaf.
      a, b: the dtypes of the two sides: floats, complex numbers, integers or booleans, of one kind.

    Raises:
      GradCombineError: for dtypes of two kinds.

    >>> import numpy as np
    >>> meter = Meter("w", (3,), np.dtype(np.float32), np.dtype(np.float32))
    >>> for a, b in ([1, 2], [1, 2]), ([3], [3.0000002]):
    ...     meter.add(np.float32(a), np.float32(b))
    >>> meter.result().max_ulp
    1
    """

    def __init__(self, name: str, shape: tuple[int, ...], a: np.dtype, b: np.dtype) -> None:
        self._name, self._shape = name, shape
        self._dtypes = a, b = a.newbyteorder("="), b.newbyteorder("=")
        self._kind: Kind = kind_of(a)
        if kind_of(b) != self._kind:
            raise GradCombineError("compare", f"two {self._kind} leaves", f"{a} and {b}", name)
        self._seen, self._equal, self._max_ulp = 0, True, -1
        self._small = np.zeros(EXACT_COUNTS, np.int64)
        self._long = np.zeros(NAN_LENGTH + 1, np.int64)
        self._largest, self._apart = 0, 0
        self._same_specials = True
        self._dot, self._squares = 0.0, np.zeros(2)
        self._nans, self._infs = np.zeros(2, np.int64), np.zeros(2, np.int64)
        self._first: Element | None = None
        self._worst: Element | None = None

    def add(self, a: npt.ArrayLike, b: npt.ArrayLike) -> None:
        """The next elements of both sides, as many of one as of the other."""
        left, right = (
            np.asarray(side).reshape(-1).astype(dtype, copy=False)
            for side, dtype in zip((a, b), self._dtypes, strict=True)
        )
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
        """The measures of the whole leaf.

        Raises:
          GradCombineError: for fewer elements than the shape holds.
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
            self._relative(),
            float(np.clip(cosine, -1, 1)),
            (int(self._nans[0]), int(self._nans[1])),
            (int(self._infs[0]), int(self._infs[1])),
            self._same_specials,
            self._first,
            self._worst,
        )

    def _measure(self, left: np.ndarray, right: np.ndarray, same: bool) -> None:
        apart = distances(self._kind, left, right)
        lengths = apart.lengths(self._kind)
        short = apart.ulps[lengths <= (EXACT_COUNTS - 1).bit_length()]
        self._small += np.bincount(short.astype(np.int64), minlength=EXACT_COUNTS)
        self._long += np.bincount(lengths, minlength=len(self._long))
        different = bits_differ(left, right) if same else left != right
        if not different.any():
            self._max_ulp = max(self._max_ulp, 0)
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
            # Python's integers do not round.
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

    def _relative(self) -> float:
        # The quotient of two Python integers is correctly rounded.
        apart = max(self._max_ulp, 0) if self._kind == "integer" else self._apart
        return apart / self._largest if self._largest else (math.inf if apart else 0.0)

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


def _bytes(array: np.ndarray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8)


SHOWN = 8
"""How many leaves a message names."""


class Comparison(NamedTuple):
    """How far apart two trees are, leaf by leaf.

    Attributes:
      leaves: every leaf that both have, the worst first: by distance in ulp, then by relative difference.
      only_a, only_b: names of leaves that only one of them has.
      shapes: leaves whose shapes differ, as (name, shape of a, shape of b).
      kinds: leaves whose dtypes cannot be measured against each other, such as a float and an integer, as (name, dtype
        of a, dtype of b).
      judgements: which side of each leaf is off, where there is a reference.
    """

    leaves: tuple[LeafDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, np.dtype, np.dtype], ...] = ()
    judgements: tuple[Judgement, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether every leaf has a counterpart of the same shape and kind."""
        return not (self.only_a or self.only_b or self.shapes or self.kinds)

    @property
    def equal_bits(self) -> bool:
        return self.matched and all(leaf.equal_bits and leaf.same_dtype for leaf in self.leaves)

    @property
    def max_ulp(self) -> int:
        return max((leaf.max_ulp for leaf in self.leaves), default=0)

    def __str__(self) -> str:
        lines = _lines(self, [leaf for leaf in self.leaves if not (leaf.equal_bits and leaf.same_dtype)])
        return "\n".join([*lines, *(f"  {each}" for each in self.judgements)])


def compare(a: Tree, b: Tree, *, reference: Tree | None = None, roundings: float | None = None) -> Comparison:
    """Compares two trees leaf by leaf; their frameworks and their containers may differ.

    Leaves are matched by their paths. A leaf that is None (or float0) is "no gradient", and matches only another one.

    Args:
      a, b: trees of arrays, such as gradients, parameters or accumulator states. Of tf.distribute values and sharded
        arrays, what this process holds.
      reference: the same tree in float64, which says of each side of each leaf by how many times its own rounding
        noise it is off (`gradcombine.verify.compare.reference`).
      roundings: how many in a row the noise is that of; None to estimate.

    Returns:
      A `Comparison`, which prints as a report of the leaves that differ.

    Raises:
      GradCombineError: for a leaf that is not an array, or that the reference lacks, or has in another shape or in a
        dtype that is not exact enough.

    >>> import numpy as np
    >>> from gradcombine.verify import compare
    >>> comparison = compare({"w": np.float32([1, 2])}, {"w": np.float32([1, 2.0000002])})
    >>> comparison.equal_bits, comparison.max_ulp
    (False, 1)
    >>> print(comparison)
    1 of 1 leaves differ
      ['w'] float32 (2,): up to 1 ulp, 1.2e-07 relative; worst [1]: 2.0 != 2.000000238418579
    """
    lefts, rights, exact = _named(a), _named(b), None if reference is None else _named(reference)
    measured: list[Errors] = []
    shared = [name for name in lefts if name in rights]
    leaves: list[LeafDifference] = []
    shapes: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    kinds: list[tuple[str, np.dtype, np.dtype]] = []
    for name in shared:
        left, right = lefts[name], rights[name]
        if left.shape != right.shape:
            shapes.append((name, left.shape, right.shape))
            continue
        if not comparable(left.dtype, right.dtype):
            kinds.append((name, left.dtype, right.dtype))
            continue
        meter = Meter(name, left.shape, left.dtype, right.dtype)
        meter.add(left, right)
        leaves.append(meter.result())
        if exact is not None:
            measured.append(_errors(name, left, right, exact.get(name)))
    return Comparison(
        tuple(sorted(leaves, key=badness)),
        tuple(name for name in lefts if name not in rights),
        tuple(name for name in rights if name not in lefts),
        tuple(shapes),
        tuple(kinds),
        judge(measured, roundings),
    )


def _errors(name: str, left: np.ndarray, right: np.ndarray, exact: np.ndarray | None) -> Errors:
    if exact is None or exact.shape != left.shape:
        received = "no such leaf" if exact is None else f"shape {exact.shape}"
        raise GradCombineError("compare", f"a reference of shape {left.shape}", received, name)
    for side in (left, right):
        require_reference(side.dtype, exact.dtype, name)
    return errors(name, (left.dtype, right.dtype), lambda: [(left, right, exact)])


def assert_equal_bits(a: Tree, b: Tree) -> None:
    """Asserts that two trees have the same leaves, dtypes and bits; a failure names the worst leaves.

    Raises:
      AssertionError: with the report of `compare`.

    >>> import numpy as np
    >>> assert_equal_bits({"w": np.float32([0.0])}, {"w": np.float32([-0.0])})
    Traceback (most recent call last):
    AssertionError: 1 of 1 leaves differ
      ['w'] float32 (1,): up to 0 ulp, 0.0e+00 relative; worst [0]: 0.0 != -0.0
    """
    __tracebackhide__ = True
    comparison = compare(a, b)
    if not comparison.equal_bits:
        raise AssertionError(str(comparison))


def assert_within_ulp(a: Tree, b: Tree, ulp: int | Mapping[str, int] | Callable[[str], int]) -> None:
    """Asserts that two trees have the same leaves, and that no element is further apart than allowed.

    Args:
      a, b: as for `compare`.
      ulp: the allowed distance in units in the last place, of the narrower dtype of a pair: one number; or one for
        each leaf's path, as a mapping or a function.

    Raises:
      AssertionError: with a report of the leaves that are too far apart.
      GradCombineError: for a mapping that lacks a leaf.

    >>> import numpy as np
    >>> assert_within_ulp(np.float32([1]), np.float32([1.0000001]), 1)
    """
    __tracebackhide__ = True
    comparison = compare(a, b)

    def known(distance: object) -> float:
        return require_number("assert_within_ulp", "an allowed distance of 0 or more", distance, 0)

    def allowed(name: str) -> float:
        if callable(ulp):
            return known(ulp(name))
        if isinstance(ulp, Mapping):
            if name not in ulp:
                raise GradCombineError("assert_within_ulp", "an allowed distance for every leaf", "none", name)
            return known(ulp[name])
        return known(ulp)

    far = [leaf for leaf in comparison.leaves if leaf.max_ulp > allowed(leaf.name)]
    if far or not comparison.matched:
        raise AssertionError("\n".join(_lines(comparison, far)))


def badness(leaf: LeafDifference) -> tuple[bool, int, float, str]:
    """A sort key: leaves that differ come first, the largest distance before all."""
    return leaf.equal_bits, -leaf.max_ulp, -leaf.relative, leaf.name


def describe_ulp(leaf: LeafDifference) -> str:
    """A distance in words."""
    return "NaN on one side" if leaf.nan_against_number else f"up to {leaf.max_ulp:,} ulp"


def _named(value: Tree) -> dict[str, np.ndarray]:
    leaves, structure = tree.flatten("compare", converted("compare", value))
    paths = structure.paths()
    present = ((path or "(root)", x) for path, x in zip(paths, leaves, strict=True) if not is_absent(x))
    return {path: value_of("compare", x, path) for path, x in present}


def _lines(comparison: Comparison, leaves: list[LeafDifference]) -> list[str]:
    lines = [f"{len(leaves)} of {len(comparison.leaves)} leaves differ"]
    lines += [f"  {_described(leaf)}" for leaf in leaves[:SHOWN]]
    if len(leaves) > SHOWN:
        lines.append(f"  and {len(leaves) - SHOWN} more")
    lines += [f"  {name}: shape {a} against {b}" for name, a, b in comparison.shapes[:SHOWN]]
    lines += [f"  {name}: not compared, {a} against {b}" for name, a, b in comparison.kinds[:SHOWN]]
    for side, names in (("first", comparison.only_a), ("second", comparison.only_b)):
        if names:
            more = "" if len(names) <= SHOWN else f" and {len(names) - SHOWN} more"
            lines.append(f"  only in the {side}: {', '.join(names[:SHOWN])}{more}")
    return lines


def _described(leaf: LeafDifference) -> str:
    dtype = leaf.dtypes[0] if leaf.same_dtype else f"{leaf.dtypes[0]} against {leaf.dtypes[1]}"
    text = f"{leaf.name} {dtype} {leaf.shape}: {describe_ulp(leaf)}, {leaf.relative:.1e} relative"
    if leaf.nans != (0, 0):
        text += f"; NaN {leaf.nans[0]:,} against {leaf.nans[1]:,}"
    if leaf.worst is None:
        return text
    position = ", ".join(map(str, np.unravel_index(leaf.worst.at, leaf.shape)))
    return f"{text}; worst [{position}]: {leaf.worst.a!r} != {leaf.worst.b!r}"
