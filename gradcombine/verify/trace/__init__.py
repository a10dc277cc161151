"""Runs that leave a trace, and the first place where two of them part."""

from gradcombine.verify.trace.divergence import CAUSES, Divergence, first_divergence
from gradcombine.verify.trace.record import STAGES, Recorder, record

__all__ = ["CAUSES", "STAGES", "Divergence", "Recorder", "first_divergence", "record"]
