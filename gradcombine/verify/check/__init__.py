"""Whether a step, or an accumulation, gives the same however its batch is divided, how accurate it is, and why not."""

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
