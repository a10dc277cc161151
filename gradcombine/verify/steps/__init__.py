"""Whether a step gives the same however its batch is divided, how accurate it is, and why not."""

from gradcombine.verify.steps.check import check_step
from gradcombine.verify.steps.report import Fault, StepReport, StepRun, Verdict
from gradcombine.verify.steps.running import Split

__all__ = ["Fault", "Split", "StepReport", "StepRun", "Verdict", "check_step"]
