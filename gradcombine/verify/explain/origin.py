"""Explains the bits of a result by the order, precision and scaling that reproduce it, e.g. "the ring over 4 ranks"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain, compress
from typing import NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import invalid, operation, require_integer, require_items, require_number
from gradcombine.reductions import dtypes
from gradcombine.reporting import listed
from gradcombine.statefile.header import value_of
from gradcombine.types import Array, Tree
from gradcombine.verify.compare.ulp import ulp_distance
from gradcombine.verify.diff.pytorch import converted
from gradcombine.verify.explain.candidates import Candidate, candidates
from gradcombine.verify.explain.nccl import chunked, nccl_candidates

LISTED = 8
"""Number of candidates that are listed if several reproduce the result."""


class Verdict(NamedTuple):
    """How close a candidate is to the result.

    Attributes:
      candidate: the candidate.
      equal: whether it reproduces all bits of the result.
      share: the fraction of informative elements whose bits it reproduces.
      max_ulp: the largest distance, in units in the last place of the result.
    """

    candidate: Candidate
    equal: bool
    share: float
    max_ulp: int


class Explanation(NamedTuple):
    """How close each candidate is to a result.

    Attributes:
      verdicts: all candidates, closest first; if equally close, simplest first.
      elements: the number of informative elements: those of leaves that not all candidates reproduce.
      uninformative: the leaves that all candidates reproduce, such as zeros.
    """

    verdicts: tuple[Verdict, ...]
    elements: int
    uninformative: tuple[str, ...] = ()

    @property
    def matches(self) -> tuple[Verdict, ...]:
        """The candidates that reproduce the result bit for bit; none if all do, since that is uninformative.

        Candidates whose chunks are fitted to the result are included only if no other candidate reproduces it.
        """
        equal = [verdict for verdict in self.verdicts if verdict.equal and self.elements]
        return tuple(verdict for verdict in equal if not verdict.candidate.others) or tuple(equal)

    def __str__(self) -> str:
        matches = self.matches
        if not self.elements:
            return f"all {len(self.verdicts)} known orders give this result, so it does not show which one was used"
        if matches:
            lines = [f"the result is, to the bit: {matches[0].candidate}"]
            lines += [f"  and also: {verdict.candidate}" for verdict in matches[1:LISTED]]
            lines += [f"  and {len(matches) - LISTED} more"] if len(matches) > LISTED else []
        else:
            nearest = self.verdicts[0]
            lines = [
                f"no known order gives this result; the closest is: {nearest.candidate} "
                f"({nearest.share:.1%} of the elements equal, the largest distance {nearest.max_ulp:,} ulp)"
            ]
        if self.uninformative:
            names = [name or "(root)" for name in self.uninformative]
            lines.append(f"  uninformative leaves, which all candidates reproduce: {listed(names, LISTED)}")
        return "\n".join(lines)


@operation("explain", renames=True)
def explain(
    contributions: Sequence[Tree],
    result: Tree,
    weights: Sequence[float] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, str], None] = lambda tried, name: None,
) -> Explanation:
    """Finds the summation order, precision and scaling that reproduce a result from its contributions, bit for bit.

    Tries left chains, the canonical tree, TensorFlow's AddN, rings, psum and hierarchical copies over several numbers
    of ranks, NCCL's rings, trees and NVLS with DDP's mean (`gradcombine.verify.explain.nccl`), Welford's mean
    (optax.MultiSteps) and means of means; with accumulators of float32, bfloat16, float16 and float64, compensated and
    exact; as a sum, or as a mean that divides, multiplies by the reciprocal, or scales each contribution first; with
    and without weights.

    Args:
      contributions: trees of float arrays (including float8 and float64) of any framework, in order.
      result: the combined tree, of the same structure. Its dtypes may be narrower.
      weights: one per contribution, or None.
      ranks: the numbers of replicas that may have held the contributions; None for all divisors of their number.
      progress: called before each candidate, with the number of candidates tried so far and its name.

    Returns:
      An `Explanation`, which prints as a sentence. Several candidates match if the contributions do not distinguish
      them: small integers do not, a thousand elements of real gradients do. Leaves that all candidates reproduce, such
      as zeros, are uninformative: they are listed, and if there are no others, no candidate matches.

    Raises:
      GradCombineError: for an empty list, trees without elements, trees that do not match, leaves that are not floats,
        a wrong number of weights, and ``ranks`` of which none can have held as many contributions as the others.

    >>> import numpy as np
    >>> from gradcombine.verify import explain
    >>> rng = np.random.default_rng(0)
    >>> gradients = [{"w": rng.normal(size=400).astype(np.float32)} for _ in range(5)]
    >>> from_the_last = sum(g["w"] for g in reversed(gradients))
    >>> print(explain(gradients, {"w": from_the_last / np.float32(5)}))
    the result is, to the bit: sum / n, added one after another, from the last to the first, in float32
    """
    trees = list(map(_numpy, require_items("a list of contributions", contributions)))
    if not trees:
        raise invalid("one contribution or more", "an empty list")
    if weights is not None:
        expected = f"{len(trees)} weights"
        weights = [_number(expected, x) for x in require_items(expected, weights)]
        if len(weights) != len(trees):
            raise invalid(expected, len(weights))
    expected_leaves, structure = tree.flatten(_numpy(result))
    for value in trees:
        _require_same_shapes(structure, expected_leaves, value)
    named = [(path, x) for path, x in zip(structure.paths(), expected_leaves, strict=True) if _has_elements(x)]
    leaves = [x.reshape(-1) for _, x in named]
    if not leaves:
        raise invalid("one element or more in the result", "none")
    if ranks is None:
        ranks = [number for number in range(2, len(trees) + 1) if len(trees) % number == 0]
    expected = f"numbers of replicas, 1 or more, of which one divides {len(trees)} contributions"
    ranks = [require_integer(expected, x) for x in require_items(expected, ranks)]
    if ranks and all(len(trees) % x for x in ranks):
        raise invalid(expected, ", ".join(map(str, ranks)))
    tried: list[Candidate] = []
    measured: list[list[tuple[int, int]]] = []
    with np.errstate(all="ignore"):
        for candidate in chain(candidates(trees, weights, ranks), nccl_candidates(trees, weights, ranks)):
            progress(len(tried), str(candidate))
            measured.append(_measured(candidate, leaves))
            tried.append(candidate)
    equal, ulps = np.moveaxis(np.array(measured, np.uint64), -1, 0)  # by candidate and leaf
    informs = (equal < np.array([x.size for x in leaves], np.uint64)).any(axis=0)
    elements = sum(x.size for x in compress(leaves, informs))
    rows = zip(tried, equal[:, informs].sum(axis=1), ulps[:, informs].max(axis=1, initial=0), strict=True)
    verdicts = [Verdict(one, int(n) == elements, int(n) / max(elements, 1), int(ulp)) for one, n, ulp in rows]
    verdicts.sort(key=lambda verdict: (not verdict.equal, -verdict.share, verdict.max_ulp))
    uninformative = tuple(path for (path, _), x in zip(named, informs, strict=True) if not x)
    return Explanation(tuple(verdicts), elements, uninformative)


def _number(expected: str, weight: Array) -> float:
    """The weight as a Python number. Integers stay integers, since exact sums do not round products with them."""
    number = require_number(expected, weight, -math.inf)
    integer = np.asarray(weight).dtype.kind in "iu" or isinstance(weight, int)
    return int(weight) if integer else number


def _numpy(value: Tree) -> Tree:
    leaves, structure = tree.flatten(converted(value))
    named = zip(leaves, structure.paths(), strict=True)
    arrays = [None if is_absent(x) else value_of(x, path) for x, path in named]
    for array, path in zip(arrays, structure.paths(), strict=True):
        if array is not None and (dtypes.kind(array.dtype) != "float" or array.dtype.itemsize > 8):
            raise invalid("a float array of 64 bits at most", array.dtype, path)
    return tree.unflatten(structure, arrays)


def _require_same_shapes(structure: tree.Structure, leaves: Sequence[Array], value: Tree) -> None:
    for x, expected, path in zip(tree.flatten_as(structure, value), leaves, structure.paths(), strict=True):
        shapes = [None if side is None else side.shape for side in (expected, x)]
        if shapes[0] != shapes[1]:
            raise invalid(f"the result's shape, {shapes[0]}", shapes[1], path)


def _has_elements(leaf: Array) -> bool:
    return leaf is not None and np.size(leaf) > 0


def _measured(candidate: Candidate, leaves: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """The number of elements of each leaf that a candidate reproduces, and its largest distance in ulp."""
    results = [tree.flatten(run())[0] for run in (candidate.run, *candidate.others)]
    columns = [column for column in zip(*results, strict=True) if _has_elements(column[0])]
    values = [
        np.stack(column).reshape(len(results), -1).astype(leaf.dtype)
        for column, leaf in zip(columns, leaves, strict=True)
    ]
    # Signs of zeros have to agree, though they are at distance 0; NaN payloads do not.
    same = [
        ((value == leaf) & (np.signbit(value) == np.signbit(leaf))) | (np.isnan(value) & np.isnan(leaf))
        for value, leaf in zip(values, leaves, strict=True)
    ]
    measured: list[tuple[int, int]] = []
    for value, equal, order, leaf in zip(values, same, chunked(same), leaves, strict=True):
        chosen = order, np.arange(leaf.size)
        measured.append((int(equal[chosen].sum()), int(ulp_distance(value[chosen], leaf).max())))
    return measured
