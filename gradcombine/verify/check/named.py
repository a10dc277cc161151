"""The case of a command line: a module's callable that makes a step, parameters and a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from gradcombine.audit.auditing import callable_named
from gradcombine.audit.compiling import foreign
from gradcombine.errors import invalid, operation
from gradcombine.verify.check.checking import checked
from gradcombine.verify.check.lines import in_words
from gradcombine.verify.check.step_report import StepReport
from gradcombine.verify.foreign_calls import arguments, within_seconds

NEEDED = ("make_step", "params", "batch")
OPTIONAL = ("microbatches", "devices", "returns", "pad", "terms", "reference", "unit")


@operation("check")
def case_named(what: str) -> dict[str, Any]:
    """Calls the callable that a command line names.

    Args:
      what: "module:callable". The callable returns ``(make_step, params, batch)``, or a dict of these and of any other
        argument of `gradcombine.verify.check_step`.

    Raises:
      GradCombineError: a module that does not import, a callable that raises or returns something else.
    """
    make = callable_named("check", what)
    made: Any = foreign("a callable of no argument that returns", what, make)
    if isinstance(made, tuple) and len(cast("tuple[Any, ...]", made)) == len(NEEDED):
        made = dict(zip(NEEDED, cast("tuple[Any, ...]", made), strict=True))
    return arguments(f"{what} to return (make_step, params, batch), or", made, NEEDED, OPTIONAL)


@operation("check")
def check_named(
    what: str,
    others: Mapping[str, Any],
    timeout: float | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> tuple[StepReport, str]:
    """Checks the step that a command line names.

    Args:
      what: as for `case_named`.
      others: arguments of `check_step` that stand in place of those of the case.
      timeout: after how many seconds to give up; None: never.
      progress: called before each part with its name, how many are done, and how many there are.

    Returns:
      The report, and the file and line where the step is made; empty if that is not known.

    Raises:
      GradCombineError: as `case_named` and `check_step`; for a step that takes longer.
    """
    late = invalid(f"a check that takes less than {timeout or 0:g} s", "one that takes longer")
    with within_seconds(timeout, late):
        case = case_named(what)
        make_step, params, batch = (case.pop(name) for name in NEEDED)
        return checked(make_step, params, batch, case | dict(others), progress), source_of(make_step)


def source_of(function: Any) -> str:
    """The file and line of a function, as "step.py:12"; empty if it has none. Files are named from here, if below."""
    try:
        _, line = inspect.getsourcelines(inspect.unwrap(function))
        return in_words(inspect.getsourcefile(inspect.unwrap(function)) or "", line)
    except (TypeError, OSError, ValueError):
        return ""
