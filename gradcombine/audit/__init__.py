"""Audit of a compiled step for the machine that it will run on."""

from gradcombine.audit.auditing import Audit, audit, audit_file, audit_named
from gradcombine.audit.compiling import OutOfMemoryError
from gradcombine.audit.rules import RULES, Finding
from gradcombine.audit.target import Target, find_target

__all__ = [
    "RULES",
    "Audit",
    "Finding",
    "OutOfMemoryError",
    "Target",
    "audit",
    "audit_file",
    "audit_named",
    "find_target",
]
