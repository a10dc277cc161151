"""Whether accumulated microbatches equal one batch, and why not."""

from gradcombine.verify.microbatches.causes import Cause, Fault, MicrobatchReport, WindowResult
from gradcombine.verify.microbatches.check import check_microbatches

__all__ = ["Cause", "Fault", "MicrobatchReport", "WindowResult", "check_microbatches"]
