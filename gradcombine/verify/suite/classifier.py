"""The model: a linear classifier of handwritten digits, its gradient in float64, and bounds of float32 errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

PIXELS, CLASSES = 64, 10
SHAPES = {"b": (CLASSES,), "w": (PIXELS, CLASSES)}

SIZES = (24, 56, 8, 24, 8, 56, 24, 8, 56, 24, 8, 56, 24, 8, 24, 56)
"""Sizes of 16 microbatches; only three different ones, as JAX compiles once for each size."""

Arrays: TypeAlias = dict[str, np.ndarray]
"""Parameters, or a gradient and its ``"loss"``."""


class Batch(NamedTuple):
    """A batch of examples.

    Attributes:
      images: float32 [examples, 64], multiples of 1/16 from 0 to 1.
      targets: float32 [examples, 10], 1 for an example's class and 0 for the others.
    """

    images: np.ndarray
    targets: np.ndarray


def batches(sizes: Sequence[int]) -> list[Batch]:
    """Cuts batches of these sizes from the first examples, which are in a fixed random order.

    References: E. Alpaydin and C. Kaynak, `Optical Recognition of Handwritten Digits
    <https://archive.ics.uci.edu/dataset/80>`_, 1998: its test set (CC BY 4.0).
    """
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        indices = np.random.default_rng(0).permutation(len(file["labels"]))[: sum(sizes)]
        images, labels = file["images"][indices], file["labels"][indices]
    parts = np.split((images / 16).astype(np.float32), np.cumsum(sizes)[:-1])
    targets = np.split(np.eye(CLASSES, dtype=np.float32)[labels], np.cumsum(sizes)[:-1])
    return list(map(Batch, parts, targets))


def initial_parameters() -> Arrays:
    """Initial parameters of all frameworks, float32."""
    generator = np.random.default_rng(1)
    return {name: generator.normal(0, 0.1, shape).astype(np.float32) for name, shape in SHAPES.items()}


def gamma(roundings: int) -> float:
    """Bound of the relative error of a product of ``n = roundings`` factors within 1 +- u: ``n u / (1 - n u)``.

    References: N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd ed., 2002, lemma 3.1; u = 2**-24.

    >>> gamma(1) * 2**24
    1.0000000596046483
    """
    return roundings * 2.0**-24 / (1 - roundings * 2.0**-24)


SMALLEST = 2.0**-126
"""Smallest normal float32. TensorFlow and XLA flush smaller values to zero."""

SECOND_ORDER = 1.01
"""Factor for products of two errors and for float64 rounding, which are below 2**-10 of the first-order terms."""


def weighted_mean(values: Sequence[Arrays], weights: Sequence[int], additions: int) -> tuple[Arrays, Arrays]:
    """The weighted mean ``sum(w g) / sum(w)`` in float64, and a bound of the error of its computation in float32.

    Each term is rounded in the product ``w g``, in each addition on its way to the total, and in the division:
    ``|error| <= gamma(additions + 2) sum(w |g|) / sum(w)``, plus `SMALLEST` for every operation whose result may be
    flushed to zero. The bound includes the rounding of float64, below ``2**-44 sum(w |g|) / sum(w)``.

    Args:
      values: dicts of arrays with the same keys.
      weights: positive integers, with a sum below 2**24.
      additions: maximum number of additions between a term and the total: the number of terms minus one for a chain or
        an unknown order; ceil(log2(terms)) for the canonical tree.

    >>> import numpy as np
    >>> mean, bound = weighted_mean([{"w": np.float32([0.5])}, {"w": np.float32([2])}], [1, 2], additions=1)
    >>> print(mean["w"], np.round(bound["w"] * 2**24, 4))
    [1.5] [4.5]
    """
    rounding, flushed = (1 + 2.0**-20) * gamma(additions + 2), (2 * len(values) + 1) * SMALLEST
    columns = {name: np.array([value[name] for value in values], np.float64) for name in values[0]}
    mean = {name: np.average(column, axis=0, weights=weights) for name, column in columns.items()}
    sizes = {name: np.average(np.abs(column), axis=0, weights=weights) for name, column in columns.items()}
    return mean, {name: rounding * size + flushed for name, size in sizes.items()}


def share(result: Mapping[str, np.ndarray], expected: Arrays, bound: Arrays) -> float:
    """Largest error of an element divided by its bound: at most 1 if all bounds hold, infinite for NaN.

    >>> import numpy as np
    >>> share({"w": np.float32([2, 0])}, {"w": np.zeros(2)}, {"w": np.array([4, 0])})
    0.5
    """
    shares: list[float] = []
    for name, exact in expected.items():
        with np.errstate(all="ignore"):
            error = np.abs(result[name] - np.float64(exact))
            ratio = np.where(error == 0, 0, error / bound[name])
        shares.append(float(np.where(np.isnan(ratio), np.inf, ratio).max()))
    return max(shares)


def analyse(parameters: Arrays, batch: Batch) -> tuple[Arrays, Arrays]:
    """Computes the gradient and the loss of a batch, and bounds of their float32 errors, in float64.

    The loss is half the squared distance of ``x w + b`` from the targets, averaged over the examples.
    """
    w, b, x, y = (array.astype(np.float64) for array in (parameters["w"], parameters["b"], *batch))
    n = len(x)

    residual = x @ w + b - y
    residual_error = gamma(PIXELS + 2) * (x @ np.abs(w) + np.abs(b) + y)
    loss = (residual**2).sum() / (2 * n)
    loss_error = ((2 * np.abs(residual) + residual_error) * residual_error).sum() / (2 * n)

    # Four roundings of the factors of the residual, among them 1 / n, and one in each addition over the examples.
    slope, slope_error = residual / n, (residual_error + gamma(n + 4) * np.abs(residual)) / n
    values = {"b": slope.sum(axis=0), "loss": loss, "w": x.T @ slope}
    bounds = {"b": slope_error.sum(axis=0), "loss": loss_error + gamma(y.size + 3) * loss, "w": x.T @ slope_error}
    return values, {name: SECOND_ORDER * bound for name, bound in bounds.items()}


def analyse_mean(parameters: Arrays, parts: Sequence[Batch]) -> tuple[Arrays, Arrays]:
    """`analyse` for the mean over batches, weighted by their sizes, and combined in float32 in any order."""
    values, errors = zip(*(analyse(parameters, batch) for batch in parts), strict=True)
    sizes = [len(batch.images) for batch in parts]
    mean, rounding = weighted_mean(values, sizes, len(parts) - 1)
    error, _ = weighted_mean(errors, sizes, 0)
    return mean, {name: error[name] + SECOND_ORDER * rounding[name] for name in mean}
