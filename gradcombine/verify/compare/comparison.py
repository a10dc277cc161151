"""Comparison of two trees of any frameworks, leaf by leaf."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.errors import invalid, operation
from gradcombine.reporting import listed
from gradcombine.statefile.header import value_of
from gradcombine.types import Tree
from gradcombine.verify.compare.meter import LeafDifference, Meter
from gradcombine.verify.compare.reference import Errors, Judgement, errors, judge, require_roundings, unfit
from gradcombine.verify.compare.ulp import NAN_DISTANCE, comparable
from gradcombine.verify.diff.pytorch import converted

SHOWN = 8
"""Number of leaves listed in a message."""


class Comparison(NamedTuple):
    """The differences between two trees, leaf by leaf.

    Attributes:
      leaves: the leaves of both trees, worst first: by distance in ulp, then by relative difference.
      only_a, only_b: names of leaves that only one tree has.
      shapes: leaves whose shapes differ, as (name, shape of a, shape of b).
      kinds: leaves whose dtypes cannot be compared, such as a float and an integer, as (name, dtype of a, dtype of b).
      judgements: which side of each leaf is off, if there is a reference.
    """

    leaves: tuple[LeafDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, np.dtype, np.dtype], ...] = ()
    judgements: tuple[Judgement, ...] = ()

    @property
    def matched(self) -> bool:
        """Whether every leaf has a counterpart of the same shape and a comparable dtype."""
        return not (self.only_a or self.only_b or self.shapes or self.kinds)

    @property
    def equal_bits(self) -> bool:
        return self.matched and all(leaf.equal_bits and leaf.same_dtype for leaf in self.leaves)

    @property
    def max_ulp(self) -> int:
        return max((leaf.max_ulp for leaf in self.leaves), default=0) if self.matched else NAN_DISTANCE

    def __str__(self) -> str:
        lines = _lines(self, [leaf for leaf in self.leaves if not (leaf.equal_bits and leaf.same_dtype)])
        return "\n".join([*lines, *(f"  {each}" for each in self.judgements)])


@operation("compare")
def compare(a: Tree, b: Tree, *, reference: Tree | None = None, roundings: float | None = None) -> Comparison:
    """Compares two trees leaf by leaf. Their frameworks and container types may differ.

    Leaves are matched by path. A leaf that is None (or float0) means "no gradient", and matches only another such leaf.

    Args:
      a, b: trees of arrays, such as gradients, parameters or accumulator states. Of tf.distribute values and sharded
        arrays, the part on this process is compared.
      reference: the same tree in float64, to measure the error of each side in units of its rounding noise
        (`gradcombine.verify.compare.reference`).
      roundings: with a reference, the number of successive roundings in the noise; None to estimate it.

    Returns:
      A `Comparison` with ``equal_bits``, the largest distance ``max_ulp`` (that of NaN from a number, 2**64 - 1, if a
      leaf has no counterpart of its shape and kind), and ``leaves``: for each leaf of both trees its ``name``,
      ``max_ulp``, ``relative``, ``equal_bits`` and more, worst first. It prints as a report of the leaves that differ.

    Raises:
      GradCombineError: for a leaf that is not an array, or whose reference is missing, has another shape, or is not
        precise enough.

    >>> import numpy as np
    >>> from gradcombine.verify import compare
    >>> comparison = compare({"w": np.float32([1, 2])}, {"w": np.float32([1, 2.0000002])})
    >>> comparison.equal_bits, comparison.max_ulp
    (False, 1)
    >>> print(comparison)
    1 of 1 leaves differ
      ['w'] float32 (2,): up to 1 ulp, 1.2e-07 relative; worst [1]: 2.0 != 2.000000238418579
    """
    if roundings is not None:
        require_roundings(roundings, reference)
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
        tuple(sorted(leaves, key=lambda leaf: leaf.badness)),
        tuple(name for name in lefts if name not in rights),
        tuple(name for name in rights if name not in lefts),
        tuple(shapes),
        tuple(kinds),
        judge(measured, roundings),
    )


def _errors(name: str, left: np.ndarray, right: np.ndarray, exact: np.ndarray | None) -> Errors:
    if exact is None or exact.shape != left.shape:
        received = "no such leaf" if exact is None else f"shape {exact.shape}"
        raise invalid(f"a reference of shape {left.shape}", received, name)
    if problem := unfit(left.dtype, exact.dtype) or unfit(right.dtype, exact.dtype):
        raise invalid(problem, exact.dtype, name)
    return errors(name, (left.dtype, right.dtype), lambda: [(left, right, exact)])


@operation("assert_equal_bits")
def assert_equal_bits(a: Tree, b: Tree) -> None:
    """Asserts that two trees have the same leaves, dtypes and bits. The error lists the worst leaves.

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


def _named(value: Tree) -> dict[str, np.ndarray]:
    present = ((path or "(root)", x) for path, x in tree.present(converted(value)))
    return {path: value_of(x, path) for path, x in present}


def _lines(comparison: Comparison, leaves: list[LeafDifference]) -> list[str]:
    lines = [f"{len(leaves)} of {len(comparison.leaves)} leaves differ"]
    lines += [f"  {_described(leaf)}" for leaf in leaves[:SHOWN]]
    if len(leaves) > SHOWN:
        lines.append(f"  and {len(leaves) - SHOWN} more")
    lines += [f"  {name}: shape {a} against {b}" for name, a, b in comparison.shapes[:SHOWN]]
    lines += [f"  {name}: not compared, {a} against {b}" for name, a, b in comparison.kinds[:SHOWN]]
    for side, names in (("first", comparison.only_a), ("second", comparison.only_b)):
        lines += [f"  only in the {side}: {listed(names, SHOWN)}"] if names else []
    return lines


def _described(leaf: LeafDifference) -> str:
    dtype = leaf.dtypes[0] if leaf.same_dtype else f"{leaf.dtypes[0]} against {leaf.dtypes[1]}"
    text = f"{leaf.name} {dtype} {leaf.shape}: {leaf.distance}, {leaf.relative:.1e} relative"
    if leaf.nans != (0, 0):
        text += f"; NaN {leaf.nans[0]:,} against {leaf.nans[1]:,}"
    if leaf.worst is None:
        return text
    return f"{text}; worst {leaf.position(leaf.worst)}: {leaf.worst.a!r} != {leaf.worst.b!r}"
