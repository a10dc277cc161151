"""Audits a compiled step for the hardware that it will run on."""

from gradcombine.audit.auditing import Audit as Audit
from gradcombine.audit.auditing import audit, audit_file
from gradcombine.audit.compiling import OutOfMemoryError
from gradcombine.audit.target import Target as Target
from gradcombine.audit.target import find_target

__all__ = ["OutOfMemoryError", "audit", "audit_file", "find_target"]
