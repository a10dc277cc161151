"""Explanation of a result: the order of additions, precision and scaling that reproduce its bits."""
