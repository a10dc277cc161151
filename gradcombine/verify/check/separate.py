"""Hypotheses that a division combines the separate results of its microbatches, if they are not linear in examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from gradcombine.verify.check.case import Case, Prediction, explained, numbers, split_by
from gradcombine.verify.check.combinations import linear
from gradcombine.verify.check.leaves import flat, over, rms
from gradcombine.verify.check.moves import in_sequence
from gradcombine.verify.check.precision import narrow
from gradcombine.verify.check.running import ONE_BATCH, Floats, Rows
from gradcombine.verify.check.standard import SAME, Standard, combined
from gradcombine.verify.check.step_report import Cause


def candidate_weights(
    case: Case, pieces: Sequence[Rows], floats: Sequence[Floats], leaves: Sequence[int]
) -> list[np.ndarray]:
    """Returns plausible weights of microbatches, then those that fit the division's result in these leaves."""
    candidates = case.weights_of(pieces)
    fitted = case.standard.fit(case.result.floats, floats, case.wide, leaves)
    # Negative weights fit the signs of an optimizer's first step by chance.
    if fitted is not None and abs(fitted.sum() - 1) < SAME and fitted.min() > -SAME:
        candidates.append(fitted / fitted.sum())
    return candidates


def microbatches(case: Case, copied: bool = True) -> Iterator[Prediction]:
    """Tries the mean and the sum of the microbatches' separate results, for leaves that are no linear combination."""
    if case.all_are_means:
        return
    leaves = case.among(range(len(case.result.floats)))
    for name, pieces, floats in case.separate_results(copied):
        candidates = candidate_weights(case, pieces, floats, leaves)
        for weights in (*candidates, np.ones(len(pieces))):
            if case.accounts_for(combined(weights, floats), float(weights.sum())):
                if (cause := _of_microbatches(case, pieces, floats, weights)) is not None:
                    if cause[0] in (Cause.STATISTICS, Cause.CHANGED_BEFORE):  # rounding to 16 bits changes them, too
                        yield from narrow(case)
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
    results, leaves = [best, *floats, *(x.floats for x in standard.columns if x is not None)], _gradients(standard)
    allowed = standard.allowed(standard.wide is not None)
    seen = [i for i in leaves if best[i].size > 1 and max(rms(x[i]) for x in results) > 2 * allowed[i]]
    for some in (leaves, *([i] for i in seen)):
        if bound := clip_bound(standard, results, some):
            return Cause.CHANGED_BEFORE, f"several microbatches or examples have {bound}"
    hides = standard.subject.returns_params and not standard.observed and standard.uninformative(faults=True)
    if hides:  # beside a weight decay, the norms differ
        return Cause.CHANGED_BEFORE, f"it is the mean of the microbatches' updates, which hide {hides}"
    if weights.sum() > 1 + SAME:
        cause = Cause.CHANGED_BEFORE if standard.subject.returns_params else Cause.SUM
        return cause, "it is the sum of the microbatches' separate results"
    if np.ptp(weights) < SAME and (total := standard.total):
        return Cause.MEAN_OF_MEANS, f"the weights of the single examples' results add up to {total:.4g} in one batch"
    if (right := _weights_in_one_batch(case, pieces, floats, weights)) is not None:
        cause = Cause.MEAN_OF_MEANS if np.ptp(weights) < SAME else Cause.COEFFICIENTS
        return cause, f"they weigh from {right.min():.4g} to {right.max():.4g} in one batch"
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


def _gradients(standard: Standard) -> list[int]:
    """Leaves that are gradients at an optimizer, if it was observed: the sizes of Adam's first updates are equal."""
    return standard.observed or standard.gradients


def _weights_in_one_batch(
    case: Case, pieces: Sequence[Rows], floats: Sequence[Floats], weights: np.ndarray
) -> np.ndarray | None:
    """Weights, other than those of the division, with which one batch combines the microbatches' results.

    None if there are none, as with statistics, which couple the examples of one batch.
    """
    standard = case.standard
    wide, best, leaves = standard.wide is not None, standard.best.floats, _gradients(standard)
    fitted = standard.fit(best, floats, wide, leaves)
    for x in case.weights_of(pieces) if fitted is None else [fitted]:
        shares = standard.shares(best, combined(x, floats), wide, sides=3)[leaves]
        if abs(x.sum() - 1) < SAME and np.abs(x - weights).max() > SAME / 2 and shares.max() <= 1:
            return x
    return None


