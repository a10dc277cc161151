"""Product: ``g_1 * g_2 * ...``."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcombine.autograph import no_autograph
from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.cell import Plain
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import Array


class ProductState(TreewiseState):
    """Products."""


@no_autograph
def product(dtype: Any = None, *, output_dtype: Any = None, wire_dtype: Any = None) -> Reduction:
    """The product of all contributions of nonzero weight; the weight's size does not matter.

    Args:
      dtype, output_dtype, wire_dtype: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and integer leaves. No contribution: ones.

    Bits: as for `gradcombine.reductions.sum`; replicas are always merged in the canonical tree over their ranks.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.product(), [np.float32([1, 2]), np.float32([3, 4])])
    array([3., 8.], dtype=float32)
    """
    settings = dtypes.Settings(dtype, output_dtype, "product")
    return lift(Plain("product", ("float", "integer"), _one, _multiply, settings=settings), ProductState, wire_dtype)


def _one(dtype: np.dtype) -> int:
    return 1


def _multiply(backend: Backend, a: Array, b: Array, a_empty: Array, b_empty: Array) -> Array:
    return backend.product(a, b)
