"""The library's exception, and the checks of arguments and of installed packages that raise it."""

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
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from gradcombine.types import F, no_autograph

T = TypeVar("T")

_MOST_CHARACTERS = 300
"""Length to which a message shortens the received value."""

MOST = np.iinfo(np.int32).max

MOST_REPLICAS = 1 << 17
"""Largest number of replicas to list one by one; a larger number is a typo that would fill the memory."""


class GradCombineError(ValueError):
    """Invalid input.

    Args:
      operation: the public function that raises it, for instance ``"mean"``.
      expected: describes valid input.
      received: the invalid value or its description.
      path: pytree path of the leaf, for instance ``"['decoder']['w']"``; empty for the entire argument.

    >>> raise GradCombineError("mean", "4 weights", 3, path="['w']")
    Traceback (most recent call last):
        ...
    gradcombine.errors.GradCombineError: mean: leaf ['w']: expected 4 weights, received 3
    """

    # AutoGraph re-raises errors with this attribute unchanged and turns other custom classes into a StagingError.
    ag_pass_through = True

    def __init__(self, operation: str, expected: str, received: object, path: str = "") -> None:
        super().__init__(operation, expected, received, path)
        self.operation = operation
        self.expected = expected
        self.received = received
        self.path = path
        # Formatted eagerly: a received array may be donated before the message is read.
        self._message = f"expected {_short(str(expected), 2 * _MOST_CHARACTERS)}, received {_text(received, str)}"

    def __str__(self) -> str:
        where = f"leaf {_short(self.path, 150)}: " if self.path else ""
        return legible(_one_line(f"{_short(self.operation, 150)}: {where}{self._message}"))

    def rename(self, operation: str) -> None:
        """Replaces the name of the operation."""
        self.operation = operation
        self.args = (operation, *self.args[1:])

    def within(self, path: str) -> None:
        """Prepends the path of the node that the error's path is relative to."""
        self.path = path + ("" if path and self.path == "(root)" else self.path)
        self.args = (*self.args[:3], self.path)


def invalid(expected: str, received: object, path: str = "") -> GradCombineError:
    """An error to which the enclosing `operation` adds the name of the public function."""
    return GradCombineError("", expected, received, path)


def operation(name: str | None = None, *, renames: bool = False) -> Callable[[F], F]:
    """Decorates a public function: adds its name to errors from `invalid`, and excludes it from AutoGraph.

    A class is decorated method by method, except for private and static ones, class methods and operators.

    Args:
      name: of the function, as users know it. None for a method: the ``name`` attribute of its object.
      renames: whether to also replace the name in errors that already have one.
    """

    def decorate(function: F) -> F:
        if isinstance(function, type):
            for key, method in list(vars(function).items()):
                if isinstance(method, FunctionType) and (key in ("__init__", "__call__") or not key.startswith("_")):
                    setattr(function, key, decorate(cast(F, method)))
            return cast(F, function)

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
    """Raised for a package that is not installed; the message has the command that installs it.

    Args:
      operation: the integration, function or command that needs it.
      modules: import names of the missing modules.
      extra: the extra of gradcombine that installs them; by default the smallest one with the first module.

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
"""The smallest extra of gradcombine that installs a module, by the module's name."""

OTHERS = {"orbax": "orbax-checkpoint"}
"""Packages on PyPI that no extra installs, by the module's name: needed only to read files written by them."""


def require_installed(operation: str, *modules: str, extra: str | None = None) -> None:
    """Raises MissingPackageError unless all modules are installed; imports none of them."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(operation, missing, extra)


@contextmanager
def importing(operation: str, extra: str | None = None) -> Generator[None, None, None]:
    """Turns the ModuleNotFoundError of a known package in the body into a MissingPackageError."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS and package not in OTHERS:
            raise
        raise MissingPackageError(operation, [package], extra) from error


class within(NamedTuple):  # noqa: N801 (used as a function; a generator would take several times as long)
    """Prepends a path, or the result of a function, to the path of a GradCombineError raised in the body."""

    path: str | Callable[[], str]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, GradCombineError):
            error.within(self.path() if callable(self.path) else self.path)


def legible(text: str, most: int | None = None) -> str:
    """Escapes untrusted text, such as a leaf's name from a file, for a terminal or an HTML page.

    Escapes all characters that are not printable: control characters, which can rewrite the screen, marks that change
    the writing direction, and lone surrogates, which cannot be encoded. Shortens a text longer than ``most``.

    >>> legible(chr(27) + "[2Kw") == chr(92) + "x1b[2Kw"
    True
    """
    text = text if most is None else _short(text, most)
    if text.isprintable():
        return text
    escaped = (c.encode("unicode_escape").decode("ascii") for c in text)
    pairs = zip(text, escaped, strict=True)
    return "".join(c if c.isprintable() or unicodedata.category(c) == "Zs" else escape for c, escape in pairs)


def shown(value: Any) -> str:
    """The shortened ``repr`` of a value for a message; names its type if ``repr`` raises."""
    return _text(value, repr, 100)