def neighbors(case: Case) -> Iterator[Prediction]:
    """Yields that examples depend on their neighbors, unless these, such as pairs, are in the same microbatch."""
    results = case.separate_results()
    if any(_weights_in_one_batch(case, pieces, x, np.zeros(len(pieces))) is not None for _, pieces, x in results):
        return
    if not case.standard.subject.returns_params:  # whose sizes an optimizer may hide
        yield from (x for x in microbatches(case) if x.cause is Cause.CHANGED_BEFORE)
    yield Prediction(Cause.NEIGHBOURS, "one batch in reverse order has another result")


# --- predictions that an explanation by design must make before it is allowed ---


def beside_statistics(case: Case, leaves: Sequence[int], seen: Sequence[int] = ()) -> Iterator[Prediction]:
    """Explains leaves that are not the mean of the microbatches' separate results, although statistics change others.

    Yields nothing if they are a state that moves at each microbatch, such as running statistics. A metric that depends
    on the order of the examples may be such a state outside of the parameters: it is not compared.

    Args:
      leaves: leaves that may differ from one batch.
      seen: leaves that show statistics of the microbatches, from which weights of the microbatches are fitted.
    """
    standard = case.standard
    count = len(standard.subject.param_leaves) if standard.subject.returns_params else 0
    others = leaves = _far(case, None, leaves)
    for _, pieces, floats in case.separate_results():
        if not others:
            return
        for weights in candidate_weights(case, pieces, floats, seen):
            predicted = combined(weights, floats)
            far = _far(case, predicted, leaves)
            moving = [i for i in far if i < count]
            if 0 < len(moving) < count:
                moves = in_sequence(case, moving, [standard.copies(rows) for rows in pieces])
                if moves is not None:
                    for i in moving:
                        predicted[i] = np.sum([x[i] for x in moves], axis=0)
                    far = _far(case, predicted, far)
            others = min(others, far, key=len)
    if not others:
        return
    names = ", ".join(standard.names[i] for i in others[:3])
    text = f"in {names}, beside statistics of the microbatches"
    for cause, detail, predicted in _of_some(case):
        if not _far(case, predicted, others):
            yield Prediction(cause, f"{detail}; {text}")
            return
    if all(i >= count and i not in standard.params for i in others) and _depends_on_order(case, others):
        standard.not_compared = f"{names}, which depends on the order of the microbatches"
        return
    x = explained(case._replace(leaves=tuple(others)), (linear,))
    yield Prediction(Cause.UNEXPLAINED, text) if x is None else x._replace(detail=f"{x.detail}; {text}")


def not_predicted(case: Case, leaves: Sequence[int]) -> str:
    """Names what an explanation by design does not predict: these leaves, or an integer that differs.

    An integer is predicted if it is a sum of the microbatches' counts, a count of calls in the state, or a random key
    (uint32) where all floats are equal.
    """
    standard, alone = case.standard, case.shares().max(initial=0) <= 1
    names, divided = [standard.names[i] for i in leaves], case.native.integers
    subject, one, more = standard.subject, standard.native, case.split.microbatches - 1
    start = [x.astype(np.int64) for x in subject.integers] if subject.returns_params else []
    for i, (name, x, y) in enumerate(zip(one.integer_names, one.integers, divided, strict=True)):
        a, b = x.astype(np.int64), y.astype(np.int64)
        counts_calls = i < len(start) and np.array_equal(b - a, more * (a - start[i]))
        is_key = alone and x.dtype == np.uint32
        if not np.all(a == b) and not is_key and not counts_calls and not _is_counted(case, i, b):
            names.append(name)
    return ", ".join(names)


def _is_counted(case: Case, index: int, total: np.ndarray) -> bool:
    """Whether an integer of the microbatches' separate results, which repeat their examples, has this sum."""
    standard = case.standard
    for pieces in case.partitions.values():
        results = [(len(rows), x.integers[index]) for rows in pieces if (x := standard.repeated(rows)) is not None]
        parts = [n * x.astype(np.int64) for n, x in results]
        if len(parts) == len(pieces) and np.array_equal(sum(parts), standard.examples * total):
            return True
    return False


