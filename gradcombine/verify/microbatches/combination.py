"""Which combination of a window's gradients reached the optimizer, by a rounding bound.

The exact combination is ``sum(c_i g_i)``, computed in float64. A float32 accumulator of unit roundoff u = 2**-24, in
whatever order and form (sums divided at the end, terms scaled first, Welford's running mean), is within
``gamma(2 n + 5) * sum|c_i| * max|g_i|`` of it, elementwise, with ``gamma(m) = m u / (1 - m u)``:

- a sum takes n - 1 additions and a product a term, n - 1 additions of weights, and a division: 2 n roundings;
- Welford's step ``m + (g - m) / i`` adds at most ``(4 / i + 1) u max|g|``, of which later steps leave the part i / n:
  all of them ``((n + 1) / 2 + 4) u max|g|``.

One rounding to the gradients' dtype is added if that is narrower, and 2 n + 1 times the smallest normal number for
results that are flushed to zero.

References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, sections 3.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from gradcombine.verify.candidates import Candidate
from gradcombine.verify.microbatches.subject import Leaves, Step
from gradcombine.verify.origin import explain
from gradcombine.verify.ulp import finfo, rounding_unit

FLOAT32 = np.dtype(np.float32)
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""Accumulators that are too narrow, the better one first."""

SAMPLE = 1024
"""How many elements of a leaf are used to find out how they were combined."""


class Window(NamedTuple):
    """A window's gradients, in float64, and what reached the optimizer of them.

    Attributes:
      weights: [n].
      terms: one array [n, elements] a leaf.
      reached: one array [elements] a leaf.
      output: the dtype of each leaf's gradients.
    """

    weights: np.ndarray
    terms: list[np.ndarray]
    reached: list[np.ndarray]
    output: list[np.dtype]

    @property
    def mean(self) -> np.ndarray:
        """The coefficients of the weighted mean."""
        return self.weights / self.weights.sum()


def window(steps: Sequence[Step], reached: Leaves) -> Window:
    """The leaves that have a gradient, flat; one that is None in some microbatches counts as zero there."""
    terms: list[np.ndarray] = []
    arrived: list[np.ndarray] = []
    output: list[np.dtype] = []
    for column, leaf in zip(zip(*(step.gradient for step in steps), strict=True), reached, strict=True):
        present = [x for x in column if x is not None]
        if not present or leaf is None:
            continue
        rows = [np.zeros(present[0].shape) if x is None else x.astype(np.float64) for x in column]
        terms.append(np.stack(rows).reshape(len(rows), -1))
        arrived.append(leaf.astype(np.float64).reshape(-1))
        output.append(present[0].dtype)
    return Window(np.array([step.weight for step in steps], np.float64), terms, arrived, output)


def share(window: Window, coefficients: np.ndarray, accumulator: np.dtype = FLOAT32) -> float:
    """The largest distance from a combination over its bound; infinite if what reached the optimizer is not finite."""
    worst = 0.0
    for off, bound in _distances(window, coefficients, accumulator):
        if not np.isfinite(off).all():
            return float("inf")
        worst = max(worst, float((off / bound).max(initial=0)))
    return worst


def fitted(window: Window, columns: np.ndarray) -> np.ndarray | None:
    """The combination of least squares, if rounding accounts for the whole residual.

    The residual of least squares is no longer than that of the true combination, which is no longer than the bound.

    Args:
      columns: [n, m]: the combination is ``columns @ x``, and x is fitted.

    Returns:
      The coefficients [n]; None where no such combination reached the optimizer, where the fit is not determined, and
      where rounding accounts for the distance from the mean, as a whole, just as well.
    """
    matrix = np.concatenate([(columns.T @ terms).T for terms in window.terms])
    reached = np.concatenate(window.reached)
    if not np.isfinite(reached).all() or len(reached) <= columns.shape[1]:
        return None
    x, _, rank, _ = np.linalg.lstsq(matrix, reached, rcond=None)
    coefficients = columns @ x
    accounted = rank == columns.shape[1] and _within(window, coefficients) and not _within(window, window.mean)
    return coefficients if accounted else None


def _within(window: Window, coefficients: np.ndarray) -> bool:
    """Whether the distance from a combination, as a vector, is no longer than its bound."""
    pairs = _distances(window, coefficients, FLOAT32)
    return sum(float(off @ off - bound @ bound) for off, bound in pairs) <= 0


def explained(samples: Sequence[Window]) -> Candidate | None:
    """The order and narrow precision that give what reached the optimizer in all samples, to the bit, if one does.

    Args:
      samples: of one accumulation, with the same weights.
    """
    columns: list[list[np.ndarray]] = [[] for _ in samples[0].weights]
    arrived: list[np.ndarray] = []
    for terms, reached, output in _leaves(samples):
        arrived.append(reached[:SAMPLE].astype(output))
        for column, term in zip(columns, terms, strict=True):
            column.append(term[:SAMPLE].astype(output))
    matches = explain(columns, arrived, samples[0].weights.tolist(), ranks=()).matches
    accumulators = {verdict.candidate.accumulator for verdict in matches}
    return matches[0].candidate if accumulators and accumulators <= set(map(str, NARROW)) else None


def telling(samples: Sequence[Window]) -> int:
    """How many elements tell a narrow accumulator from a wide one: their exact mean is in neither narrow dtype."""
    count = 0
    for terms, _, _ in _leaves(samples):
        exact = samples[0].mean @ terms[:, :SAMPLE]
        count += int(np.count_nonzero(np.all([exact.astype(narrow) != exact for narrow in NARROW], axis=0)))
    return count


def adds_up(window: Window, parts: Sequence[Window]) -> bool:
    """Whether the parts' sum is what reached the optimizer, up to the rounding of each."""
    bounds = [bound for _, bound in _distances(window, window.mean, FLOAT32)]
    columns = zip(window.reached, *(part.reached for part in parts), strict=True)
    return all(
        bool((np.abs(whole - sum(each)) <= (1 + len(parts)) * bound).all())
        for (whole, *each), bound in zip(columns, bounds, strict=True)
    )


def _leaves(samples: Sequence[Window]) -> Iterator[tuple[np.ndarray, np.ndarray, np.dtype]]:
    for sample in samples:
        yield from zip(sample.terms, sample.reached, sample.output, strict=True)


def _distances(window: Window, coefficients: np.ndarray, accumulator: np.dtype) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    roundings = 2 * len(window.weights) + 5
    for terms, reached, output in zip(window.terms, window.reached, window.output, strict=True):
        # A gradient that is wider than float32 has an accumulator of its own dtype.
        used = output if accumulator == FLOAT32 and rounding_unit(output) < rounding_unit(accumulator) else accumulator
        exact = coefficients @ terms
        bound = gamma(roundings, rounding_unit(used)) * np.abs(coefficients).sum() * np.abs(terms).max(axis=0)
        if rounding_unit(output) > rounding_unit(used):
            bound = bound * (1 + rounding_unit(output)) + rounding_unit(output) * np.abs(exact)
        smallest = max(float(finfo(x).smallest_normal) for x in (output, used))
        pairs.append((np.abs(reached - exact), bound + roundings * smallest))
    return pairs


def gamma(roundings: int, unit: float) -> float:
    """By how much so many roundings change a number, at most, relative to it."""
    return roundings * unit / (1 - roundings * unit)
