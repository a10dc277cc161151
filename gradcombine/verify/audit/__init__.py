"""What a compiled step does, on the machine that it will run on."""

from gradcombine.verify.audit.findings import RULES, Finding
from gradcombine.verify.audit.step import Audit, OutOfMemoryError, audit, audit_file
from gradcombine.verify.audit.target import Target, find_target

__all__ = ["RULES", "Audit", "Finding", "OutOfMemoryError", "Target", "audit", "audit_file", "find_target"]
