"""Arrays of which some rows are held: gradients of embeddings."""

from gradcombine.reductions.rows.dense import add_rows, densify, to_dense
from gradcombine.reductions.rows.leaf import RowSparse, row_sparse

__all__ = ["RowSparse", "add_rows", "densify", "row_sparse", "to_dense"]
