"""Two dumps against each other: what `gradcombine diff` measures and shows."""

from gradcombine.verify.diff.measure import Allowed, DiffReport, LeftOut, Row, diff
from gradcombine.verify.diff.steps import StepReport, diff_steps, is_steps

__all__ = ["Allowed", "DiffReport", "LeftOut", "Row", "StepReport", "diff", "diff_steps", "is_steps"]
