"""Numerical verification across frameworks, and the ``gradcombine`` command. Imports no framework at import time."""

from gradcombine.verify.check import Cause, Verdict, check_microbatches, check_step
from gradcombine.verify.check import StepReport as StepReport
from gradcombine.verify.check.law_search import BrokenLaw, check_reduction
from gradcombine.verify.compare.comparison import Comparison as Comparison
from gradcombine.verify.compare.comparison import assert_equal_bits, compare
from gradcombine.verify.explain.origin import Explanation as Explanation
from gradcombine.verify.explain.origin import explain
from gradcombine.verify.plan import Plan as Plan
from gradcombine.verify.plan import plan
from gradcombine.verify.record.divergence import Divergence as Divergence
from gradcombine.verify.record.divergence import first_divergence
from gradcombine.verify.record.flight import FlightRecorder
from gradcombine.verify.record.trace import record

__all__ = [
    "BrokenLaw",
    "Cause",
    "FlightRecorder",
    "Verdict",
    "assert_equal_bits",
    "check_microbatches",
    "check_reduction",
    "check_step",
    "compare",
    "explain",
    "first_divergence",
    "plan",
    "record",
]
