"""How the commands of the terminal show names and errors, and read numbers."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from gradcombine.audit import OutOfMemoryError
from gradcombine.errors import GradCombineError, invalid, legible
from gradcombine.reporting.sections import legible_lines

Number = TypeVar("Number", int, float)

DRAWS = ("jinja2", "matplotlib")
"""Packages that an HTML page needs."""


def plain(text: str, style: str = "") -> Text:
    """Lines with names from elsewhere in them, as a terminal may show them."""
    return Text(legible_lines(text), style)


def label(name: str) -> str:
    """A leaf's name beside a progress bar, which reads markup."""
    return escape(legible(name))


@contextmanager
def errors(command: str) -> Generator[None, None, None]:
    """Says in one line what cannot be read, compiled or found, and ends with status 2; 3 for a target's memory."""
    try:
        yield
    except (GradCombineError, OSError, MemoryError) as error:
        if isinstance(error, GradCombineError) and not error.operation:
            error.rename(command)
        Console(stderr=True).print(plain(str(error), "red"), soft_wrap=True)
        raise typer.Exit(3 if isinstance(error, OutOfMemoryError) else 2) from None


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Reads numbers with commas between."""
    try:
        found = [kind(x) for x in text.split(",")]
    except ValueError:
        found = []
    if not found or (kind is float and not all(map(math.isfinite, found))):
        expected = f"--{option} as {'whole' if kind is int else 'finite'} numbers, separated by commas"
        raise invalid(expected, repr(text))
    return found
