"""The promise of each row of the report, whether it holds, and a fault that breaks it.

Of the combine, bits or a rounding bound. The frameworks' kernels (matmul, tanh, softmax) add in orders of their own, so
of gradients no bits are promised: the bounds are those of `problem`: two float32 computations of one gradient are as
far apart as both their errors at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine.types import Tree
from gradcombine.verify.compare.ulp import equal_bits, ulp_distance
from gradcombine.verify.suite import digits as problem
from gradcombine.verify.suite import places
from gradcombine.verify.suite.digits import Batch, analyse, analyse_mean
from gradcombine.verify.suite.outcomes import BITS, BOUND, DIFFERS, Finding
from gradcombine.verify.suite.places import Case, Contributions


def promised(case: Case) -> str:
    """`BITS` or `BOUND`.

    The canonical tree gives the same bits in every mode, in every place and for every number of replicas; so does the
    sequential order where nothing is exchanged. The sequential order over replicas is the order of the framework's own
    all-reduce, which promises none. The list in NumPy is the reference itself, held against the exact value alone.
    """
    if case.framework == "numpy":
        return BOUND if case.place == places.LIST else BITS
    over_replicas = case.place in (places.REPLICAS, places.TIME_AND_REPLICAS)
    return BOUND if case.order == "sequential" and over_replicas else BITS


class Expected(NamedTuple):
    """Expected results of some contributions in some order, leaf by leaf.

    Attributes:
      reference: NumPy's list.
      means, bounds: object arrays of Fractions: the exact weighted mean, and how far rounding may lead from it.
      shares: how much of its bound each result took up that was measured already, by its bytes.
    """

    reference: Tree
    means: Tree
    bounds: Tree
    shares: dict[bytes, float]


class Judge:
    """Measures rows against NumPy's list of the same contributions in the same order, and against the exact mean.

    Args:
      contributions: all of them, uncorrupted.
    """

    def __init__(self, contributions: Contributions) -> None:
        self._contributions = contributions
        self._kept: dict[tuple[int, str], Expected] = {}

    def finding(self, case: Case, results: list[Tree]) -> Finding:
        """Judges the results of a row over all of its replicas: the worst counts."""
        expected = self._expected(case)
        pairs = [(result[name], leaf) for result in results for name, leaf in expected.reference.items()]
        equal = all(equal_bits(a, b) for a, b in pairs)
        share = max(_part_of_bound(expected, result) for result in results)
        promise = promised(case)
        labels = {label: value for label, value in case._asdict().items() if label != "run"}
        holds = share <= 1 and (equal or promise == BOUND)
        return Finding("combine", labels, promise, holds, *distances(pairs), share, equal)

    def _expected(self, case: Case) -> Expected:
        contributions = case.contributions(self._contributions)
        count = len(contributions.weights)
        if (count, case.order) not in self._kept:
            reference = places.over_list(*contributions, case.order)
            additions = count - 1 if case.order == "sequential" else (count - 1).bit_length()
            columns = {name: [value[name] for value in contributions.values] for name in reference}
            means = {name: problem.weighted_mean(column, contributions.weights) for name, column in columns.items()}
            bounds = {
                name: problem.rounding_bound(column, contributions.weights, additions)
                for name, column in columns.items()
            }
            self._kept[count, case.order] = Expected(reference, means, bounds, {})
        return self._kept[count, case.order]


def distances(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[int, float]:
    """The largest distance of any leaf from its reference: in ulp, and relative to the leaf's largest magnitude."""
    with np.errstate(all="ignore"):
        relative = [float(np.abs(np.float64(a) - b).max() / (np.abs(b).max() or 1)) for a, b in pairs]
    return max(int(ulp_distance(a, b).max()) for a, b in pairs), max(relative)


def flip_lowest_bit(case: Case, contributions: Contributions) -> Contributions:
    """The contributions of a case with the lowest mantissa bit of one element of the first one flipped.

    The combine rounds, and may round the flipped bit away: the element is one where it does not.
    """
    first = {name: np.asarray(leaf) for name, leaf in contributions.values[0].items()}
    flipped = {name: (leaf.view(np.uint32) ^ np.uint32(1)).view(np.float32) for name, leaf in first.items()}
    before = places.over_list(*contributions, case.order)
    after = places.over_list([flipped, *contributions.values[1:]], contributions.weights, case.order)
    for name, leaf in first.items():
        seen = np.argwhere(before[name] != after[name])
        if len(seen):
            chosen = tuple(seen[0])
            corrupted = leaf.copy()
            corrupted[chosen] = flipped[name][chosen]
            return Contributions([first | {name: corrupted}, *contributions.values[1:]], contributions.weights)
    raise AssertionError("no element shows a flipped bit")


def _part_of_bound(expected: Expected, result: Tree) -> float:
    key = b"".join(result[name].tobytes() for name in expected.means)
    if key not in expected.shares:
        expected.shares[key] = max(
            problem.share(_off(result[name], mean), expected.bounds[name]) for name, mean in expected.means.items()
        )
    return expected.shares[key]


def _off(result: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The distance from the exact mean, as Fractions; infinite where the result is not finite."""
    if not np.isfinite(result).all():
        return np.full(mean.shape, np.inf)
    return np.abs(problem.fractions(result) - mean)


Gradients = dict[str, np.ndarray]
Measure = Callable[[Gradients, Batch], Gradients]
"""From NumPy parameters and a batch to the loss and its gradient by one framework, as NumPy arrays."""


def contributions(measure: Measure, parameters: Gradients, batches: Sequence[Batch]) -> Contributions:
    """The microbatches' gradients, weighted by the number of examples."""
    return Contributions([measure(parameters, batch) for batch in batches], [len(batch.labels) for batch in batches])


def full_batch(
    framework: str, measure: Measure, contributions: Contributions, parameters: Gradients, batches: Sequence[Batch]
) -> Iterator[Finding]:
    """The weighted mean equals the full batch's gradient up to rounding; a mean of means does not."""
    whole = problem.join(batches)
    reference = measure(parameters, whole)
    _, mean_bounds = analyse_mean(parameters, batches)
    _, bounds = analyse(parameters, whole)
    allowed = {name: bounds[name] + mean_bounds[name] for name in bounds}
    for combined, weights in (("weighted mean", contributions.weights), ("mean of means", None)):
        result = gc.mean(contributions.values, weights=weights)
        pairs = [(result[name], leaf) for name, leaf in reference.items()]
        share = max(_share(result[name], leaf, allowed[name]) for name, leaf in reference.items())
        within = weights is not None
        yield Finding(
            "full batch",
            {"framework": framework, "combined": combined},
            BOUND if within else DIFFERS,
            (share <= 1) == within,
            *distances(pairs),
            share,
        )


def kernels(jax: Gradients, tensorflow: Gradients, parameters: Gradients, batch: Batch) -> Iterator[Finding]:
    """How far the two frameworks' gradients of one batch are apart, leaf by leaf."""
    _, bounds = analyse(parameters, batch)
    for name in sorted(bounds):
        a, b = jax[name], tensorflow[name]
        share = _share(a, b, 2 * bounds[name])
        labels: dict[str, Any] = {"leaf": name, "shape": "x".join(map(str, a.shape)) or "scalar"}
        yield Finding("kernels", labels, BOUND, share <= 1, *distances([(a, b)]), share, equal_bits(a, b))


def _share(a: np.ndarray, b: np.ndarray, allowed: np.ndarray) -> float:
    return problem.share(np.abs(np.float64(a) - b), allowed)