def attribute(value: object, name: str) -> Any:
    """An attribute of an object; None if it is missing or its property raises."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _text(value: object, form: Callable[[object], str], most: int = _MOST_CHARACTERS) -> str:
    try:
        return _short(form(value), most)
    except Exception:  # a user's class may raise anything; Python raises for integers of more than 4300 digits
        return f"an object of type {type(value).__name__}"


def _one_line(text: str) -> str:
    lines = text.splitlines()
    return text if lines == [text] else " ".join(map(str.strip, lines))


def _short(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {text[-half:]}"


def require_integer(expected: str, value: Any, lowest: float = 1, highest: float = MOST) -> int:
    """Converts an integer of any type and framework to int; raises for a bool and for one out of range."""
    try:
        if isinstance(value, (bool, np.bool_)) or getattr(value, "dtype", None) == np.bool_:
            raise TypeError
        number = operator.index(value)
    except Exception:  # __index__ of a user's class may raise anything
        raise invalid(expected, shown(value)) from None
    if not lowest <= number <= highest:
        raise invalid(expected, shown(number))
    return number


def require_path(expected: str, path: Any) -> Path:
    """Converts a str or path-like object to a Path; raises if the file system cannot look it up. It need not exist."""
    try:
        converted = Path(path)
        if b"\0" in os.fsencode(converted):
            raise ValueError
    except Exception:
        raise invalid(expected, shown(path)) from None
    try:
        os.stat(converted)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a cycle of links, no permission for the folder
        raise invalid(expected, f"{shown(str(path))}: {error.strerror}") from None
    return converted


def require_file(expected: str, path: object) -> Path:
    """The path of a regular file; raises for a FIFO or device, which a reader could wait for or read forever."""
    file = require_path(expected, path)
    if not file.is_file():
        received = f"{file}, which {'is not a regular file' if file.exists() else 'does not exist'}"
        raise invalid(expected, received)
    return file


def require_type(expected: str, value: object, cls: type[T], path: str = "") -> T:
    """Returns the value if it is an instance of ``cls``, else raises."""
    if not isinstance(value, cls):
        raise not_of(expected, value, cls, path)
    return value


def not_of(expected: str, value: object, cls: type, path: str = "") -> GradCombineError:
    """Returns the error for a value that is not an instance of ``cls``."""
    received = type_name(value)
    if type(value).__name__ == cls.__name__:  # tf.saved_model.load defines the types of named tuples anew
        received += ", another type of this name; tf.nest.pack_sequence_as rebuilds a state of a loaded SavedModel"
    return invalid(expected, received, path)


def require_given(expected: str, value: T | None, received: str = "none", path: str = "") -> T:
    """Returns the value if it is not None, else raises."""
    if value is None:
        raise invalid(expected, received, path)
    return value


def require_one(expected: str, *values: object) -> None:
    """Raises if more than one of several mutually exclusive arguments is not None."""
    if sum(value is not None for value in values) > 1:
        raise invalid(expected, "both")


def require_equal(expected: str, wanted: object, received: object, path: str = "") -> None:
    """Raises unless the values are equal; ``{}`` in ``expected`` stands for ``wanted``."""
    if wanted != received:
        # Not str.format: a path or name in the text may contain braces.
        raise invalid(expected.replace("{}", str(wanted)), received, path)


def require_distinct(expected: str, items: Collection[Hashable]) -> None:
    """Raises for duplicates, and for an empty collection."""
    if len(set(items)) < len(items) or not items:
        raise invalid(expected, shown(items))


def require_tuple(
    expected: str, value: Any, *lengths: int, kinds: tuple[type, ...] = (tuple,)
) -> tuple[Any, ...] | list[Any]:
    """Returns the value if it has one of the classes ``kinds`` and one of the lengths, else raises."""
    if issubclass(type(value), kinds) and len(value) in lengths:
        return value
    raise invalid(expected, type_name(value))


def type_name(value: Any) -> str:
    """The name of a value's type, with the length of a list or tuple; of a class, its own name."""
    if isinstance(value, type):
        return f"{value.__name__}, not called"
    return type(value).__name__ + (f" of {len(value)}" if issubclass(type(value), (list, tuple)) else "")


@contextmanager
def translate_errors(
    expected: str, *kinds: type[Exception], received: object = None, path: str = ""
) -> Generator[None, None, None]:
    """Turns an error that another library raises in the body into a GradCombineError.

    Args:
      expected: describes valid input.
      kinds: the classes of errors to translate; TypeError and ValueError by default.
      received: a text, or a function that returns one; None for the first line of the error.
      path: of the leaf.
    """
    caught = kinds or (TypeError, ValueError)
    try:
        yield
    except GradCombineError:
        raise
    except caught as error:
        text = received() if isinstance(received, FunctionType) else received
        raise invalid(expected, first_line(error) if text is None else text, path) from error


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def require_function(expected: str, value: T) -> T:
    """Returns the value if it is callable, else raises."""
    if not callable(value):
        raise invalid(expected, shown(value))
    return value


def require_list(expected: str, values: Any) -> list[Any]:
    """Copies a list or tuple to a list; raises for other types, for a NamedTuple and for an empty one."""
    if not issubclass(type(values), (list, tuple)) or hasattr(values, "_fields"):
        raise invalid(expected, type(values).__name__)
    if not values:
        raise invalid(expected, "an empty list")
    return list(values)


def require_number(expected: str, value: Any, lowest: float) -> float:
    """Converts a real number of any type and framework to float; raises for a bool and unless lowest <= value < inf."""
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)
    except Exception:  # __float__ of a user's class may raise anything
        raise invalid(expected, shown(value)) from None
    if not lowest <= number < math.inf:
        raise invalid(expected, shown(value))
    return number


def require_flag(name: str, value: object) -> bool:
    """Returns a Python or NumPy bool as a bool; raises for values that are merely truthy."""
    if value is not True and value is not False and not isinstance(value, np.bool_):
        raise invalid(f"True or False as {name}", shown(value))
    return bool(value is True or value == np.True_)


def require_one_of(expected: str, value: object, choices: Sequence[str]) -> None:
    """Raises unless the value is one of the strings."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(expected, shown(value))


def require_items(expected: str, values: Any) -> list[Any]:
    """The items of an iterable; raises if it is not one, and passes through what its iteration raises."""
    try:
        items = iter(values)
    except TypeError:
        raise invalid(expected, shown(values)) from None
    return list(items)  # not list(values), which would call the object's __len__
