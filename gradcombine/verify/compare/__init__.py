"""Comparison of two trees of arrays in memory, bit for bit and against a reference."""
