"""Minimum and maximum."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Plain
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import Array, Reduction


class MaxState(TreewiseState):
    """Maxima."""


class MinState(TreewiseState):
    """Minima."""


@ordinary
def max(*, output_dtype: Any = None) -> Reduction:
    """The elementwise maximum of all contributions of nonzero weight, as for a history of FP8 amax values.

    Args:
      output_dtype: of the result. None: the contributions' own; narrow integers are returned as 32-bit ones.

    Returns:
      A reduction of float and integer leaves. NaN in any contribution is NaN in the result. No contribution: -inf, or
      the smallest integer.

    Bits: the same for any order and grouping, in every mode; a zero result is +0, and of NaN payloads nothing is
    promised.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.max(), [np.float32([1, 5]), np.float32([3, 4])])
    array([3., 5.], dtype=float32)
    """
    settings = dtypes.Settings(None, output_dtype, "max")
    cell = Plain("max", ("float", "integer"), _lowest, _larger, settings=settings)
    return lift(cell, MaxState)


@ordinary
def min(*, output_dtype: Any = None) -> Reduction:
    """The elementwise minimum; in all else as `max`. No contribution: +inf, or the largest integer.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.min(), [np.float32([1, 5]), np.float32([3, 4])])
    array([1., 4.], dtype=float32)
    """
    settings = dtypes.Settings(None, output_dtype, "min")
    cell = Plain("min", ("float", "integer"), _highest, _smaller, settings=settings)
    return lift(cell, MinState)


def _lowest(dtype: np.dtype) -> Any:
    return -np.inf if dtypes.kind(dtype) == "float" else ml_dtypes.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    return np.inf if dtypes.kind(dtype) == "float" else ml_dtypes.iinfo(dtype).max


def _larger(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return _positive_zero(backend, backend.maximum(a, b))


def _smaller(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    # min(a, b) picks the other one than max; where they are equal, either will do.
    smaller = backend.where(a < b, a, b)
    if dtypes.kind(backend.dtype(smaller)) == "float":
        smaller = backend.where(a != a, a, smaller)
    return _positive_zero(backend, smaller)


def _positive_zero(backend: Backend, x: Array) -> Array:
    # -0 == +0, so which of them stays would depend on the order.
    zero = backend.full((), 0, backend.dtype(x))
    return backend.where(x == zero, zero, x)
