"""Tells losses of several means, each with its own denominator, from statistics of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, islice

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.verify.check.running import Floats, NotWide, Rows

POINTS = 9
"""Number of mixtures of two examples, to which at most `MEANS` + 1 coefficients are fitted."""

MEANS = 3
"""Number of means with different denominators; one less for a small batch, which has fewer mixtures."""

MOST_COUNTS = 8
"""Maximal number of counts of the examples to try as denominators."""

MOST_PAIRS = 4
"""Maximal number of pairs of examples to mix, as statistics may be linear in one of them."""

Run = Callable[[Rows], Floats]
"""Returns the result of one batch of these rows; raises if they have none."""

Near = Callable[[Floats, Floats], bool]
"""Whether two results differ by no more than rounding."""


def are_several(counts: Sequence[np.ndarray], run: Run, near: Near) -> bool:
    """Whether one batch is a sum of means that are divided by different counts of its examples.

    Of p copies of one example and q of another, with counts c and d, a mean is ``a + b * p c / (p c + q d)``. In
    general, statistics of the batch are no sum of such fractions.

    Args:
      counts: plausible counts of the examples; equal ones among them.
      run: runs one batch.
      near: compares two results.
    """
    n = len(counts[0])
    number = np.unique(np.linspace(0, n, POINTS).astype(int))
    means = MEANS if len(number) > 2 * MEANS else MEANS - 1
    distinct = [*islice((x for x in counts if x.min() >= 0 and np.ptp(x) > 0), MOST_COUNTS - 1), np.ones(n)]
    if len(number) < means + 2 or len(distinct) == 1:
        return False
    candidates, varies = [*combinations(distinct, min(means, len(distinct)))], False
    for first, second in _pairs(distinct[0]):
        try:
            results = [run((first,) * p + (second,) * (n - p)) for p in number.tolist()]
        except (NotWide, GradCombineError):
            continue
        # Copies of one example may cancel in each group of a batch, which shows nothing.
        varies |= not all(near(x, results[0]) for x in results)
        candidates = [x for x in candidates if _fits(x, number, first, second, results, near)]
        if not candidates:
            return False
    return varies


def _pairs(counts: np.ndarray) -> list[tuple[int, int]]:
    """Returns pairs of examples, first one with the largest difference of counts."""
    half = len(counts) // 2
    found = [(int(counts.argmax()), int(counts.argmin())), *((i, i + half) for i in range(half))]
    return found[:MOST_PAIRS]


def _fits(
    counts: Sequence[np.ndarray], number: np.ndarray, first: int, second: int, results: Sequence[Floats], near: Near
) -> bool:
    """Whether mixtures of two examples are a sum of means with these counts as denominators."""
    basis = [np.ones(len(number))]
    for x in counts:
        part, rest = number * x[first], (number.max() - number) * x[second]
        basis.append(np.where(number == 0, 0, part / np.where(part + rest == 0, 1, part + rest)))
    matrix = np.stack(basis, axis=1)
    projection = matrix @ np.linalg.pinv(matrix)
    fitted = [np.tensordot(projection, np.stack(x), 1) for x in zip(*results, strict=True)]
    return all(near(a, list(b)) for a, b in zip(results, zip(*fitted, strict=True), strict=True))
