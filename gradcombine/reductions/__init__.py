"""Functions that make reductions, which define how gradients are combined."""

import inspect

from gradcombine.reductions.adasum import adasum
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.beside import differentiable, measured
from gradcombine.reductions.elementwise import elementwise
from gradcombine.reductions.feedback import fed_back
from gradcombine.reductions.guarded import Written
from gradcombine.reductions.moments import moments
from gradcombine.reductions.numbered import Numbered, numbered
from gradcombine.reductions.per_leaf import per_leaf
from gradcombine.reductions.plain import first, last, max, min, product
from gradcombine.reductions.ratios import Ratio, ratio, ratios
from gradcombine.reductions.rows import row_mean, row_sum
from gradcombine.reductions.sums import mean, sum
from gradcombine.reductions.wrappers import checked, clipped, sparse_as_dense, zeroed

__all__ = [
    "Numbered",
    "Ratio",
    "adasum",
    "checked",
    "clipped",
    "differentiable",
    "elementwise",
    "fed_back",
    "first",
    "last",
    "max",
    "mean",
    "measured",
    "min",
    "moments",
    "numbered",
    "per_leaf",
    "product",
    "ratio",
    "ratios",
    "row_mean",
    "row_sum",
    "sparse_as_dense",
    "sum",
    "zeroed",
]

Reduction.written = Written
Reduction.__signature__ = inspect.signature(Written)
