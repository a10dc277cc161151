"""Whether accumulated microbatches equal one batch, and why not."""

from gradcombine.verify.check.step_report import Cause, Fault
from gradcombine.verify.check.windows.causes import MicrobatchReport, WindowResult
from gradcombine.verify.check.windows.optimizers import check_microbatches

__all__ = ["Cause", "Fault", "MicrobatchReport", "WindowResult", "check_microbatches"]
