"""Whether a step gives the same however its batch is divided, how accurate it is, and why not."""

from gradcombine.verify.check.checking import check_step
from gradcombine.verify.check.running import Split
from gradcombine.verify.check.step_report import Fault, StepReport, StepRun, Verdict

__all__ = ["Fault", "Split", "StepReport", "StepRun", "Verdict", "check_step"]
