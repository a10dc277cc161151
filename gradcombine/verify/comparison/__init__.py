"""How far two leaves, and two trees, are apart."""

from gradcombine.verify.comparison.leaf import Element, LeafDifference, Meter
from gradcombine.verify.comparison.trees import Comparison, assert_equal_bits, assert_within_ulp, compare

__all__ = [
    "Comparison",
    "Element",
    "LeafDifference",
    "Meter",
    "assert_equal_bits",
    "assert_within_ulp",
    "compare",
]
