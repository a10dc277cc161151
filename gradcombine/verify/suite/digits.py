"""scikit-learn's bundled digits: 1797 images of 8 x 8 pixels, cut into microbatches of different sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits

PIXELS, HIDDEN, CLASSES = 64, 32, 10

SIZES = (24, 56, 8, 40, 16, 56, 32, 8, 40, 24, 16, 56, 8, 32, 24, 40)
"""The sizes of 16 microbatches: few different ones, since JAX compiles once for each."""


class Batch(NamedTuple):
    """Examples.

    Attributes:
      images: float32 [examples, 64], in sixteenths from 0 to 1.
      labels: int32 [examples].
    """

    images: np.ndarray
    labels: np.ndarray


def load() -> Batch:
    """All examples, in an order that is always the same."""
    images, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(labels))
    return Batch((images[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int32))


def cut(examples: Batch, sizes: Sequence[int], start: int = 0) -> Iterator[Batch]:
    """One microbatch after another, from the example ``start`` on; the first example follows the last."""
    for size in sizes:
        chosen = np.arange(start, start + size) % len(examples.labels)
        yield Batch(examples.images[chosen], examples.labels[chosen])
        start += size


def join(batches: Sequence[Batch]) -> Batch:
    """Several batches as one."""
    return Batch(*map(np.concatenate, zip(*batches, strict=True)))


def initial_parameters() -> dict[str, np.ndarray]:
    """The weights that both frameworks start from: a dense classifier 64 - 32 (tanh) - 10."""
    generator = np.random.default_rng(1)
    shapes = {"b1": (HIDDEN,), "b2": (CLASSES,), "w1": (PIXELS, HIDDEN), "w2": (HIDDEN, CLASSES)}
    scale = {name: shape[0] ** -0.5 if len(shape) == 2 else 0.1 for name, shape in shapes.items()}
    return {name: generator.normal(0, scale[name], shape).astype(np.float32) for name, shape in shapes.items()}
