"""What a file format has to do: hold one text and named arrays."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from gradcombine.errors import GradCombineError


class Reader(Protocol):
    """An open file. Its methods may raise anything for damaged contents: `decoding` gives it one name."""

    def text(self) -> str:
        """The header's text."""
        ...

    def names(self) -> frozenset[str]:
        """The names of the arrays."""
        ...

    def array(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """One array, whose dtype and shape in the file must be these. Nothing of its size is allocated before."""
        ...


class Format(Protocol):
    """A module of this package that knows one file format."""

    def write(self, file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes to a file that is open and empty. The same contents give the same bytes."""
        ...

    def opened(self, path: Path) -> AbstractContextManager[Reader]:
        """Opens a file."""
        ...


@contextmanager
def decoding(path: Path) -> Iterator[None]:
    """Names whatever a decoder raises on damaged contents; a file that cannot be opened keeps its OSError."""
    try:
        yield
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # Decoders of archives raise a dozen classes, depending on where the damage is.
        received = f"{path.name}: {type(error).__name__}: {error}"
        raise GradCombineError("statefile.load", "a whole state file", received) from error


def refused(expected: str, received: object) -> GradCombineError:
    """The error of a file whose contents are not what they should be."""
    return GradCombineError("statefile.load", expected, received)


_FORMATS = {".npz": "npz_format", ".safetensors": "safetensors_format"}


def format_of(operation: str, path: str | os.PathLike[str]) -> Format:
    """The format that a path's suffix names.

    Raises:
      GradCombineError: for another suffix, a format whose library is not installed, and where anything else than a file
        has this path: a FIFO would wait for ever, and nobody means to replace a device or a folder.
    """
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise GradCombineError(operation, f"a path that ends in {' or '.join(_FORMATS)}", repr(str(path)))
    if os.path.exists(path) and not os.path.isfile(path):
        raise GradCombineError(operation, "a regular file", repr(str(path)))
    try:
        module: Any = importlib.import_module(f"gradcombine.statefile.{_FORMATS[suffix]}")
    except ModuleNotFoundError as error:
        expected = f"the library {error.name}, for files that end in {suffix}: pip install 'gradcombine[{error.name}]'"
        raise GradCombineError(operation, expected, "an environment without it") from None
    return module


def array_name(rank: int, leaf: int) -> str:
    """What an array is called in the file: its replica, and its number among the header's leaves."""
    return f"{rank}.{leaf}"
