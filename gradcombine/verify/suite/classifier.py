"""The model: a small classifier of handwritten digits, its gradient in float64, and bounds of float32 errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PIXELS, HIDDEN, CLASSES = 64, 48, 10
"""Layer sizes. With 32 hidden units, XLA would unroll the loops, and compile three times as long."""

SIZES = (24, 56, 8, 24, 8, 56, 24, 8, 56, 24, 8, 56, 24, 8, 24, 56)
"""Sizes of 16 microbatches; only three different ones, as JAX compiles once for each size."""


class Batch(NamedTuple):
    """A batch of examples.

    Attributes:
      images: float32 [examples, 64], multiples of 1/16 from 0 to 1.
      labels: int32 [examples].
    """

    images: np.ndarray
    labels: np.ndarray


def load() -> Batch:
    """Loads all examples, in a fixed random order.

    References: E. Alpaydin and C. Kaynak, `Optical Recognition of Handwritten Digits
    <https://archive.ics.uci.edu/dataset/80>`_, 1998: its test set (CC BY 4.0).
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"], file["labels"]
    indices = np.random.default_rng(0).permutation(len(labels))
    return Batch((images[indices] / 16).astype(np.float32), labels[indices].astype(np.int32))


def cut(examples: Batch, sizes: Sequence[int], start: int = 0) -> Iterator[Batch]:
    """Cuts microbatches of these sizes, from example ``start`` on; wraps around after the last example."""
    for size in sizes:
        indices = np.arange(start, start + size) % len(examples.labels)
        yield Batch(examples.images[indices], examples.labels[indices])
        start += size


def join(batches: Sequence[Batch]) -> Batch:
    """Concatenates batches."""
    return Batch(*map(np.concatenate, zip(*batches, strict=True)))


def initial_parameters() -> dict[str, np.ndarray]:
    """Initial parameters of a dense classifier 64 - 48 (tanh) - 10, for both frameworks."""
    generator = np.random.default_rng(1)
    shapes = {"b1": (HIDDEN,), "b2": (CLASSES,), "w1": (PIXELS, HIDDEN), "w2": (HIDDEN, CLASSES)}
    scale = {name: shape[0] ** -0.5 if len(shape) == 2 else 0.1 for name, shape in shapes.items()}
    return {name: generator.normal(0, scale[name], shape).astype(np.float32) for name, shape in shapes.items()}


U = Fraction(1, 2**24)
"""Unit roundoff of float32: an operation rounded to nearest is off by a factor within 1 +- U."""

SMALLEST = Fraction(1, 2**126)
"""Smallest normal float32. TensorFlow and XLA flush smaller values to zero."""


def gamma(roundings: int) -> Fraction:
    """Bound of the relative error of a product of ``roundings`` factors within 1 +- U: ``n U / (1 - n U)``.

    References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, lemma 3.1.

    >>> float(gamma(1)) * 2**24
    1.0000000596046483
    """
    return roundings * U / (1 - roundings * U)


fractions = np.frompyfunc(Fraction, 1, 1)
"""Converts an array of floats to Fractions, elementwise."""


_UNITS = 2**149
"""Common denominator of all float32 numbers; arithmetic of Python's integers is much faster than of Fractions."""

_units: Any = np.frompyfunc(lambda value: int(math.ldexp(value, 149)), 1, 1)


