"""Mean: ``sum(w * g) / sum(w)``."""

from __future__ import annotations

from typing import Any

from gradcombine.autograph import no_autograph
from gradcombine.reductions import dtypes
from gradcombine.reductions.added import Added
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.compensated import Compensated
from gradcombine.reductions.divide import over_weight
from gradcombine.reductions.exact.cell import Exact
from gradcombine.reductions.sum import (
    Precision,
    add,
    neutral,
    require_max_terms,
    require_no_accumulator_dtype,
    require_precision,
)
from gradcombine.reductions.treewise import TreewiseState, lift


class MeanState(TreewiseState):
    """Sums of ``w * g``, not divided yet."""


class CompensatedMeanState(TreewiseState):
    """Pairs that sum to those of ``w * g``, not divided yet."""


class ExactMeanState(TreewiseState):
    """Digits of sums of ``w * g``, not divided yet."""


@no_autograph
def mean(
    precision: Precision = "fast",
    dtype: Any = None,
    *,
    output_dtype: Any = None,
    wire_dtype: Any = None,
    max_terms: int = 4096,
) -> Reduction:
    """The weighted mean ``(w_1 g_1 + w_2 g_2 + ...) / (w_1 + w_2 + ...)``, divided once, after all merging.

    With the number of tokens (or examples) of each microbatch as its weight, the mean of per-token mean gradients over
    microbatches and replicas is the gradient of the full batch. A mean of means is not, where the numbers differ.

    Args:
      precision, dtype, output_dtype, wire_dtype, max_terms: as for `gradcombine.reductions.sum`.

    Returns:
      A reduction of float and complex leaves; a mean of integers is an error. No contribution: zeros. NaN where
      the sum of weights is not a finite number in the range of the accumulator (of precision ``"exact"``, where a
      weight is not); traced weights that are negative, infinite or NaN make it NaN as well.

    Bits: as for `gradcombine.reductions.sum`, and the quotient is correctly rounded on CPU. (XLA on GPU does not divide
    correctly rounded.)

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.mean(), [np.float32([1, 2]), np.float32([4, 5])], weights=[3, 1])
    array([1.75, 2.75], dtype=float32)
    """
    require_precision("mean", precision)
    settings = dtypes.Settings(dtype, output_dtype, "mean")
    if precision == "compensated":
        return lift(
            Compensated("mean", settings, divides=True), CompensatedMeanState, wire_dtype, scales_by_weight=True
        )
    if precision == "exact":
        require_no_accumulator_dtype("mean", dtype, wire_dtype)
        cell = Exact("mean", settings, divides=True, many=require_max_terms("mean", max_terms))
        return lift(cell, ExactMeanState, scales_by_weight=True, derivative=mean(output_dtype=output_dtype))
    cell = Added("mean", ("float", "complex"), neutral, add, over_weight, settings=settings)
    return lift(cell, MeanState, wire_dtype, scales_by_weight=True)
