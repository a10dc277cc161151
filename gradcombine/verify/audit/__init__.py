"""What a compiled step does, on the machine that it will run on."""

from gradcombine.verify.audit.compiling import OutOfMemoryError
from gradcombine.verify.audit.findings import RULES, Finding
from gradcombine.verify.audit.step import Audit, audit, audit_file, audit_named
from gradcombine.verify.audit.target import Target, find_target

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