def weighted_mean(values: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
    """``sum(w * g) / sum(w)`` in exact arithmetic, elementwise, as Fractions.

    >>> import numpy as np
    >>> weighted_mean([np.float32([0.5]), np.float32([2])], [1, 2])
    array([Fraction(3, 2)], dtype=object)
    """
    terms: Any = [_units(value) * weight for value, weight in zip(values, weights, strict=True)]
    divisor = _UNITS * sum(weights)
    quotient: Any = np.frompyfunc(lambda total: Fraction(total, divisor), 1, 1)
    return quotient(np.sum(terms, axis=0))


def rounding_bound(values: Sequence[np.ndarray], weights: Sequence[int], additions: int) -> np.ndarray:
    """Bound of the distance of a float32 weighted mean from the exact one, elementwise, as Fractions.

    Each term is rounded in the product ``w * g``, in each addition on its way to the total, and in the division:
    ``|error| <= gamma(additions + 2) * sum(w |g|) / sum(w)``, plus `SMALLEST` for every operation whose result may be
    flushed to zero. The sum of weights has to be exact, as it is for integers with a sum below 2**24.

    Args:
      values: float32 arrays.
      weights: positive integers.
      additions: maximum number of additions between a term and the total: the number of terms minus one for a chain or
        an unknown order; ceil(log2(terms)) for the canonical tree.
    """
    flushed = (2 * len(values) + 1) * SMALLEST
    return gamma(additions + 2) * weighted_mean([np.abs(value) for value in values], weights) + flushed


def share(distance: np.ndarray, bound: np.ndarray) -> float:
    """Largest ratio of a distance to its bound, at most 1 if all bounds hold; NaN counts as infinite.

    >>> import numpy as np
    >>> share(np.array([1.0, 0.0]), np.array([4.0, 0.0]))
    0.25
    """
    with np.errstate(invalid="ignore"):  # comparisons with NaN
        return max(np.ravel(np.frompyfunc(_ratio, 2, 1)(distance, bound)).tolist(), default=0.0)


def _ratio(distance: float | Fraction, bound: float | Fraction) -> float:
    if distance == 0:
        return 0.0
    if distance != distance or bound == 0:
        return float("inf")
    return float(distance) / float(bound)


_U = float(U)

ELEMENTARY = 16 * _U
"""Allowed relative error of tanh, exp and log: 8 ulp. The frameworks do not document theirs, which is a few ulp."""

_SECOND_ORDER = 1.01
"""Factor for products of two errors and for float64 rounding, which are below 2**-10 of the first-order terms."""


def analyse(parameters: dict[str, np.ndarray], batch: Batch) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Computes the mean loss of a batch and its gradient, and bounds of their float32 errors.

    Args:
      parameters: float32 ``w1`` [64, 48], ``b1`` [48], ``w2`` [48, 10], ``b2`` [10].
      batch: n examples.

    Returns:
      Two float64 dicts with the parameters' keys and ``"loss"``: the values, and the bounds.
    """
    w1, b1, w2, b2 = (parameters[name].astype(np.float64) for name in ("w1", "b1", "w2", "b2"))
    x, n = batch.images.astype(np.float64), len(batch.labels)

    hidden = np.tanh(x @ w1 + b1)
    # tanh' <= 1: tanh does not amplify errors.
    hidden_error = _gamma(PIXELS + 1) * (np.abs(x) @ np.abs(w1) + np.abs(b1)) + ELEMENTARY * np.abs(hidden)

    logits = hidden @ w2 + b2
    logits_error = _gamma(len(w2) + 1) * (np.abs(hidden) @ np.abs(w2) + np.abs(b2)) + hidden_error @ np.abs(w2)

    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    softmax, expected = np.exp(shifted - log_sum), np.eye(CLASSES)[batch.labels]
    losses = -((shifted - log_sum) * expected).sum(axis=1)
    # Absolute error of log softmax, which is the relative error of softmax: the error of the logits in the numerator
    # and in the sum, the rounding of differences, of exp, of a sum of ten, of log (at most log 10 = 2.3), and of exp.
    row_error = (
        2 * logits_error.max(axis=1, keepdims=True) + 4 * _U * np.ptp(shifted, axis=1, keepdims=True) + 8 * ELEMENTARY
    )

    slope = (softmax - expected) / n
    slope_error = (row_error * softmax + 4 * _U * (softmax + expected)) / n

    back = slope @ w2.T
    back_error = _gamma(CLASSES) * (np.abs(slope) @ np.abs(w2.T)) + slope_error @ np.abs(w2.T)
    flat, flat_error = 1 - hidden**2, 2 * np.abs(hidden) * hidden_error + 3 * _U
    inner = back * flat
    inner_error = back_error * flat + np.abs(back) * flat_error + 2 * _U * np.abs(inner)

    ones = np.ones((n, 1))
    factors = {
        "b1": (ones, 0 * ones, inner, inner_error),
        "b2": (ones, 0 * ones, slope, slope_error),
        "w1": (x, 0 * x, inner, inner_error),
        "w2": (hidden, hidden_error, slope, slope_error),
    }
    values = {"loss": losses.mean()}
    bounds = {"loss": _SECOND_ORDER * (row_error.mean() + _gamma(n + 1) * losses.mean())}
    for name, (a, a_error, b, b_error) in factors.items():
        product_error = _gamma(n) * (np.abs(a).T @ np.abs(b)) + a_error.T @ np.abs(b) + np.abs(a).T @ b_error
        values[name] = (a.T @ b).reshape(parameters[name].shape)
        bounds[name] = _SECOND_ORDER * product_error.reshape(parameters[name].shape)
    return values, bounds


def analyse_mean(
    parameters: dict[str, np.ndarray], batches: Sequence[Batch]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`analyse` for the mean over batches, weighted by their sizes, and combined in float32."""
    weights = [len(batch.labels) for batch in batches]
    values, bounds = zip(*(analyse(parameters, batch) for batch in batches), strict=True)
    rounding = _SECOND_ORDER * _gamma(len(batches) + 1)

    def mean(leaves: list[np.ndarray]) -> np.ndarray:
        return np.average(leaves, axis=0, weights=weights)

    means = {name: mean([value[name] for value in values]) for name in values[0]}
    return means, {
        name: mean([bound[name] for bound in bounds]) + rounding * mean([np.abs(value[name]) for value in values])
        for name in means
    }


def _gamma(roundings: int) -> float:
    return float(gamma(roundings))
