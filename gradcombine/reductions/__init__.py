"""What a combination means: each function here makes a `Reduction`."""

from gradcombine.reductions.adasum import adasum
from gradcombine.reductions.checked import checked
from gradcombine.reductions.defined import elementwise
from gradcombine.reductions.derivative import differentiable
from gradcombine.reductions.extrema import max, min
from gradcombine.reductions.finite import zeroed
from gradcombine.reductions.first import first, last
from gradcombine.reductions.mean import mean
from gradcombine.reductions.metrics import measured
from gradcombine.reductions.moments import moments
from gradcombine.reductions.norms import clipped
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.product import product
from gradcombine.reductions.rows.sums import row_mean, row_sum
from gradcombine.reductions.sparse_as_dense import sparse_as_dense
from gradcombine.reductions.sum import sum

__all__ = [
    "adasum",
    "checked",
    "clipped",
    "differentiable",
    "elementwise",
    "first",
    "last",
    "max",
    "mean",
    "measured",
    "min",
    "moments",
    "per_leaf",
    "product",
    "row_mean",
    "row_sum",
    "sparse_as_dense",
    "sum",
    "zeroed",
]
