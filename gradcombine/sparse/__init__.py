"""Arrays of which some rows are held: gradients of embeddings."""

from gradcombine.sparse.dense import add_rows, densify, to_dense
from gradcombine.sparse.leaf import RowSparse, row_sparse

__all__ = ["RowSparse", "add_rows", "densify", "row_sparse", "to_dense"]
