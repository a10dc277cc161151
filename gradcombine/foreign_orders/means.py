"""Means: of optax.MultiSteps, and of programs that forget weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.combine import mean
from gradcombine.errors import GradCombineError
from gradcombine.foreign_orders.leaves import by_leaf, require_dtypes, trees_of
from gradcombine.reductions import dtypes
from gradcombine.reductions.dtypes import FLOAT32
from gradcombine.reductions.sums import two_sum
from gradcombine.types import Array, Tree, no_autograph

_DTYPES = ("float16", "bfloat16", "float32")
_SPLITTER = np.float32(2**12 + 1)


@no_autograph
def welford(values: Sequence[Tree], fused: bool = True, accumulator: Any = FLOAT32) -> Tree:
    """The mean of optax.MultiSteps: ``acc = acc + (g - acc) / (n + 1)`` from ``acc = 0``, for n = 0, 1, ....

    XLA multiplies by ``1 / (n + 1)``, rounded, in place of the division, and contracts that product and the addition
    into one fused multiply-add. It divides, and fuses nothing, where a leaf has one element, and where all is bfloat16.

    Args:
      values: as for `left_chain`, of float32, bfloat16 or float16.
      fused: whether products are fused into additions, as in optax outside and inside of jit. False: they are rounded
        by themselves, as under jax.disable_jit.
      accumulator: the dtype that the mean has between two contributions, MultiSteps' ``accumulator_dtype``. The last
        step is not rounded to it. Where the contributions have the same narrow dtype, each operation is.

    Returns:
      The mean, of the contributions' dtype.

    Raises:
      GradCombineError: as `left_chain`, and for another dtype.

    Bits: those of MultiSteps with its default settings, given the gradients as arguments: where a gradient is computed
    in the same program, XLA may fuse its last product into the subtraction. Numbers beyond 2**115 or below 2**-100 are
    excepted: the fused multiply-add is computed from float32 operations, so that it is the same on every backend.

    References: optax.MultiSteps, transforms/_accumulation.py; Welford, "Note on a method for calculating corrected sums
    of squares and products", 1962.

    >>> import numpy as np
    >>> welford([np.float32([1, 2]), np.float32([4, 5])])
    array([2.5, 3.5], dtype=float32)
    """
    trees = trees_of("welford", values)
    require_dtypes("welford", trees[0], _DTYPES)
    kept = dtypes.parse(accumulator)
    if kept is None or kept.name not in _DTYPES:
        raise GradCombineError("welford", f"an accumulator of {', '.join(_DTYPES)}", accumulator)
    return by_leaf("welford", trees, partial(_welford, fused=fused, accumulator=kept))


@no_autograph
def mean_of_means(values: Sequence[Tree], ranks: int, weights: Sequence[Any] | None = None) -> Tree:
    """Each rank's weighted mean, then their unweighted mean: what a program reports that forgets the ranks' weights.

    Args:
      values: as for `left_chain`: n / ranks trees of rank 0, then those of rank 1, and so on.
      ranks: how many; the number of trees is a multiple of it.
      weights: one scalar a tree; None: all 1.

    Returns:
      The mean of means, of the contributions' dtype.

    Raises:
      GradCombineError: as `gradcombine.mean`, and for trees or weights that do not divide evenly.

    Bits: those of `gradcombine.mean`, rounded once a rank and once more.

    >>> import numpy as np
    >>> mean_of_means([np.float32([x]) for x in (1, 2, 3, 4)], ranks=2, weights=[1, 1, 3, 1])
    array([2.375], dtype=float32)
    """
    trees = trees_of("mean_of_means", values)
    if ranks < 1 or len(trees) % ranks:
        raise GradCombineError("mean_of_means", f"a multiple of {ranks} trees", len(trees))
    if weights is not None and len(weights) != len(trees):
        raise GradCombineError("mean_of_means", f"{len(trees)} weights", len(weights))
    each = len(trees) // ranks
    blocks = [slice(i, i + each) for i in range(0, len(trees), each)]
    return mean([mean(trees[block], None if weights is None else weights[block]) for block in blocks])


def _welford(backend: Backend, terms: list[Array], fused: bool, accumulator: np.dtype) -> Array:
    shape, dtype = backend.shape(terms[0]), backend.dtype(terms[0])
    running = dtype if dtype == accumulator else FLOAT32
    average = backend.full(shape, 0, accumulator)
    for n, term in enumerate(terms, start=1):
        before = backend.cast(average, running)
        difference = _subtract(backend, backend.cast(term, running), before)
        reciprocal = (1 / np.float32(n)).astype(running)
        if math.prod(shape) == 1 or running.name == "bfloat16":
            after = backend.add(before, backend.divide(difference, backend.asarray(np.asarray(n).astype(running))))
        elif fused and running == FLOAT32:
            after = multiply_add(backend, difference, reciprocal, before)
        else:
            after = backend.add(before, _times(backend, difference, reciprocal))
        average = after if n == len(terms) else backend.cast(after, accumulator)
    return backend.cast(average, dtype)


def multiply_add(backend: Backend, x: Array, factor: np.float32, y: Array) -> Array:
    """``x * factor + y``, rounded once.

    The product is split into two floats without error (Dekker, 1971), and its sum with y into three, of which the last
    decides only where the first two are a tie.
    """
    product = _times(backend, x, factor)
    x_high = _high(backend, x)
    x_low = _subtract(backend, x, x_high)
    factor_high = np.float32(factor * _SPLITTER - (factor * _SPLITTER - factor))
    error = _subtract(backend, _times(backend, x_high, factor_high), product)
    for part, scalar in ((x_high, factor - factor_high), (x_low, factor_high), (x_low, factor - factor_high)):
        error = backend.add(error, _times(backend, part, scalar))
    partial_sum, low = two_sum(backend, y, error)
    high, middle = two_sum(backend, product, partial_sum)
    middle, low = two_sum(backend, low, middle)
    rounded = backend.add(high, middle)
    left = backend.add(_subtract(backend, high, rounded), middle)
    neighbour = backend.add(rounded, backend.add(left, left))
    tie = (left != 0) & (_subtract(backend, neighbour, rounded) == backend.add(left, left))
    beyond = tie & (low != 0) & ((low > 0) == (left > 0))
    rounded = backend.where(beyond, neighbour, rounded)
    # Infinities split into NaN.
    return backend.where(rounded == rounded, rounded, backend.add(product, y))


def _high(backend: Backend, x: Array) -> Array:
    """The upper half of a float's digits (Veltkamp)."""
    wide = _times(backend, x, _SPLITTER)
    return _subtract(backend, wide, _subtract(backend, wide, x))


def _times(backend: Backend, x: Array, factor: np.float32) -> Array:
    return backend.scale(x, backend.asarray(factor))


def _subtract(backend: Backend, a: Array, b: Array) -> Array:
    return backend.add(a, -b)
