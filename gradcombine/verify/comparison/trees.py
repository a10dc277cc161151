"""Two trees of any frameworks, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.comparison.distance import comparable
from gradcombine.verify.comparison.leaf import LeafDifference, Meter

SHOWN = 8
"""How many leaves a message names."""


class Comparison(NamedTuple):
    """What was found about two trees.

    Attributes:
      leaves: every leaf that both have, the worst first: by distance in ulp, then by relative difference.
      only_a, only_b: names of leaves that only one of them has.
      shapes: leaves that both have in two shapes, as (name, shape of a, shape of b).
      kinds: leaves that both have in dtypes without a common measure, such as a float and an integer, as (name, dtype
        of a, dtype of b).
    """

    leaves: tuple[LeafDifference, ...]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    kinds: tuple[tuple[str, np.dtype, np.dtype], ...] = ()

    @property
    def matched(self) -> bool:
        """Whether every leaf has its counterpart, of the same shape and of a kind that can be measured against it."""
        return not (self.only_a or self.only_b or self.shapes or self.kinds)

    @property
    def equal_bits(self) -> bool:
        return self.matched and all(leaf.equal_bits and leaf.same_dtype for leaf in self.leaves)

    @property
    def max_ulp(self) -> int:
        return max((leaf.max_ulp for leaf in self.leaves), default=0)

    def __str__(self) -> str:
        return "\n".join(_lines(self, [leaf for leaf in self.leaves if not (leaf.equal_bits and leaf.same_dtype)]))


def compare(a: Tree, b: Tree) -> Comparison:
    """Compares two trees leaf by leaf; they may be of two frameworks, and of two kinds of containers.

    Leaves are matched by their paths. A leaf that is None (or float0) is "no gradient", and matches only another one.

    Args:
      a, b: trees of arrays, such as gradients, parameters or accumulator states. For values of tf.distribute or
        sharded arrays, those of this process.

    Returns:
      A `Comparison`, which prints as a report of the leaves that differ.

    Raises:
      GradCombineError: for a leaf that is no array.

    >>> import numpy as np
    >>> from gradcombine.verify import compare
    >>> found = compare({"w": np.float32([1, 2])}, {"w": np.float32([1, 2.0000002])})
    >>> found.equal_bits, found.max_ulp
    (False, 1)
    >>> print(found)
    1 of 1 leaves differ
      ['w'] float32 (2,): up to 1 ulp, 1.2e-07 relative; worst [1]: 2.0 != 2.000000238418579
    """
    lefts, rights = _named(a), _named(b)
    shared = [name for name in lefts if name in rights]
    leaves, shapes, kinds = [], [], []
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
    return Comparison(
        tuple(sorted(leaves, key=badness)),
        tuple(name for name in lefts if name not in rights),
        tuple(name for name in rights if name not in lefts),
        tuple(shapes),
        tuple(kinds),
    )


def assert_equal_bits(a: Tree, b: Tree) -> None:
    """Passes where two trees have the same leaves, dtypes and bits; a failure names the worst leaves.

    Raises:
      AssertionError: with the report of `compare`.

    >>> import numpy as np
    >>> assert_equal_bits({"w": np.float32([0.0])}, {"w": np.float32([-0.0])})
    Traceback (most recent call last):
    AssertionError: 1 of 1 leaves differ
      ['w'] float32 (1,): up to 0 ulp, 0.0e+00 relative; worst [0]: 0.0 != -0.0
    """
    __tracebackhide__ = True
    found = compare(a, b)
    if not found.equal_bits:
        raise AssertionError(str(found))


def assert_within_ulp(a: Tree, b: Tree, ulp: int | Mapping[str, int] | Callable[[str], int]) -> None:
    """Passes where two trees have the same leaves, and no element is further apart than allowed.

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
    found = compare(a, b)

    def allowed(name: str) -> int:
        if callable(ulp):
            return ulp(name)
        if isinstance(ulp, Mapping):
            if name not in ulp:
                raise GradCombineError("assert_within_ulp", "an allowed distance for every leaf", "none", name)
            return ulp[name]
        return ulp

    far = [leaf for leaf in found.leaves if leaf.max_ulp > allowed(leaf.name)]
    if far or not found.matched:
        raise AssertionError("\n".join(_lines(found, far)))


def badness(leaf: LeafDifference) -> tuple[bool, int, float, str]:
    """Sorts leaves: what differs first, the largest distance before all."""
    return leaf.equal_bits, -leaf.max_ulp, -leaf.relative, leaf.name


def describe_ulp(leaf: LeafDifference) -> str:
    """A distance in words."""
    return "NaN on one side" if leaf.nan_against_number else f"up to {leaf.max_ulp:,} ulp"


def _named(value: Tree) -> dict[str, np.ndarray]:
    leaves, structure = tree.flatten("compare", value)
    paths = structure.paths()
    return {path or "(root)": np.asarray(x) for path, x in zip(paths, leaves, strict=True) if not is_absent(x)}


def _lines(found: Comparison, leaves: list[LeafDifference]) -> list[str]:
    lines = [f"{len(leaves)} of {len(found.leaves)} leaves differ"]
    lines += [f"  {_described(leaf)}" for leaf in leaves[:SHOWN]]
    if len(leaves) > SHOWN:
        lines.append(f"  and {len(leaves) - SHOWN} more")
    lines += [f"  {name}: shape {a} against {b}" for name, a, b in found.shapes[:SHOWN]]
    lines += [f"  {name}: not compared, {a} against {b}" for name, a, b in found.kinds[:SHOWN]]
    for side, names in (("first", found.only_a), ("second", found.only_b)):
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
