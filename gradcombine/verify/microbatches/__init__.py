"""Whether accumulated microbatches equal one batch, and why not."""

from gradcombine.verify.microbatches.causes import MicrobatchReport, WindowResult
from gradcombine.verify.microbatches.check import check_microbatches
from gradcombine.verify.steps.report import Cause, Fault

__all__ = ["Cause", "Fault", "MicrobatchReport", "WindowResult", "check_microbatches"]