def _of_some(case: Case) -> Iterator[tuple[Cause, str, Floats]]:
    """Yields the sum of the microbatches' separate results, and each of them."""
    for name, pieces, floats in case.separate_results():
        text = f"the sum of the results of the {len(pieces)} microbatches{split_by(name)}"
        yield Cause.SUM, text, combined(np.ones(len(pieces)), floats)
        for rows, result in zip(pieces, floats, strict=True):
            yield Cause.LOST, f"the result of examples {numbers(rows)} alone", result


def _far(case: Case, predicted: Floats | None, leaves: Sequence[int]) -> list[int]:
    """Returns the leaves of a division's result that differ from a prediction, or one batch, by more than rounding."""
    shares = case.shares(predicted, sides=3)
    return [i for i in leaves if shares[i] > 1]


def _depends_on_order(case: Case, leaves: Sequence[int]) -> bool:
    """Whether these leaves of a division change if the examples are reversed."""
    result = case.standard.in_reverse(case.split, case.wide)
    return result is not None and len(_far(case, result.floats, leaves)) == len(leaves)


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
        top = max(float(np.linalg.norm(x, order)) for x in vectors)
        largest = [x for x, y in zip(vectors, sizes, strict=True) if y >= top * (1 - CLOSE)]
        smallest = 0 if sizes is norms else top * (1 - CLOSE)
        for x in largest[1:] if top > 0 else ():
            compared = np.maximum(np.abs(x), np.abs(largest[0])) >= smallest
            differs = np.any(np.abs(x - largest[0])[compared] > SAME * top)
            if differs and not _is_exceeded(standard, leaves, order, top):
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

MIXED = 4
"""Number of examples to mix in pairs, as statistics may be linear in one of the pairs."""


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
    mixtures, results, example = list[np.ndarray](), list[Floats](), np.eye(n)
    for first, second in _pairs(standard, distinct[0]):
        mixed = [standard.one((first,) * p + (second,) * (n - p)) for p in number.tolist()]
        finite = [x.floats for x in mixed if x is not None]
        if len(finite) < len(mixed):
            continue
        # Copies of one example may cancel in each group of a batch, which shows nothing.
        varies |= not all(_near(standard, x, finite[0]) for x in finite)
        mixtures.append(np.outer(number, example[first]) + np.outer(n - number, example[second]))
        results += finite
        candidates = [x for x in candidates if _fits(standard, x, np.concatenate(mixtures), results)]
        if not candidates:
            return False
    return varies


def _pairs(standard: Standard, counts: np.ndarray) -> list[tuple[int, int]]:
    """Returns all pairs of a few finite examples, first one with the largest difference of counts.

    A product of means, such as of rewards and gradients, looks like a sum of means in a pair, but not in all of them.
    """
    half = len(counts) // 2
    spread = (i for pair in zip(range(half), range(half, 2 * half), strict=True) for i in pair)
    in_order = dict.fromkeys([int(counts.argmax()), int(counts.argmin()), *spread])
    finite = (i for i in in_order if standard.one((i,) * len(counts)) is not None)
    return [*combinations(islice(finite, MIXED), 2)]


def _fits(standard: Standard, counts: Sequence[np.ndarray], mixtures: np.ndarray, results: Sequence[Floats]) -> bool:
    """Whether mixtures of the examples are a sum of means with these counts as denominators."""
    basis = [np.ones((len(mixtures), 1))]
    for x in counts:
        totals = (mixtures @ x)[:, None]
        basis.append(mixtures * x / np.where(totals == 0, 1, totals))
    matrix = np.concatenate(basis, axis=1)
    projection = matrix @ np.linalg.pinv(matrix)
    fitted = [np.tensordot(projection, np.stack(x), 1) for x in zip(*results, strict=True)]
    return all(_near(standard, a, b) for a, b in zip(results, zip(*fitted, strict=True), strict=True))


def _near(standard: Standard, a: Floats, b: Floats) -> bool:
    return bool(standard.shares(a, b, standard.wide is not None, 4).max() <= 1)
