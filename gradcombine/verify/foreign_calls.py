"""Arguments returned by a user's callable, and a time limit for calls of foreign code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

from gradcombine.errors import GradCombineError, invalid, shown


def arguments(what: str, returned: Any, needed: Sequence[str], optional: Sequence[str]) -> dict[str, Any]:
    """The arguments in a dict that a user's callable returned; raises for missing or unknown names and other types."""
    received: Mapping[str, Any] = cast("Mapping[str, Any]", returned) if isinstance(returned, Mapping) else {}
    wrong = [x for x in needed if x not in received] or [x for x in received if x not in (*needed, *optional)]
    if wrong:
        expected = f"{what} a dict of {', '.join(needed)}, optionally with {', '.join(optional)}"
        names = f"{'none of' if wrong[0] in needed else 'also'} {', '.join(map(str, wrong))}"
        raise invalid(expected, names if isinstance(returned, Mapping) else shown(returned))
    return dict(received)


class _LateError(KeyboardInterrupt):
    """Raised when the time is over: an interrupt, which code that catches other exceptions lets pass."""


@contextmanager
def within_seconds(seconds: float | None, late: GradCombineError) -> Generator[None]:
    """Raises ``late`` if the body takes longer than ``seconds``; None for no limit.

    Uses a signal, so there is no limit outside of the main thread and on Windows.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: Any) -> None:
        raise _LateError

    # The alarm repeats: Python ignores exceptions in finalizers and callbacks, and the body may catch one.
    handler, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    except _LateError:
        raise late from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
