"""Hypotheses that a division combines the separate results of its microbatches, if they are not linear in examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from gradcombine.verify.check.case import Case, Prediction, numbers, split_by
from gradcombine.verify.check.leaves import flat, over
from gradcombine.verify.check.running import ONE_BATCH, Floats, Rows
from gradcombine.verify.check.standard import SAME, Standard, combined
from gradcombine.verify.check.step_report import Cause


def separate_results(case: Case, copied: bool = True) -> Iterator[tuple[str, list[Rows], list[Floats]]]:
    """Yields the partitions with one batch's results for their microbatches, unless one cannot run.

    Args:
      copied: as in `microbatches`.
    """
    run = case.standard.repeated if copied else case.standard.one
    for name, pieces in case.partitions.items():
        parts = [run(rows) for rows in pieces]
        floats: list[Floats] = [part.floats for part in parts if part is not None]
        if len(floats) == len(pieces):
            yield name, pieces, floats


def are_separate(case: Case, leaves: Sequence[int]) -> bool:
    """Whether those of these leaves that have to be explained are the mean of the microbatches' separate results."""
    return any(
        case.accounts_for(combined(weights, floats), 1, leaves)
        for _, pieces, floats in separate_results(case)
        for weights in weights_of(case.standard, pieces)
    )


def weights_of(standard: Standard, pieces: Sequence[Rows]) -> list[np.ndarray]:
    """Returns plausible weights of microbatches: equal ones, then the total count of each microbatch's examples."""
    counted = [np.array([x[list(rows)].sum() for rows in pieces]) for x in standard.counts()]
    return [x / x.sum() for x in [np.ones(len(pieces)), *counted] if x.min() >= 0 and x.any()]


def candidate_weights(
    case: Case, pieces: Sequence[Rows], floats: Sequence[Floats], leaves: Sequence[int] | None
) -> list[np.ndarray]:
    """Returns plausible weights of microbatches, then those that fit the division's result in these leaves."""
    candidates = weights_of(case.standard, pieces)
    fitted = case.standard.fit(case.result.floats, floats, case.wide, leaves)
    if fitted is not None and abs(fitted.sum() - 1) < SAME:
        candidates.append(fitted / fitted.sum())
    return candidates


def microbatches(case: Case, copied: bool = True) -> Iterator[Prediction]:
    """Tries the mean and the sum of one batch's results for each microbatch, for leaves that are no linear combination.

    Args:
      copied: whether a microbatch is repeated to the size of the batch, which is already compiled. If a divisor has a
        minimum, as in max(count, 1), this changes the result.
    """
    if case.all_are_means:
        return
    for name, pieces, floats in separate_results(case, copied):
        candidates = candidate_weights(case, pieces, floats, case.leaves)
        for weights in (*candidates, np.ones(len(pieces))):
            if case.accounts_for(combined(weights, floats), float(weights.sum())):
                if (cause := _of_microbatches(case, pieces, floats, weights)) is not None:
                    yield Prediction(cause[0], cause[1] + split_by(name))
                return


def _of_microbatches(
    case: Case, pieces: Sequence[Rows], floats: Sequence[Floats], weights: np.ndarray
) -> tuple[Cause, str] | None:
    """Returns the cause and the detail of a result that combines the microbatches' results with these weights."""
    standard = case.standard
    lost = [row for rows, weight in zip(pieces, weights, strict=True) if abs(weight) < SAME for row in rows]
    if lost:
        kept = tuple(row for row in range(standard.examples) if row not in lost)
        cause = Cause.NOT_EXCHANGED if kept in case.on_devices else Cause.LOST
        return cause, f"examples {numbers(lost)} are missing"
    best = standard.best.floats
    results, leaves = [best, *floats, *(x.floats for x in standard.columns if x is not None)], standard.gradients
    for some in (leaves, *([i] for i in leaves if best[i].size > 1)):
        if bound := clip_bound(standard, results, some):
            return Cause.CHANGED_BEFORE, f"several microbatches or examples have {bound}"
    if weights.sum() > 1 + SAME:
        cause = Cause.CHANGED_BEFORE if standard.subject.returns_params else Cause.SUM
        return cause, "it is the sum of the microbatches' separate results"
    if np.ptp(weights) < SAME and (total := standard.total) is not None:
        return Cause.MEAN_OF_MEANS, f"the weights of the single examples' results add up to {total:.4g} in one batch"
    if np.ptp(weights) < SAME and (right := _weights_in_one_batch(standard, pieces, floats)) is not None:
        return Cause.MEAN_OF_MEANS, f"they weigh from {right.min():.4g} to {right.max():.4g} in one batch"
    if not standard.excluded:
        return None
    low, high = weights.min(), weights.max()
    equal = "equal weights" if high - low < SAME else f"weights {low:.4g} to {high:.4g}"
    if has_denominators(standard):
        cause = Cause.MEAN_OF_MEANS if high - low < SAME else Cause.DENOMINATOR
        text = f"the microbatches have {equal}, but one batch is a sum of means with different denominators"
        return cause, f"{text}; to see which, pass terms"
    distance = over(float(np.linalg.norm(flat(case.result.floats) - flat(best))), float(np.linalg.norm(flat(best))))
    text = f"the mean of their separate results, with {equal}, is {distance:.2g} of one batch's norm away"
    return Cause.STATISTICS, text


