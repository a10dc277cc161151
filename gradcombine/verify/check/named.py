"""The case of a command line: a module's callable that makes a step, parameters and a batch."""

from __future__ import annotations

import inspect
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from gradcombine.audit.auditing import callable_named
from gradcombine.audit.compiling import foreign
from gradcombine.errors import invalid, operation, shown
from gradcombine.verify.check.checking import checked
from gradcombine.verify.check.lines import in_words
from gradcombine.verify.check.step_report import StepReport

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
    expected = f"{what} to return (make_step, params, batch), or a dict of these and of {', '.join(OPTIONAL)}"
    if not isinstance(made, Mapping):
        raise invalid(expected, shown(made))
    case = dict(cast("Mapping[str, Any]", made))
    missing, others = [x for x in NEEDED if x not in case], [str(x) for x in case if x not in NEEDED + OPTIONAL]
    if missing or others:
        received = f"none of {', '.join(missing)}" if missing else f"also {', '.join(others)}"
        raise invalid(expected, received)
    return case


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
    with _within(timeout):
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


class _LateError(BaseException):
    """The time is over: no `Exception`, which a step or what runs it may catch."""


@contextmanager
def _within(seconds: float | None) -> Generator[None, None, None]:
    """Raises where the body takes longer; by a signal, which only the main thread has, and Windows has not."""
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def late(*_: Any) -> None:
        raise _LateError

    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _LateError:
        expected = f"a check that takes less than {seconds:g} s"
        raise invalid(expected, "one that takes longer") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
