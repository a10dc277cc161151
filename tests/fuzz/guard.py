"""Checks that reading one file takes bounded time and memory and raises only the right class of error."""

from __future__ import annotations

import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager

from gradcombine import GradCombineError

SECONDS = 5.0
"""Limit of processor time for one file; most take less than a thousandth of it."""

MARGIN = 1 << 30
"""Bytes of address space that a file may take in addition to those of the process before the first one."""

COMPILING = 8
"""Multiple of the limits for readers that compile programs."""

MOST_CHARACTERS = 1300
"""Maximum length of an error message."""


class LateError(BaseException):
    """Raised when a file takes too long."""


@contextmanager
def bounded(factor: int = 1) -> Generator[Callable[[], bool], None, None]:
    """Limits memory and time; yields a function that tells whether half of the memory margin is used up."""

    def late(*_: object) -> None:
        raise LateError

    before, begun = resource.getrlimit(resource.RLIMIT_AS), _held()
    resource.setrlimit(resource.RLIMIT_AS, (begun + factor * MARGIN, before[1]))
    handler = signal.signal(signal.SIGPROF, late)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield lambda: _held() > begun + factor * MARGIN // 2
    finally:
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _held() -> int:
    """Size of this process' address space in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def happened(
    read: Callable[[], object], allowed: tuple[type[BaseException], ...] = (), factor: float = 1
) -> tuple[str, str]:
    """The outcome of one file ("accepted", "refused" or "defect") and the type of a defect."""
    signal.setitimer(signal.ITIMER_PROF, factor * SECONDS)
    try:
        read()
    except GradCombineError as error:
        text = str(error)
        if not error.operation:
            return "defect", f"an error without an operation{text}"
        if len(text) > MOST_CHARACTERS or "\n" in text:
            return "defect", f"a message of {len(text)} characters, {text.count(chr(10))} line ends"
        return "refused", ""
    except allowed:
        return "refused", ""
    except LateError:
        return "defect", f"no end after {factor * SECONDS} s"
    except BaseException as error:
        return "defect", _where(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "accepted", ""


def _where(error: BaseException) -> str:
    """The class of an error and the innermost line of the library in its traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/gradcombine/" in f.filename]
    place = f"{frames[-1].filename.partition('/gradcombine/')[2]}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {place}"
