"""Any reduction, over row-sparse contributions made dense."""

from __future__ import annotations

from typing import Any

from gradcombine import tree
from gradcombine.autograph import no_autograph
from gradcombine.backends.registry import resolve
from gradcombine.errors import GradCombineError
from gradcombine.reductions.accumulator import shape_of
from gradcombine.reductions.algebra import Reduction, on_contributions, require_reduction
from gradcombine.reductions.rows.dense import densify
from gradcombine.reductions.rows.leaf import is_row_sparse, row_slices
from gradcombine.types import Tree


@no_autograph
def sparse_as_dense(reduction: Reduction) -> Reduction:
    """The same reduction, which takes row-sparse contributions as the dense arrays that they stand for.

    For sums of sparse and dense contributions, and where so many rows occur that a dense state is smaller. The result
    is dense, as that of tf.AggregationMethod is for mixed terms. A list of both kinds is made dense beforehand:
    ``combine(reduction, map(sparse.densify, values))``.

    Args:
      reduction: any reduction of arrays.

    Returns:
      A reduction with the same states, whose ``init`` and ``update`` make every `gradcombine.sparse.RowSparse`,
      tf.IndexedSlices and BCOO dense.

    Bits: those of the reduction over `gradcombine.sparse.to_dense` of the contributions.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine import sparse
    >>> mean = gc.reductions.sparse_as_dense(gc.reductions.mean())
    >>> acc = gc.accumulate(mean, every=2)
    >>> state = acc.init(np.zeros((2, 1), np.float32))
    >>> state = acc.update(sparse.row_sparse(np.int32([1, 1]), np.float32([[4], [2]]), rows=2), state)
    >>> state = acc.update(np.float32([[1], [2]]), state)
    >>> acc.value(state)
    array([[0.5],
           [4. ]], dtype=float32)
    """
    require_reduction("sparse_as_dense", reduction)

    @no_autograph
    def dense_like(like: Tree) -> Tree:
        leaves, structure = tree.flatten(reduction.name, like, is_row_sparse)
        return tree.unflatten(structure, map(_whole, leaves))

    return on_contributions(reduction, lambda value, weight: (densify(value), weight), dense_like)


def _whole(leaf: Any) -> Any:
    """A dense array like a row-sparse one, which may be of specs; any other leaf itself."""
    slices = row_slices(leaf)
    if slices is None:
        return leaf
    if slices.rows is None:
        raise GradCombineError("sparse_as_dense", "a known number of rows", "a dense_shape that is not static")
    backend = resolve("sparse_as_dense", [slices.values])
    shape = (slices.rows, *shape_of("sparse_as_dense", slices.values, "")[1:])
    return backend.full(shape, 0, backend.dtype(slices.values), [slices.values])
