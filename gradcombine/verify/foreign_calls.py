"""Arguments returned by a user's callable, and time limits for calls of foreign code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
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


@contextmanager
def exits_after(seconds: float | None, status: int, before: Callable[[], None]) -> Generator[None]:
    """Ends the process with ``status`` if the body takes longer than ``seconds``; None for no limit.

    An exception would wait for a compiler to return, and crash the import of an extension module.

    Args:
      seconds: the limit.
      status: exit status.
      before: is called first, in another thread.
    """

    def end() -> None:
        try:
            before()
        finally:
            os._exit(status)

    timer = threading.Timer(seconds or 0, end)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def within_seconds(seconds: float, late: GradCombineError) -> Generator[None]:
    """Raises ``late`` if the body, a match of a regular expression, takes longer than ``seconds``.

    Uses a signal, as a match holds the interpreter's lock, so there is no limit outside of the main thread and on
    Windows.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: Any) -> None:
        raise late

    handler, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
