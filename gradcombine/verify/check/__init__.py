"""Checks that steps and accumulations do not depend on how a batch is divided, and names the cause if they do."""

from gradcombine.verify.check.checking import check_step
from gradcombine.verify.check.microbatches import check_microbatches
from gradcombine.verify.check.running import Split
from gradcombine.verify.check.step_report import Cause, Fault, StepReport, StepRun, Verdict

__all__ = [
    "Cause",
    "Fault",
    "Split",
    "StepReport",
    "StepRun",
    "Verdict",
    "check_microbatches",
    "check_step",
]
