"""The orders in which other systems add, by name: so that a difference from their result is explained to the last bit.

The functions of `SUMS` and `MEANS` take a list of trees, in the order in which the other system numbers them, and
return the tree that it returns. All was observed on CPU (x86 with fused multiply-add), with TensorFlow 2.21, JAX 0.10.2
and optax 0.2.8; another version may add in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gradcombine.foreign_orders.means import mean_of_means, welford
from gradcombine.foreign_orders.sums import addn_blocks, hierarchical_copy, left_chain, ring
from gradcombine.types import Tree

__all__ = ["MEANS", "SUMS", "addn_blocks", "hierarchical_copy", "left_chain", "mean_of_means", "ring", "welford"]

SUMS: Mapping[str, Callable[[Sequence[Tree]], Tree]] = {
    "left_chain": left_chain,
    "addn_blocks": addn_blocks,
    "hierarchical_copy": hierarchical_copy,
    "ring": ring,
}
"""The orders of a sum, by name."""

MEANS: Mapping[str, Callable[[Sequence[Tree]], Tree]] = {
    "welford": welford,
    "welford_unfused": partial(welford, fused=False),
}
"""The orders of a mean, by name."""
