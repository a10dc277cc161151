"""Numerical verification across frameworks, and the ``gradcombine`` command. Imports no framework by itself."""

from gradcombine.verify.ulp import NAN_DISTANCE, equal_bits, ulp_distance

__all__ = ["NAN_DISTANCE", "equal_bits", "ulp_distance"]
