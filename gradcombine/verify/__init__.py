"""Numerical verification across frameworks, and the ``gradcombine`` command. Imports no framework by itself."""

from gradcombine.audit import Audit, audit
from gradcombine.verify.check import Cause, MicrobatchReport, StepReport, Verdict, check_microbatches, check_step
from gradcombine.verify.check.law_search import BrokenLaw, check_reduction
from gradcombine.verify.compare.comparison import Comparison, assert_equal_bits, assert_within_ulp, compare
from gradcombine.verify.compare.meter import LeafDifference
from gradcombine.verify.compare.reference import Judgement
from gradcombine.verify.compare.ulp import NAN_DISTANCE, equal_bits, ulp_distance
from gradcombine.verify.explain.origin import Explanation, explain
from gradcombine.verify.plan import Plan, plan
from gradcombine.verify.record.divergence import Divergence, first_divergence
from gradcombine.verify.record.flight import FlightRecorder
from gradcombine.verify.record.trace import Recorder, record

__all__ = [
    "NAN_DISTANCE",
    "Audit",
    "BrokenLaw",
    "Cause",
    "Comparison",
    "Divergence",
    "Explanation",
    "FlightRecorder",
    "Judgement",
    "LeafDifference",
    "MicrobatchReport",
    "Plan",
    "Recorder",
    "StepReport",
    "Verdict",
    "assert_equal_bits",
    "assert_within_ulp",
    "audit",
    "check_microbatches",
    "check_reduction",
    "check_step",
    "compare",
    "equal_bits",
    "explain",
    "first_divergence",
    "plan",
    "record",
    "ulp_distance",
]
