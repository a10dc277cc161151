"""Tries every candidate on a result, and says which one it was, or how near each comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.types import Tree
from gradcombine.verify.origin.candidates import Candidate, candidates
from gradcombine.verify.ulp import NAN_DISTANCE, ulp_distance

RANKS = (2, 3, 4, 6, 8, 16)
"""The numbers of replicas that are tried where none are given."""


class Verdict(NamedTuple):
    """How near one candidate comes.

    Attributes:
      candidate: what was tried.
      equal: whether every bit of the result is the candidate's.
      share: of the elements that have the candidate's bits.
      max_ulp: the largest distance, in units in the last place of the result.
    """

    candidate: Candidate
    equal: bool
    share: float
    max_ulp: int


class Explanation(NamedTuple):
    """What was found.

    Attributes:
      verdicts: every candidate, the nearest first; of equals, the simplest first.
      elements: how many were compared.
    """

    verdicts: tuple[Verdict, ...]
    elements: int

    @property
    def matches(self) -> tuple[Verdict, ...]:
        """The candidates that give the result to the bit."""
        return tuple(verdict for verdict in self.verdicts if verdict.equal)

    def __str__(self) -> str:
        found = self.matches
        if not found:
            nearest = self.verdicts[0]
            return (
                f"no known order gives this result; the nearest is: {nearest.candidate} "
                f"({nearest.share:.1%} of the elements equal, the largest distance {nearest.max_ulp:,} ulp)"
            )
        lines = [f"the result is, to the bit: {found[0].candidate}"]
        return "\n".join([*lines, *(f"  as well as: {verdict.candidate}" for verdict in found[1:])])


def explain(
    contributions: Sequence[Tree],
    result: Tree,
    weights: Sequence[float] | None = None,
    *,
    ranks: Sequence[int] = RANKS,
    progress: Callable[[int, str], None] = lambda tried, name: None,
) -> Explanation:
    """Finds the order of additions, the precision and the scaling that made a result of its contributions.

    Tried are: left chains, the canonical tree, TensorFlow's AddN, rings, psum and hierarchical copies over several
    numbers of ranks, Welford's mean (optax.MultiSteps) and means of means; with accumulators of float32, bfloat16,
    float16 and float64, compensated and exact; as a sum, or a mean that divides, multiplies by the reciprocal, or
    scales each contribution first; with the weights, and without them.

    Args:
      contributions: trees of float arrays, of any framework, in the order of their numbers.
      result: the tree that was made of them, of the same structure. It may be narrower than the contributions.
      weights: one a contribution, if there were any.
      ranks: the numbers of replicas that may have shared the contributions.
      progress: called before each candidate, with how many have been tried and its name.

    Returns:
      An `Explanation`, which prints as a sentence. Several candidates match where the contributions cannot tell them
      apart, as small integers cannot; a thousand elements of real gradients can.

    Raises:
      GradCombineError: for an empty list, trees that do not match, leaves that are no floats, and wrong weights.

    >>> import numpy as np
    >>> from gradcombine.verify import explain
    >>> rng = np.random.default_rng(0)
    >>> gradients = [{"w": rng.normal(size=400).astype(np.float32)} for _ in range(5)]
    >>> from_the_last = sum(g["w"] for g in reversed(gradients))
    >>> print(explain(gradients, {"w": from_the_last / np.float32(5)}))
    the result is, to the bit: sum / n, added one after another, from the last to the first, in float32
    """
    trees = [_numpy(value) for value in contributions]
    if not trees:
        raise GradCombineError("explain", "one contribution or more", "an empty list")
    if weights is not None and len(weights) != len(trees):
        raise GradCombineError("explain", f"{len(trees)} weights", len(weights))
    wanted, structure = tree.flatten("explain", _numpy(result))
    for value in trees:
        _require_alike(structure, wanted, value)
    found = []
    for tried, candidate in enumerate(candidates(trees, weights, ranks)):
        progress(tried, str(candidate))
        found.append(_judged(candidate, structure, wanted))
    found.sort(key=lambda verdict: (not verdict.equal, -verdict.share, verdict.max_ulp))
    return Explanation(tuple(found), sum(x.size for x in wanted if x is not None))


def _numpy(value: Tree) -> Tree:
    leaves, structure = tree.flatten("explain", value)
    arrays = [None if is_absent(x) else np.asarray(x) for x in leaves]
    for array, path in zip(arrays, structure.paths(), strict=True):
        if array is not None and dtypes.kind(array.dtype) != "float":
            raise GradCombineError("explain", "a float array", array.dtype, path)
    return tree.unflatten(structure, arrays)


def _require_alike(structure: tree.Structure, wanted: Sequence[Any], value: Tree) -> None:
    for x, expected, path in zip(tree.flatten_as("explain", structure, value), wanted, structure.paths(), strict=True):
        shapes = [None if side is None else side.shape for side in (expected, x)]
        if shapes[0] != shapes[1]:
            raise GradCombineError("explain", f"the result's shape, {shapes[0]}", shapes[1], path)


def _judged(candidate: Candidate, structure: tree.Structure, wanted: Sequence[Any]) -> Verdict:
    with np.errstate(all="ignore"):
        made = tree.flatten_as("explain", structure, candidate.run())
    equal = elements = worst = 0
    for x, expected in zip(made, wanted, strict=True):
        if expected is None:
            continue
        with np.errstate(over="ignore"):
            own = np.asarray(x).astype(expected.dtype)
        distances = ulp_distance(own, expected)
        # The signs of zeros are bits, though no distance; NaN is NaN, whatever its payload.
        same = (distances == 0) & ((np.signbit(own) == np.signbit(expected)) | np.isnan(expected))
        equal, elements = equal + int(np.count_nonzero(same)), elements + expected.size
        worst = max(worst, int(distances.max(initial=0)))
    return Verdict(candidate, equal == elements, equal / max(elements, 1), min(worst, NAN_DISTANCE))
