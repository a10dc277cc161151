"""Checks the step that a command line names as "module:callable"."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from gradcombine.audit.auditing import callable_named
from gradcombine.audit.compiling import foreign
from gradcombine.errors import invalid, operation
from gradcombine.verify.check.checking import checked
from gradcombine.verify.check.lines import format_line
from gradcombine.verify.check.step_report import StepReport
from gradcombine.verify.foreign_calls import arguments, within_seconds

NEEDED = ("make_step", "params", "batch")
OPTIONAL = ("microbatches", "devices", "returns", "pad", "terms", "reference", "unit")


@operation("check")
def check_named(
    what: str,
    others: Mapping[str, Any],
    timeout: float | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[StepReport, str]:
    """Checks the step of a callable that a command line names.

    Args:
      what: "module:callable". The callable returns ``(make_step, params, batch)``, or a dict of these and other
        arguments of `gradcombine.verify.check_step`.
      others: arguments of `check_step` that override those of the case.
      timeout: seconds after which to give up; None: never.
      progress: called before each part with its name, the number of finished parts, and the number of all parts.

    Returns:
      The report, and the file and line of ``make_step``; empty if unknown.

    Raises:
      GradCombineError: as `check_step`; for a module that cannot be imported, or a callable that raises or returns
        anything else; if the check takes longer than the timeout.
    """
    late = invalid(f"a check that takes less than {timeout or 0:g} s", "one that takes longer")
    with within_seconds(timeout, late):
        case: Any = foreign("a callable without arguments that returns", what, callable_named("check", what))
        if isinstance(case, tuple) and len(cast("tuple[Any, ...]", case)) == len(NEEDED):
            case = dict(zip(NEEDED, cast("tuple[Any, ...]", case), strict=True))
        case = arguments(f"{what} to return (make_step, params, batch), or", case, NEEDED, OPTIONAL)
        make_step, params, batch = (case.pop(name) for name in NEEDED)
        return checked(make_step, params, batch, case | dict(others), progress), source_of(make_step)


def source_of(function: Any) -> str:
    """Returns the file and line of a function, as "step.py:12"; empty if it has no source."""
    try:
        _, line = inspect.getsourcelines(inspect.unwrap(function))
        return format_line(inspect.getsourcefile(inspect.unwrap(function)) or "", line)
    except (TypeError, OSError, ValueError):
        return ""
