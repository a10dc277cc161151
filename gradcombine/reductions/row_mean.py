"""Row-sparse mean: ``sum(w * g) / sum(w)``, of the rows that occur."""

from __future__ import annotations

from typing import Any

from gradcombine.autograph import ordinary
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.divide import over_weight
from gradcombine.reductions.rows import Overflow, Rows, RowsState


class RowMeanState(RowsState):
    """Rows of sums of ``w * g``, not divided yet."""


@ordinary
def row_mean(
    capacity: int,
    *,
    overflow: Overflow = "error",
    dtype: Any = None,
    output_dtype: Any = None,
    wire_dtype: Any = None,
) -> Reduction:
    """The weighted mean of row-sparse gradients, held as rows, and divided once, after all merging.

    Every contribution counts for every row, with 0 where it does not hold the row: the rows of the result are those of
    `mean` of the dense gradients.

    Args:
      capacity, overflow, dtype, output_dtype, wire_dtype: as for `row_sum`.

    Returns:
      A reduction as `row_sum` is; its state holds the sum of weights as well.

    Raises:
      GradCombineError: as `row_sum`.

    Bits: as for `row_sum`; the quotient is correctly rounded on CPU.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> a = sparse.row_sparse(np.int32([2]), np.float32([[4]]), rows=1000)
    >>> b = sparse.row_sparse(np.int32([7]), np.float32([[8]]), rows=1000)
    >>> out = gc.combine(gc.reductions.row_mean(capacity=2), [a, b], weights=[1, 3])
    >>> out.indices.tolist(), out.values.ravel().tolist()
    ([2, 7], [1.0, 6.0])
    """
    settings = dtypes.Settings(dtype, output_dtype, "row_mean")
    wire = dtypes.parse(wire_dtype, "row_mean")
    return Rows("row_mean", RowMeanState, capacity, settings, over_weight, overflow, wire).reduction(
        scales_by_weight=True
    )
