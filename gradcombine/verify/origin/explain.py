"""Tries every candidate on a result, and says which one it was, or how near each comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.types import Tree
from gradcombine.verify.origin.candidates import Candidate, candidates
from gradcombine.verify.ulp import NAN_DISTANCE, ulp_distance

LISTED = 8
"""How many candidates are named where several give the result."""


class Verdict(NamedTuple):
    """How near one candidate comes.

    Attributes:
      candidate: what was tried.
      equal: whether every bit of the result is the candidate's.
      share: of the telling elements, those that have the candidate's bits.
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
      elements: how many tell candidates apart: those of all other leaves.
      uninformative: the leaves that every candidate gives, such as zeros: they say nothing.
    """

    verdicts: tuple[Verdict, ...]
    elements: int
    uninformative: tuple[str, ...] = ()

    @property
    def matches(self) -> tuple[Verdict, ...]:
        """The candidates that give the result to the bit; none where that says nothing, since all of them do."""
        return tuple(verdict for verdict in self.verdicts if verdict.equal and self.elements)

    def __str__(self) -> str:
        found = self.matches
        if not self.elements:
            return f"all {len(self.verdicts)} known ways give this result: it does not tell which one made it"
        if found:
            lines = [f"the result is, to the bit: {found[0].candidate}"]
            lines += [f"  as well as: {verdict.candidate}" for verdict in found[1:LISTED]]
            lines += [f"  and {len(found) - LISTED} more"] if len(found) > LISTED else []
        else:
            nearest = self.verdicts[0]
            lines = [
                f"no known order gives this result; the nearest is: {nearest.candidate} "
                f"({nearest.share:.1%} of the elements equal, the largest distance {nearest.max_ulp:,} ulp)"
            ]
        if self.uninformative:
            lines.append(f"  these leaves say nothing, since all candidates give them: {_listed(self.uninformative)}")
        return "\n".join(lines)


def explain(
    contributions: Sequence[Tree],
    result: Tree,
    weights: Sequence[float] | None = None,
    *,
    ranks: Sequence[int] | None = None,
    progress: Callable[[int, str], None] = lambda tried, name: None,
) -> Explanation:
    """Finds the order of additions, the precision and the scaling that made a result of its contributions.

    Tried are: left chains, the canonical tree, TensorFlow's AddN, rings, psum and hierarchical copies over several
    numbers of ranks, Welford's mean (optax.MultiSteps) and means of means; with accumulators of float32, bfloat16,
    float16 and float64, compensated and exact; as a sum, or a mean that divides, multiplies by the reciprocal, or
    scales each contribution first; with the weights, and without them.

    Args:
      contributions: trees of float arrays (float8 and float64 too), of any framework, in the order of their numbers.
      result: the tree that was made of them, of the same structure. It may be narrower than the contributions.
      weights: one a contribution, if there were any.
      ranks: the numbers of replicas that may have shared the contributions; None: all that divide their number.
      progress: called before each candidate, with how many have been tried and its name.

    Returns:
      An `Explanation`, which prints as a sentence. Several candidates match where the contributions cannot tell them
      apart, as small integers cannot; a thousand elements of real gradients can. What all candidates give, zeros for
      instance, says nothing: such leaves are named, and a result of nothing else matches none.

    Raises:
      GradCombineError: for an empty list, trees without an element, trees that do not match, leaves that are no floats,
        and wrong weights.

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
    sizes = [0 if x is None else x.size for x in wanted]
    if not sum(sizes):
        raise GradCombineError("explain", "one element or more in the result", "none")
    if ranks is None:
        ranks = [number for number in range(2, len(trees) + 1) if len(trees) % number == 0]
    found: list[tuple[Candidate, list[_Leaf]]] = []
    for tried, candidate in enumerate(candidates(trees, weights, ranks)):
        progress(tried, str(candidate))
        found.append((candidate, _judged(candidate, structure, wanted)))
    telling = [any(leaves[i].equal < size for _, leaves in found) for i, size in enumerate(sizes)]
    elements = sum(size for size, tells in zip(sizes, telling, strict=True) if tells)
    verdicts = [_verdict(candidate, [*compress(leaves, telling)], elements) for candidate, leaves in found]
    verdicts.sort(key=lambda verdict: (not verdict.equal, -verdict.share, verdict.max_ulp))
    silent = [path for path, size, tells in zip(structure.paths(), sizes, telling, strict=True) if size and not tells]
    return Explanation(tuple(verdicts), elements, tuple(silent))


def _numpy(value: Tree) -> Tree:
    leaves, structure = tree.flatten("explain", value)
    arrays = [None if is_absent(x) else np.asarray(x) for x in leaves]
    for array, path in zip(arrays, structure.paths(), strict=True):
        if array is not None and (dtypes.kind(array.dtype) != "float" or array.dtype.itemsize > 8):
            raise GradCombineError("explain", "a float array of 64 bits at most", array.dtype, path)
    return tree.unflatten(structure, arrays)


def _require_alike(structure: tree.Structure, wanted: Sequence[Any], value: Tree) -> None:
    for x, expected, path in zip(tree.flatten_as("explain", structure, value), wanted, structure.paths(), strict=True):
        shapes = [None if side is None else side.shape for side in (expected, x)]
        if shapes[0] != shapes[1]:
            raise GradCombineError("explain", f"the result's shape, {shapes[0]}", shapes[1], path)


class _Leaf(NamedTuple):
    """How many elements of a leaf have a candidate's bits, and how far away the worst is."""

    equal: int
    max_ulp: int


def _judged(candidate: Candidate, structure: tree.Structure, wanted: Sequence[Any]) -> list[_Leaf]:
    with np.errstate(all="ignore"):
        made = tree.flatten_as("explain", structure, candidate.run())
    found = []
    for x, expected in zip(made, wanted, strict=True):
        if expected is None:
            found.append(_Leaf(0, 0))
            continue
        with np.errstate(all="ignore"):
            own = np.asarray(x).astype(expected.dtype)
        distances = ulp_distance(own, expected)
        # The signs of zeros are bits, though no distance; NaN is NaN, whatever its payload.
        same = (distances == 0) & ((np.signbit(own) == np.signbit(expected)) | np.isnan(expected))
        found.append(_Leaf(int(np.count_nonzero(same)), int(distances.max(initial=0))))
    return found


def _verdict(candidate: Candidate, leaves: Sequence[_Leaf], elements: int) -> Verdict:
    equal = sum(leaf.equal for leaf in leaves)
    worst = max((leaf.max_ulp for leaf in leaves), default=0)
    return Verdict(candidate, equal == elements, equal / max(elements, 1), min(worst, NAN_DISTANCE))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(name or "(root)" for name in names[:LISTED]) + more
