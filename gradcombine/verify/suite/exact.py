"""The weighted mean without rounding, and how far from it a rounded one may be."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

U = Fraction(1, 2**24)
"""The unit roundoff of float32: one operation, rounded to nearest, is off by a factor within 1 +- U."""

SMALLEST = Fraction(1, 2**126)
"""The smallest normal float32. TensorFlow and XLA flush what is below it to zero."""


def gamma(roundings: int) -> Fraction:
    """The relative error of a product of so many factors within 1 +- U: ``n U / (1 - n U)``.

    References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, lemma 3.1.

    >>> float(gamma(1)) * 2**24
    1.0000000596046483
    """
    return roundings * U / (1 - roundings * U)


def fractions(array: np.ndarray) -> np.ndarray:
    """The same numbers as an object array of Fractions."""
    flat = [Fraction(x) for x in np.asarray(array, np.float64).ravel().tolist()]
    return _objects(flat, np.shape(array))


def weighted_mean(values: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    """``sum(w * g) / sum(w)`` in exact arithmetic, elementwise, as Fractions.

    >>> import numpy as np
    >>> weighted_mean([np.float32([0.5]), np.float32([2])], [1, 2])
    array([Fraction(3, 2)], dtype=object)
    """
    total = _objects([Fraction(0)] * np.size(values[0]), np.shape(values[0]))
    for value, weight in zip(values, weights, strict=True):
        total = total + fractions(value) * weight
    return total / sum(weights)


def rounding_bound(values: Sequence[np.ndarray], weights: Sequence[int], additions: int) -> np.ndarray:
    """How far the float32 weighted mean may be from the exact one, elementwise, as Fractions.

    Each term is rounded once as the product ``w * g``, once in each addition on its way to the total, and once in the
    division: ``|error| <= gamma(additions + 2) * sum(w |g|) / sum(w)``. The sum of weights has to be exact, as that of
    integers below 2**24 is. To this comes at most `SMALLEST` for every operation whose result may be flushed to zero.

    Args:
      values, weights: the contributions: float32 arrays, and positive integers.
      additions: the most additions between a term and the total: one less than the terms for a chain, and for an
        order that is not known; ceil(log2(terms)) for the canonical tree.
    """
    flushed = (2 * len(values) + 1) * SMALLEST
    return gamma(additions + 2) * weighted_mean([np.abs(value) for value in values], weights) + flushed


def share(distance: np.ndarray, bound: np.ndarray) -> float:
    """The largest part of its bound that a distance takes up: at most 1 where all keep to it. NaN counts as infinite.

    >>> import numpy as np
    >>> share(np.array([1.0, 0.0]), np.array([4.0, 0.0]))
    0.25
    """
    parts = [_part(d, b) for d, b in zip(np.ravel(distance).tolist(), np.ravel(bound).tolist(), strict=True)]
    return max(parts, default=0.0)


def _part(distance: float | Fraction, bound: float | Fraction) -> float:
    if distance == 0:
        return 0.0
    if distance != distance or bound == 0:
        return float("inf")
    return float(distance / bound)


def _objects(flat: list[Fraction], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(flat), object)
    array[:] = flat
    return array.reshape(shape)