def _weights_in_one_batch(standard: Standard, pieces: Sequence[Rows], floats: Sequence[Floats]) -> np.ndarray | None:
    """Weights, not all equal, with which one batch combines the microbatches' results.

    None if there are none, as with statistics, which couple the examples of one batch.
    """
    wide, best, leaves = standard.wide is not None, standard.best.floats, standard.gradients
    fitted = standard.fit(best, floats, wide, leaves)
    for x in weights_of(standard, pieces) if fitted is None else [fitted]:
        shares = standard.shares(best, combined(x, floats), wide, sides=3)[leaves]
        if abs(x.sum() - 1) < SAME and np.ptp(x) > SAME and shares.max() <= 1:
            return x
    return None


# --- clipping ---

CLOSE = 1e-5
"""Relative difference of sizes up to which they are the same."""


def clip_bound(standard: Standard, results: Sequence[Floats], leaves: Sequence[int]) -> str:
    """Describes the norm, or the largest element, that the largest results share although they differ; may be empty.

    The clipped elements differ between results, unlike those of a running variance, which copies change equally.
    Gradients do not exceed the bound at perturbed parameters, unlike those of a bias after batch normalization: in a
    batch of copies, their norm does not depend on the example, only on the bias.
    """
    vectors = [flat([x[i] for i in leaves]) for x in results]
    norms, maxima = [float(np.linalg.norm(x)) for x in vectors], [_repeated_maximum(np.abs(x)) for x in vectors]
    for sizes, order, text in ((norms, 2, "a norm of"), (maxima, np.inf, "a largest element of")):
        top = max(sizes)
        first, *others = [x for x, y in zip(vectors, sizes, strict=True) if y >= top * (1 - CLOSE)]
        smallest = 0 if sizes is norms else top * (1 - CLOSE)
        for x in others if top > 0 else ():
            compared = np.maximum(np.abs(x), np.abs(first)) >= smallest
            if np.any(np.abs(x - first)[compared] > SAME * top) and not _is_exceeded(standard, leaves, order, top):
                return f"{text} {top:.6g}"
    return ""


def _is_exceeded(standard: Standard, leaves: Sequence[int], order: float, bound: float) -> bool:
    """Whether a gradient of copies of an example has a larger norm at perturbed parameters; False for new ones."""
    if standard.subject.returns_params:  # which change by moments, too
        return False
    results = (standard.elsewhere(0, ONE_BATCH, rows, standard.wide is not None) for rows in standard.units)
    gradients = (flat([x.floats[i] for i in leaves]) for x in results if x is not None)
    return any(np.linalg.norm(x, order) > bound * (1 + CLOSE) for x in gradients)


def _repeated_maximum(sizes: np.ndarray) -> float:
    """Returns the maximum if several elements share it, as after clipping by value; else 0."""
    *_, second, first = np.sort(np.append(sizes, [0, 0]))
    return float(first) if second >= first * (1 - CLOSE) else 0.0


# --- means with different denominators ---

POINTS = 9
"""Number of mixtures of two examples, to which at most `MEANS` + 1 coefficients are fitted."""

MEANS = 3
"""Number of means with different denominators; one less for a small batch, which has fewer mixtures."""

MOST_COUNTS = 8
"""Maximal number of counts of the examples to try as denominators."""

MOST_PAIRS = 4
"""Maximal number of pairs of examples to mix, as statistics may be linear in one of them."""


def has_denominators(standard: Standard) -> bool:
    """Whether one batch is a sum of means that are divided by different counts of its examples.

    Of p copies of one example and q of another, with counts c and d, a mean is ``a + b * p c / (p c + q d)``. In
    general, statistics of the batch are no sum of such fractions.
    """
    n = standard.examples
    number = np.unique(np.linspace(0, n, POINTS).astype(int))
    means = MEANS if len(number) > 2 * MEANS else MEANS - 1
    distinct = [*islice((x for x in standard.counts() if x.min() >= 0 and np.ptp(x) > 0), MOST_COUNTS - 1), np.ones(n)]
    if len(number) < means + 2 or len(distinct) == 1:
        return False
    candidates, varies = [*combinations(distinct, min(means, len(distinct)))], False
    for first, second in _pairs(distinct[0]):
        mixed = [standard.one((first,) * p + (second,) * (n - p)) for p in number.tolist()]
        results = [x.floats for x in mixed if x is not None]
        if len(results) < len(mixed):
            continue
        # Copies of one example may cancel in each group of a batch, which shows nothing.
        varies |= not all(_near(standard, x, results[0]) for x in results)
        candidates = [x for x in candidates if _fits(standard, x, number, first, second, results)]
        if not candidates:
            return False
    return varies


def _pairs(counts: np.ndarray) -> list[tuple[int, int]]:
    """Returns pairs of examples, first one with the largest difference of counts."""
    half = len(counts) // 2
    found = [(int(counts.argmax()), int(counts.argmin())), *((i, i + half) for i in range(half))]
    return found[:MOST_PAIRS]


def _fits(
    standard: Standard,
    counts: Sequence[np.ndarray],
    number: np.ndarray,
    first: int,
    second: int,
    results: Sequence[Floats],
) -> bool:
    """Whether mixtures of two examples are a sum of means with these counts as denominators."""
    basis = [np.ones(len(number))]
    for x in counts:
        part, rest = number * x[first], (number.max() - number) * x[second]
        basis.append(np.where(number == 0, 0, part / np.where(part + rest == 0, 1, part + rest)))
    matrix = np.stack(basis, axis=1)
    projection = matrix @ np.linalg.pinv(matrix)
    fitted = [np.tensordot(projection, np.stack(x), 1) for x in zip(*results, strict=True)]
    return all(_near(standard, a, b) for a, b in zip(results, zip(*fitted, strict=True), strict=True))


def _near(standard: Standard, a: Floats, b: Floats) -> bool:
    return bool(standard.shares(a, b, standard.wide is not None, 4).max() <= 1)
