"""Arguments that a user's callable returns, and a bound of time for calls of foreign code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from gradcombine.errors import GradCombineError, invalid, shown


def arguments(what: str, made: Any, needed: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """Arguments that a user's callable returned, by their names; raises for any other result."""
    given: Mapping[str, Any] = cast("Mapping[str, Any]", made) if isinstance(made, Mapping) else {}
    wrong = [x for x in needed if x not in given] or [x for x in given if x not in (*needed, *optional)]
    if wrong:
        expected = f"{what} a dict of {', '.join(needed)}, and of {', '.join(optional)} what it needs"
        received = f"{'none of' if wrong[0] in needed else 'also'} {', '.join(map(str, wrong))}"
        raise invalid(expected, received if isinstance(made, Mapping) else shown(made))
    return dict(given)


class _LateError(BaseException):
    """The time is over: no `Exception`, which a step or what runs it may catch."""


@contextmanager
def within_seconds(seconds: float | None, late: GradCombineError) -> Generator[None]:
    """Raises an error where the body takes longer; None: never.

    By a signal, which only the main thread has, and Windows has not: elsewhere the time is not bounded.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: Any) -> None:
        raise _LateError

    handler, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _LateError:
        raise late from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
