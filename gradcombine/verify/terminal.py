"""Shared parts of the commands: options, progress, report files and errors."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from gradcombine.audit import OutOfMemoryError
from gradcombine.errors import GradCombineError, invalid, legible, require_installed
from gradcombine.reporting.sections import Section, legible_lines, show

Number = TypeVar("Number", int, float)

DRAWS = ("jinja2", "matplotlib")
"""Packages that an HTML page needs."""

Json: TypeAlias = Annotated[Path | None, typer.Option(help="Write the full report to this file.", metavar="FILE")]
Html: TypeAlias = Annotated[Path | None, typer.Option(help="Write the report as one HTML page.", metavar="FILE")]


class Files(NamedTuple):
    """The files that a command writes its report to, in addition to the terminal."""

    json: Path | None = None
    html: Path | None = None

    def require(self, command: str) -> None:
        """Raises if a file cannot be written; called before the work starts."""
        if self.html is not None:
            require_installed(command, *DRAWS)
        for option, path in (("--json", self.json), ("--html", self.html)):
            if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
                raise invalid(f"a path in an existing folder for {option}", str(path))
        if self.json is not None and self.html is not None and self.json.resolve() == self.html.resolve():
            raise invalid("different files for --json and --html", str(self.html))

    def write_json(self, content: object) -> None:
        if self.json is not None:
            self.json.write_text(json_format.dumps(content, indent=1, allow_nan=False) + "\n")

    def write_page(self, title: str, verdict: str, passes: bool | None, sections: Sequence[Section]) -> None:
        if self.html is not None:
            from gradcombine.reporting import page  # needs matplotlib, which takes a second to import

            page.write(self.html, title, verdict, passes, sections)

    def write(
        self, title: str, verdict: str, passes: bool | None, sections: Sequence[Section], content: object
    ) -> None:
        """Writes the files and prints the report, in this order: a pipe may be closed before its end."""
        self.write_json(content)
        self.write_page(title, verdict, passes, sections)
        show(Console(), verdict, passes, sections)


Step: TypeAlias = Callable[[str, int, int], None]
"""Called when a step starts, with its name, the number of steps done, and the total."""


@contextmanager
def progress(first: str) -> Generator[Step, None, None]:
    """Shows the running step and the elapsed time on stderr, if it is a terminal; ``first`` names the first step."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label(first), total=None)

        def step(name: str, done: int = 0, total: int = 0) -> None:
            bar.update(task, description=label(name[-40:]), completed=done, total=total or None)

        yield step


def plain(text: str, style: str = "") -> Text:
    """Text that may contain names from files, with control characters escaped and without markup."""
    return Text(legible_lines(text), style)


def label(name: str) -> str:
    """A leaf's name for a progress bar, with control characters and markup escaped."""
    return escape(legible(name))


@contextmanager
def errors(command: str) -> Generator[None, None, None]:
    """Prints an error in one line and exits with status 2, or 3 if a step does not fit in the target's memory."""
    try:
        yield
    except SystemExit as error:  # whose status, often 0, would be taken for the command's
        print_error(invalid("functions that return or raise an exception", f"SystemExit: {error}"), command)
        raise typer.Exit(2) from None
    except (GradCombineError, OSError, MemoryError) as error:
        print_error(error, command)
        raise typer.Exit(3 if isinstance(error, OutOfMemoryError) else 2) from None


def print_error(error: Exception, command: str) -> None:
    """Prints an error in one line, as one of this command unless it has an operation."""
    if isinstance(error, GradCombineError) and not error.operation:
        error.rename(command)
    console = Console(stderr=True)
    console.show_cursor()  # which a progress bar hides
    console.print(plain(str(error), "red"), soft_wrap=True)


def numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Parses comma-separated numbers."""
    try:
        parsed = [kind(x) for x in text.split(",")]
    except ValueError:
        parsed = []
    if not parsed or (kind is float and not all(map(math.isfinite, parsed))):
        expected = f"--{option} as {'whole' if kind is int else 'finite'} numbers, separated by commas"
        raise invalid(expected, repr(text))
    return parsed
