"""The one exception of the library, and what is asked of an argument and of an installation, each check once."""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
import os
import unicodedata
from collections.abc import Callable, Collection, Generator, Hashable, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np

from gradcombine.types import F, no_autograph

T = TypeVar("T")

_MOST_CHARACTERS = 300
"""Of what was received, in a message."""

MOST = np.iinfo(np.int32).max


MOST_REPLICAS = 1 << 17
"""Most replicas that are listed one by one: more are a slip, which would fill the memory."""


class GradCombineError(ValueError):
    """Input that cannot be combined.

    Args:
      operation: the public operation that refused, for instance ``"mean"``.
      expected: what would have been accepted.
      received: what came instead.
      path: where in the tree, for instance ``"['decoder']['w']"``; empty for the whole argument.

    >>> raise GradCombineError("mean", "4 weights", 3, path="['w']")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: mean: leaf ['w']: expected 4 weights, received 3
    """

    # TensorFlow's AutoGraph lets an error with this mark through; any other class that it does not know becomes a
    # StagingError on its way out of a tf.function.
    ag_pass_through = True

    def __init__(self, operation: str, expected: str, received: object, path: str = "") -> None:
        super().__init__(operation, expected, received, path)
        self.operation = operation
        self.expected = expected
        self.received = received
        self.path = path
        # Now: an array may have been donated by the time that the message is read.
        self._said = f"expected {_short(str(expected), 2 * _MOST_CHARACTERS)}, received {_text(received, str)}"

    def __str__(self) -> str:
        where = f"leaf {_short(self.path, 150)}: " if self.path else ""
        return legible(_one_line(f"{_short(self.operation, 150)}: {where}{self._said}"))

    def rename(self, operation: str) -> None:
        """Puts another name of an operation in the place of the one that the error has."""
        self.operation = operation
        self.args = (operation, *self.args[1:])

    def within(self, path: str) -> None:
        """Prepends the path of the node that the error's own path starts from."""
        self.path = path + ("" if path and self.path == "(root)" else self.path)
        self.args = (*self.args[:3], self.path)


def invalid(expected: str, received: object, path: str = "") -> GradCombineError:
    """An error that `operation` names on its way out of the public function."""
    return GradCombineError("", expected, received, path)


def operation(name: str | None = None, *, renames: bool = False) -> Callable[[F], F]:
    """Names a public function in the errors of `invalid` that it raises, and keeps AutoGraph out of it.

    Args:
      name: of the function, for users; None: the ``name`` of the object whose method it is.
      renames: whether errors that have the name of another function get this one.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except GradCombineError as error:
                if renames or not error.operation:
                    error.rename(name or args[0].name)
                raise

        return no_autograph(cast(F, named))

    return decorate


class MissingPackageError(GradCombineError, ImportError):
    """A package that is not installed, with the one command that installs it.

    Args:
      operation: the integration, function or command that needs it.
      modules: those that were not found, by their names in ``import``.
      extra: of this package, that has them all; by default the smallest one that has the first.

    >>> print(MissingPackageError("train_step", ["optax"]))
    train_step: expected what pip install 'gradcombine[optax]' installs, received no module optax
    """

    def __init__(self, operation: str, modules: Sequence[str], extra: str | None = None) -> None:
        package = OTHERS.get(modules[0]) or f"'gradcombine[{extra or EXTRAS[modules[0]]}]'"
        super().__init__(operation, f"what pip install {package} installs", f"no module {', '.join(modules)}")


EXTRAS = {
    **{name: name for name in ("jax", "keras", "optax", "tensorflow", "torch")},
    **dict.fromkeys(("h5py", "rich", "typer"), "cli"),
    **dict.fromkeys(("hypothesis", "jinja2", "matplotlib"), "verify"),
}
"""The smallest extra of this package with which a module is installed."""

OTHERS = {"orbax": "orbax-checkpoint"}
"""Packages without an extra: they read files that only their own users have."""


def require_installed(operation: str, *modules: str, extra: str | None = None) -> None:
    """Refuses to go on without modules, of which it imports none.

    Raises:
      MissingPackageError: names those that are not installed, and the command that installs them.
    """
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        raise MissingPackageError(operation, lacking, extra)


@contextmanager
def importing(operation: str, extra: str | None = None) -> Generator[None, None, None]:
    """Names the command that installs what an import inside did not find."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS and package not in OTHERS:
            raise
        raise MissingPackageError(operation, [package], extra) from error


@contextmanager
def within(path: str | Callable[[], str]) -> Generator[None, None, None]:
    """Prepends a path, or what gives one, to the path of an error from inside."""
    try:
        yield
    except GradCombineError as error:
        error.within(path() if callable(path) else path)
        raise


def legible(text: str, most: int | None = None) -> str:
    """A text from elsewhere, a leaf's name for instance, as it may be shown on a terminal or a page.

    Whatever is not printable is spelled out: control characters, with which a name could rewrite the screen, marks that
    change the direction of writing, and lone surrogates, which cannot be encoded. Of a text longer than ``most`` the
    middle is left out.

    >>> legible(chr(27) + "[2Kw") == chr(92) + "x1b[2Kw"
    True
    """
    text = text if most is None else _short(text, most)
    if text.isprintable():
        return text
    spelled = (c.encode("unicode_escape").decode("ascii") for c in text)
    pairs = zip(text, spelled, strict=True)
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else other for c, other in pairs)


def shown(value: Any) -> str:
    """A value as messages show it: short, and even where its own ``repr`` fails."""
    return _text(value, repr, 100)


