"""Runs one input: in a bounded time, in bounded memory, and with an error of the right class, or none."""

from __future__ import annotations

import resource
import signal
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from gradcombine.errors import GradCombineError
from tests.fuzz.values import OwnError, bits

SECONDS = 5.0
"""Of processor time, for one input, so that other programs do not count; most take less than a thousandth of it."""

MARGIN = 1 << 30
"""Bytes of address space that an input may have beyond what the process has when the first one runs."""

COMPILING = 8
"""How many times as much an input may have where programs are traced or compiled: nine exact contributions are 4,000
operations of a graph, and compilers end the process where they get no memory."""

MOST_CHARACTERS = 1300
"""Of an error's message."""


class LateError(BaseException):
    """An input took too long."""


@contextmanager
def bounded(factor: int = 1) -> Generator[Callable[[], bool], None, None]:
    """Bounds the memory of this process, and makes late inputs raise; tells whether half of it is left behind."""

    def late(*_: Any) -> None:
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
    """Bytes of address space of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def happened(
    arguments: Any, run: Callable[[], Any], allowed: tuple[type[BaseException], ...] = (), factor: int = 1
) -> tuple[str, str]:
    """What came of one input: "accepted", "refused", or what must not be; and its class, for the report."""
    before = bits(arguments)
    signal.setitimer(signal.ITIMER_PROF, factor * SECONDS)
    try:
        run()
        outcome = "accepted", ""
    except GradCombineError as error:
        named = type(error.operation) is not str or error.operation  # another object may be no truth value
        outcome = ("refused", "") if named else ("defect", f"an error without an operation{error}")
        if len(str(error)) > MOST_CHARACTERS or "\n" in str(error):
            outcome = "defect", f"a message of {len(str(error))} characters, {str(error).count(chr(10))} line ends"
    except (*allowed, OwnError):
        outcome = "refused", ""
    except LateError:
        outcome = "defect", f"no end after {factor * SECONDS} s"
    except BaseException as error:
        known = of_a_function_of_the_user(error) or (arguments is not None and is_of_memory(error))
        outcome = ("refused", "") if known else ("defect", where(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if bits(arguments) != before:
        return "defect", "an argument has changed"
    return outcome


def is_of_memory(error: BaseException) -> bool:
    """Whether an array was asked for that does not fit, as NumPy, JAX and TensorFlow say it."""
    said = ("Unable to allocate", "RESOURCE_EXHAUSTED", "OOM when allocating")
    return type(error).__name__ in _OF_MEMORY and any(words in str(error) for words in said)


_OF_MEMORY = ("_ArrayMemoryError", "MemoryError", "JaxRuntimeError", "ResourceExhaustedError")


def where(error: BaseException) -> str:
    """The class of an error, and the last line of the library that it passed."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/gradcombine/" in f.filename]
    place = f"{frames[-1].filename.partition('/gradcombine/')[2]}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {place}"


_OF_USERS = (
    *(".own_", "self.identity(", "progress(", " asarray(np.array(", "known(ulp(", "= length(index)", "max_norm("),
    *(".loss.function(", "jax.vjp(", "jax.value_and_grad(", "checked_result(compute(", "self.weight(", "= skip("),
    *(".inner.update(", "self._opt.update(", "self._wrap(", "optimizer.update(", "optimizer.init("),
    *(".inner.init(", "self._opt.init(", "updates, state = transform(", "converted(self._allreduce)("),
    "except GradCombineError as error:",
)
"""How the library calls functions that it was given; the last one, a function of its own with other arguments."""


def of_a_function_of_the_user(error: BaseException) -> bool:
    """Whether the library had called a function that it was given: what that raises comes through as it is."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/gradcombine/" in f.filename]
    return bool(frames) and any(call in (frames[-1].line or "") for call in _OF_USERS)
