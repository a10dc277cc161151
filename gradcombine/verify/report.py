"""What a report says, and how a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


class Cells(NamedTuple):
    """One row of a table."""

    cells: Sequence[str]
    passes: bool = True


class Figure(NamedTuple):
    """A plot, and what it shows in words."""

    svg: str
    alt: str


class Section(NamedTuple):
    """A part of a report: a note, plots, a table.

    Attributes:
      folded: whether the table is closed until it is clicked; on a screen, its rows are counted.
      whole: whether a screen shows all rows of the table.
    """

    title: str
    note: str = ""
    figures: Sequence[Figure] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Cells] = ()
    folded: bool = False
    whole: bool = False


SHOWN = 12
"""How many rows of a long table are shown."""

SHORT = 20
"""Words up to this length are not broken."""


def show(console: Console, verdict: str, passes: bool, sections: Sequence[Section]) -> None:
    """Prints the first rows of each section's table, and the answer at the end. Plots are for pages."""
    for section in sections:
        counted = section.folded and section.rows
        console.print(Text(f"{section.title}: {len(section.rows):,}" if counted else section.title, "bold"))
        if section.folded:
            continue
        if section.note:
            console.print(Text(section.note, "dim"))
        if section.rows:
            shown = len(section.rows) if section.whole else min(SHOWN, len(section.rows))
            console.print(_table(section, shown, console.width))
            if len(section.rows) > shown:
                console.print(f"and {len(section.rows) - shown:,} more")
        console.print()
    console.print(Text(verdict, "green" if passes else "bold red"))


def _table(section: Section, shown: int, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    rows = section.rows[:shown]
    # A column in which nothing stands takes no room.
    used = [i for i in range(len(section.columns)) if i == 0 or any(row.cells[i] for row in rows)]
    # A column of short words stays whole; those that can be broken at spaces give way to it, where there is room.
    texts = {i: [section.columns[i], *(row.cells[i] for row in rows)] for i in used}
    whole = {i for i in used if all(len(text) <= SHORT and " " not in text for text in texts[i])}
    needed = sum(max(map(len, texts[i])) + 1 if i in whole else SHORT // 2 for i in used)
    for i in used:
        fixed = i in whole and needed <= width
        table.add_column(section.columns[i], overflow="fold", no_wrap=fixed, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(row.cells[i]) for i in used), style=None if row.passes else "red")
    return table
