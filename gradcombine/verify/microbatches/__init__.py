"""Whether accumulated microbatches equal one batch, and why not."""

from gradcombine.verify.microbatches.check import check_microbatches
from gradcombine.verify.microbatches.report import Cause, Fault, MicrobatchReport, WindowResult

__all__ = ["Cause", "Fault", "MicrobatchReport", "WindowResult", "check_microbatches"]
