"""Row-sparse sum ``sum(w * g)`` and mean ``sum(w * g) / sum(w)``, of the rows that occur."""

from __future__ import annotations

from typing import Any

from gradcombine.reductions import dtypes
from gradcombine.reductions.added import over_weight, zero_if_empty
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.rows.cell import Overflow, Rows
from gradcombine.reductions.treewise import TreewiseState, lift
from gradcombine.types import no_autograph


class RowSumState(TreewiseState):
    """Rows of sums of ``w * g``."""


class RowMeanState(TreewiseState):
    """Rows of sums of ``w * g``, not divided yet."""


@no_autograph
def row_sum(
    capacity: int,
    *,
    overflow: Overflow = "error",
    dtype: Any = None,
    output_dtype: Any = None,
    wire_dtype: Any = None,
) -> Reduction:
    """The weighted sum of row-sparse gradients, held as rows: never a dense array, in a window or between replicas.

    Args:
      capacity: how many different rows a state holds, in each leaf: as many as occur in all contributions that are
        combined, over the whole window and all replicas. Memory, sorting and exchange grow with it.
      overflow: where more rows occur than that, known indices always raise before anything is lost. In compiled code
        ``"error"`` gives NaN in every value of the result; ``"check"`` adds the framework's own run-time check, as
        `checked` does for weights.
      dtype: of the accumulators. None: the contributions' own, float32 for narrower floats.
      output_dtype: of the result. None: the contributions' own.
      wire_dtype: in which replicas exchange the values. None: the accumulators' own.

    Returns:
      A reduction of trees whose leaves are float or complex `gradcombine.sparse.RowSparse`, tf.IndexedSlices, BCOO or
      None. ``init`` takes such a tree, or one of dense arrays or specs: the parameters. The result has a `RowSparse` in
      each place, with rows in ascending order, then padding: the index ``rows``, whose values are 0.

    Raises:
      GradCombineError: in ``update`` and ``merge``, besides the errors of `sum`: for a dense contribution (see
        `sparse_as_dense`), for rows of another shape, for known indices out of range (traced ones make the result NaN,
        as overflow does), and for more different rows than fit.

    Bits: the same for the same contributions in the same order, on every backend, eager and compiled. The occurrences
    of a row in one contribution are added first, in the canonical tree and the accumulator's dtype; their sum, times
    the weight, is one term of the row, and the terms are added as `sum` adds elements. Replicas are gathered, and
    merged in the tree over ranks, in either order.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> a = sparse.row_sparse(np.int32([7, 2, 7]), np.float32([[1], [2], [3]]), rows=1000)
    >>> b = sparse.row_sparse(np.int32([2]), np.float32([[5]]), rows=1000)
    >>> out = gc.combine(gc.reductions.row_sum(capacity=3), [a, b], weights=[1, 10])
    >>> out.indices.tolist(), out.values.ravel().tolist()
    ([2, 7, 1000], [52.0, 4.0, 0.0])
    """
    settings = dtypes.Settings(dtype, output_dtype, "row_sum")
    return lift(Rows("row_sum", zero_if_empty, capacity, overflow, settings), RowSumState, wire_dtype)


@no_autograph
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
    cell = Rows("row_mean", over_weight, capacity, overflow, settings)
    return lift(cell, RowMeanState, wire_dtype, scales_by_weight=True)