def attribute(value: object, name: str) -> Any:
    """An attribute of an object, None for one that it has not, or that its own code fails at."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _text(value: object, form: Callable[[object], str], most: int = _MOST_CHARACTERS) -> str:
    try:
        return _short(form(value), most)
    except Exception:  # whatever a foreign class makes of it; Python refuses integers of more than 4300 digits
        return f"an object of type {type(value).__name__}"


def _one_line(text: str) -> str:
    """Logs and the command's users read errors line by line."""
    lines = text.splitlines()
    return text if lines == [text] else " ".join(map(str.strip, lines))


def _short(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]}"


def require_integer(expected: str, value: Any, lowest: int = 1, highest: int = MOST) -> int:
    """The integer that a value is, of any integer type and framework; refuses a bool and what is out of range."""
    try:
        if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
            raise TypeError
        number = operator.index(value)
    except Exception:  # beside TypeError whatever a foreign class raises
        raise invalid(expected, shown(value)) from None
    if not lowest <= number <= highest:
        raise invalid(expected, shown(number))
    return number


def require_path(expected: str, path: Any) -> Path:
    """The path that a text or an object of paths stands for; refuses what the file system cannot name or find out."""
    try:
        found = Path(path)
        if b"\0" in os.fsencode(found):
            raise ValueError
    except Exception:
        raise invalid(expected, shown(path)) from None
    try:
        os.stat(found)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a link to itself, a folder that is closed
        raise invalid(expected, f"{shown(str(path))}: {error.strerror}") from None
    return found


def require_file(expected: str, path: object) -> Path:
    """The path of a regular file: a FIFO would be waited for without an end, and a device read without one."""
    found = require_path(expected, path)
    if not found.is_file():
        received = f"{found}, which {'is no regular file' if found.exists() else 'does not exist'}"
        raise invalid(expected, received)
    return found


def require_type(expected: str, value: object, kind: type[T], path: str = "") -> T:
    """The value, if it is an instance of this class."""
    if not isinstance(value, kind):
        raise invalid(expected, type(value).__name__, path)
    return value


def require_given(expected: str, value: T | None, received: str = "none", path: str = "") -> T:
    """The value; raises if it is None."""
    if value is None:
        raise invalid(expected, received, path)
    return value


def require_one(expected: str, *values: object) -> None:
    """Raises if more than one of several exclusive arguments is not None."""
    if sum(value is not None for value in values) > 1:
        raise invalid(expected, "both")


def require_equal(expected: str, wanted: object, received: object, path: str = "") -> None:
    """Raises unless two values are equal; ``{}`` in the text stands for the wanted one."""
    if wanted != received:
        # No format, as a path or a name in the text may have braces of its own.
        raise invalid(expected.replace("{}", str(wanted)), received, path)


def require_distinct(expected: str, items: Collection[Hashable]) -> None:
    """Raises for duplicates, and for an empty collection."""
    if len(set(items)) < len(items) or not items:
        raise invalid(expected, shown(items))


def require_tuple(
    expected: str, value: Any, *lengths: int, kinds: tuple[type, ...] = (tuple,)
) -> tuple[Any, ...] | list[Any]:
    """The value, if it is of one of these classes and lengths."""
    if issubclass(type(value), kinds) and len(value) in lengths:
        return value
    raise invalid(expected, in_kind(value))


def in_kind(value: Any) -> str:
    """The name of a value's class, with the length of a list or tuple."""
    return type(value).__name__ + (f" of {len(value)}" if issubclass(type(value), (list, tuple)) else "")


@contextmanager
def translate_errors(
    expected: str, *kinds: type[Exception], received: object = None, path: str = ""
) -> Generator[None, None, None]:
    """Raises GradCombineError in place of an error that another library raises in the body.

    Args:
      expected: what would have been accepted.
      kinds: the classes of errors; TypeError and ValueError by default.
      received: a text, or a function that returns one; None: the first line of the error.
      path: of the leaf.
    """
    caught = kinds or (TypeError, ValueError)
    try:
        yield
    except GradCombineError:
        raise
    except caught as error:
        said = received() if isinstance(received, FunctionType) else received
        raise invalid(expected, first_line(error) if said is None else said, path) from error


def first_line(error: BaseException) -> str:
    """An error of another library in one line."""
    return next(iter(f"{type(error).__name__}: {error}".splitlines()))


def require_function(expected: str, value: T) -> T:
    """The value, if it can be called."""
    if not callable(value):
        raise invalid(expected, shown(value))
    return value


def require_list(expected: str, values: Any) -> list[Any]:
    """The items of a list or tuple; refuses a NamedTuple, what is no list, and an empty one."""
    if not issubclass(type(values), (list, tuple)) or hasattr(values, "_fields"):
        raise invalid(expected, type(values).__name__)
    if not values:
        raise invalid(expected, "an empty list")
    return list(values)


def require_number(expected: str, value: Any, lowest: float) -> float:
    """The finite float that a real number is, of any type and framework; refuses a bool and one below ``lowest``."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)
    except Exception:  # beside TypeError and OverflowError whatever a foreign class raises
        raise invalid(expected, shown(value)) from None
    if not lowest <= number < math.inf:
        raise invalid(expected, shown(value))
    return number


def require_flag(name: str, value: object) -> bool:
    """The truth of a bool, Python's or NumPy's; refuses what has one only by the way."""
    if value is not True and value is not False and not isinstance(value, np.bool_):
        raise invalid(f"True or False as {name}", shown(value))
    return bool(value is True or value == np.True_)


def require_one_of(expected: str, value: object, choices: Sequence[str]) -> None:
    """Refuses what is not one of some names."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(expected, shown(value))


def require_items(expected: str, values: Any) -> list[Any]:
    """The items of what can be iterated over; what a generator raises by itself comes through."""
    try:
        items = iter(values)
    except TypeError:
        raise invalid(expected, shown(values)) from None
    return list(items)  # of the iterator: the length that an object claims to have may be anything
