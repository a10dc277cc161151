"""Exact sums of floats in fixed point: the same bits in any order, rounded once at the end."""
