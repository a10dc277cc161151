"""What a file format has to do: hold one text and named arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Protocol

import numpy as np

from gradcombine.errors import GradCombineError
from gradcombine.formats import Entry


class Contents(NamedTuple):
    """What a state file holds: the header's text, and the arrays by name, read when they are asked for."""

    text: str
    arrays: dict[str, Entry]


class Format(Protocol):
    """A module of this package that knows one file format."""

    def write(self, file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes to a file that is open and empty. The same contents give the same bytes."""
        ...

    def read(self, path: Path) -> Contents:
        """Reads a file's header. It may raise anything for damaged contents: `decoding` gives that one name."""
        ...


@contextmanager
def decoding(path: Path) -> Iterator[None]:
    """Names whatever a decoder raises on damaged contents; a file that cannot be opened keeps its OSError."""
    try:
        yield
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # An error about a path says so; one without a name is about a place in the file that is not there.
        if isinstance(error, OSError) and error.filename is not None:
            raise
        # Decoders of archives raise a dozen classes, depending on where the damage is.
        received = f"{path.name}: {type(error).__name__}: {error}"
        raise GradCombineError("statefile.load", "a whole state file", received) from error


def refused(expected: str, received: object) -> GradCombineError:
    """The error of a file whose contents are not what they should be."""
    return GradCombineError("statefile.load", expected, received)


def array_name(rank: int, leaf: int) -> str:
    """What an array is called in the file: its replica, and its number among the header's leaves."""
    return f"{rank}.{leaf}"
