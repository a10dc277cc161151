"""Minimum and maximum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Plain
from gradcombine.reductions.exact import grid
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import Array


class MaxState(TreewiseState):
    """Maxima."""


class MinState(TreewiseState):
    """Minima."""


@no_autograph
def max(*, output_dtype: Any = None) -> Reduction:
    """The elementwise maximum of all contributions of nonzero weight, as for a history of FP8 amax values.

    Args:
      output_dtype: of the result. None: the contributions' own; narrow integers are returned as 32-bit ones.

    Returns:
      A reduction of float and integer leaves. NaN in any contribution is NaN in the result. No contribution: -inf, or
      the smallest integer.

    Bits: those of one of the contributions, subnormal ones too, the same for any order and grouping, in every mode; but
    a zero result is +0, and of NaN payloads nothing is promised. Where ``output_dtype`` casts between float64 and a
    narrower float, XLA and TensorFlow flush subnormal numbers.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.max(), [np.float32([1, 5]), np.float32([3, 4])])
    array([3., 5.], dtype=float32)
    """
    settings = dtypes.Settings(None, output_dtype, "max")
    cell = Plain("max", ("float", "integer"), _lowest, _larger, settings=settings)
    return lift(cell, MaxState)


@no_autograph
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
    return _chosen(backend, a, b, lambda x, y: x > y)


def _smaller(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return _chosen(backend, a, b, lambda x, y: x < y)


def _chosen(backend: Backend, a: Array, b: Array, before: Callable[[Array, Array], Array]) -> Array:
    """What comes first; NaN where either is, and +0 for a zero: which of two stays would depend on the order."""
    left, right = _image(backend, a), _image(backend, b)
    first = before(left, right)
    chosen = backend.where(first, a, b)
    if dtypes.kind(backend.dtype(chosen)) != "float":
        return chosen
    # The image of what was chosen, but not of its bits: compilers compare those as floats, subnormal ones as zeros.
    zero = backend.where(first, left, right) == backend.full((), 0, backend.dtype(left))
    none = backend.full((), 0, backend.dtype(chosen))
    # The derivative is that of what was chosen, at 0 too.
    (chosen,) = backend.custom_derivative(
        lambda zero, x: [backend.where(zero, none, x)], lambda _, x: [x], [zero, chosen]
    )
    return backend.where(a != a, a, backend.where(b != b, b, chosen))


def _image(backend: Backend, x: Array) -> Array:
    """Integers in the order of these floats: XLA and TensorFlow compare subnormal floats as zeros.

    Integers stand for themselves, and so do NumPy's long doubles, of which no other framework has any.
    """
    dtype = backend.dtype(x)
    if dtypes.kind(dtype) != "float" or dtype.itemsize > 8:
        return x
    own = grid.of(dtype)
    bits = backend.bitcast(x, own.word)
    return backend.where(bits < 0, -(bits & own.most), bits)
