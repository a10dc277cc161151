"""Mean: ``sum(w * g) / sum(w)``."""

from __future__ import annotations

from typing import Any, Literal

from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend
from gradcombine.reductions import dtypes
from gradcombine.reductions.cell import Plain, Totals
from gradcombine.reductions.sum import add, neutral, require_precision, zero_if_empty
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import Array, Reduction


class MeanState(TreewiseState):
    """Sums of ``w * g``, not divided yet."""


@ordinary
def mean(
    precision: Literal["fast"] = "fast", dtype: Any = None, *, output_dtype: Any = None, wire_dtype: Any = None
) -> Reduction:
    """The weighted mean ``(w_1 g_1 + w_2 g_2 + ...) / (w_1 + w_2 + ...)``, divided once, after all merging.

    With the number of tokens (or examples) of each microbatch as its weight, the mean of per-token mean gradients over
    microbatches and replicas is the gradient of the full batch. A mean of means is not, where the numbers differ.

    Args:
      precision, dtype, output_dtype, wire_dtype: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and complex leaves; a mean of integers is an error. No contribution: zeros. Weights that sum
      to 0 though some are not 0 cannot be given while weights are known; traced ones divide by 0.

    Bits: as for `gradcombine.reductions.sum`, and the quotient is correctly rounded on CPU. (XLA on GPU does not divide
    correctly rounded.)

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.mean(), [np.float32([1, 2]), np.float32([4, 5])], weights=[3, 1])
    array([1.75, 2.75], dtype=float32)
    """
    require_precision("mean", precision)
    settings = dtypes.Settings(dtype, output_dtype)
    cell = Plain("mean", ("float", "complex"), neutral, add, _divided, additive=True, settings=settings)
    return lift(cell, MeanState, wire_dtype, averages=True)


def _divided(backend: Backend, total: Array, totals: Totals) -> Array:
    running = backend.dtype(total)
    working = dtypes.working(running)
    weight = backend.cast(totals.weight, dtypes.part(working))
    divisor = backend.where(totals.count == 0, backend.full((), 1, dtypes.part(working)), weight)
    quotient = backend.divide(backend.cast(total, working), divisor)
    return zero_if_empty(backend, backend.cast(quotient, running), totals)
