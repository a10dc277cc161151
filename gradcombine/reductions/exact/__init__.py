"""Sums of floats in fixed-point digits: the same bits in any order, rounded once at the end."""
