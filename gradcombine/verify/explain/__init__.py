"""Explanation of a result: the order of additions, precision and scaling that made it."""
