"""Sections of a report, and their output on a terminal; `page` renders them as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradcombine.errors import legible


class Cells(NamedTuple):
    """A row of a table.

    Attributes:
      link: anchor of the section that the row links to on a page.
    """

    cells: Sequence[str]
    passes: bool = True
    link: str = ""


class Histogram(NamedTuple):
    """A histogram of the elementwise differences of a leaf.

    Attributes:
      counts: height of each bar by its label.
    """

    title: str
    counts: Mapping[str, int]
    alt: str


class HeatMap(NamedTuple):
    """A heat map over leaves and steps.

    Attributes:
      values: by leaf, one number per step; NaN if the step lacks the leaf.
      ticks: labels of the colour bar, from 0 to the largest tick.
    """

    steps: Sequence[str]
    values: Mapping[str, Sequence[float]]
    ticks: Mapping[int, str]
    alt: str


class Curves(NamedTuple):
    """Curves over accumulation windows.

    Attributes:
      linear: the value up to which the symmetric logarithmic axis is linear; None for a linear axis.
    """

    curves: Mapping[str, Sequence[float]]
    ylabel: str
    linear: float | None
    alt: str


class Band(NamedTuple):
    """A loop in a timeline.

    Attributes:
      start, width: as fractions of the timeline.
      depth: number of enclosing bands.
      label: number of iterations.
      words: description.
    """

    start: float
    width: float
    depth: int
    label: str
    words: str


class Mark(NamedTuple):
    """A labelled event in a timeline.

    Attributes:
      at: its position, as a fraction of the timeline.
      words: description.
    """

    at: float
    label: str
    words: str


class Timeline(NamedTuple):
    """A timeline of successive events.

    Attributes:
      lanes: by name, heights from 0 to 1 of intervals of equal width.
      marks: drawn in the last lane, from left to right.
      length: the total length, in words.
      note: explains how to read it.
    """

    lanes: Mapping[str, Sequence[float]]
    bands: Sequence[Band]
    marks: Sequence[Mark]
    length: str
    note: str
    alt: str


Chart: TypeAlias = Histogram | HeatMap | Curves | Timeline


class Section(NamedTuple):
    """A section of a report.

    Attributes:
      charts: shown on a page only.
      folded: whether a page shows the table only after a click, and a terminal only its number of rows.
      whole: whether a terminal shows all rows of the table.
      anchor: target of links to the section.
      text: an explanation in Markdown, shown on a page only.
    """

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Cells] = ()
    folded: bool = False
    whole: bool = False
    anchor: str = ""
    text: str = ""

    def used(self, shown: int | None = None) -> list[int]:
        """Indices of the first column and of all columns that are not empty in the first ``shown`` rows."""
        return [i for i in range(len(self.columns)) if i == 0 or any(row.cells[i] for row in self.rows[:shown])]


SHOWN = 12
"""Number of rows of a long table that a terminal shows."""

LONGEST = 400
"""Most characters of a cell; the middle of a longer one is elided."""


def legible_lines(text: str) -> str:
    """Applies `gradcombine.errors.legible` to each line."""
    return "\n".join(map(legible, text.split("\n")))


def legible_section(section: Section) -> Section:
    """Makes the texts of a section, except for its charts, safe to print: see `gradcombine.errors.legible`."""
    rows = [row._replace(cells=[legible(x, LONGEST) for x in row.cells]) for row in section.rows]
    return section._replace(title=legible(section.title), note=legible_lines(section.note), rows=rows)


def show(console: Console, verdict: str, passes: bool | None, sections: Sequence[Section]) -> None:
    """Prints the sections, with the verdict before and after them.

    Args:
      console: to print to.
      verdict: a sentence.
      passes: colours the verdict green (True), red (False) or yellow (None: unknown).
      sections: in order. Long tables are cut after `SHOWN` rows.
    """
    answer = Text(legible(verdict), {True: "green", False: "bold red", None: "bold yellow"}[passes])
    sections = list(map(legible_section, sections))
    if any(section.rows and not section.folded for section in sections):
        console.print(answer)
        console.print()
    for section in sections:
        if section.folded:
            continue
        console.print(Text(section.title, "bold"))
        if section.note:
            console.print(Text(section.note, "dim"))
        if section.rows:
            shown = len(section.rows) if section.whole else min(SHOWN, len(section.rows))
            console.print(_table(section, shown, console.width) or _lines(section, shown, console.width))
            if len(section.rows) > shown:
                console.print(f"and {len(section.rows) - shown:,} more")
        console.print()
    folded = [f"{x.title} ({len(x.rows):,})" for x in sections if x.folded and x.rows]
    if folded:
        console.print(Text(f"Rows shown only by --html and --json: {', '.join(folded)}\n", "dim"))
    console.print(answer)


def _table(section: Section, shown: int, width: int) -> Table | None:
    """The rows as a table; None if it would have to break a word."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    rows = section.rows[:shown]
    used = section.used(shown)  # columns are separated by two spaces
    widths = _widths([[section.columns[i], *(row.cells[i] for row in rows)] for i in used], width - 2 * len(used) + 1)
    if widths is None:
        return None
    for i, fixed in zip(used, widths, strict=True):
        justify = "left" if i == 0 else "right"
        table.add_column(section.columns[i], overflow="fold", width=fixed, justify=justify)
    for row in rows:
        table.add_row(*(Text(row.cells[i]) for i in used), style=None if row.passes else "red")
    return table


def _lines(section: Section, shown: int, width: int) -> Text:
    """The rows as text: the first cell, and below it the other cells, each after the name of its column."""
    lines, used = list[tuple[str, str]](), section.used(shown)
    for row in section.rows[:shown]:
        style = "" if row.passes else "red"
        lines.append((f"{row.cells[used[0]]}\n", f"{style} bold"))
        cells = [f"{section.columns[i]} {row.cells[i]}" for i in used[1:] if row.cells[i]]
        lines.extend((f"  {line}\n", style) for line in _joined(cells, width - 2))
    return Text.assemble(*lines[:-1], (lines[-1][0].rstrip("\n"), lines[-1][1]))


def _joined(cells: Sequence[str], width: int) -> list[str]:
    """Joins cells with commas into lines of at most ``width`` characters, without breaking a cell."""
    lines = [""]
    for cell in cells:
        if lines[-1] and len(lines[-1]) + len(cell) + 2 > width:
            lines.append("")
        lines[-1] += f", {cell}" if lines[-1] else cell
    return lines


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths of the columns that break no word; None if ``room`` is too small for that."""
    least = [max((len(word) for text in texts for word in text.split()), default=0) for texts in columns]
    if sum(least) > room:
        return None
    chosen = [max(map(len, texts)) for texts in columns]
    while sum(chosen) > room:
        _, widest = max((size, i) for i, size in enumerate(chosen) if size > least[i])
        chosen[widest] -= 1
    return chosen
