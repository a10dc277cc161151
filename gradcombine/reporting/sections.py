"""Sections of a report: text, tables and charts, printed to a terminal; `page` renders them as HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradcombine.errors import legible


class Cells(NamedTuple):
    """One row of a table.

    Attributes:
      link: to which section of a page the row leads.
    """

    cells: Sequence[str]
    passes: bool = True
    link: str = ""


class Histogram(NamedTuple):
    """How many elements of a leaf are how far apart.

    Attributes:
      counts: from the label of each bar to its height.
    """

    title: str
    counts: Mapping[str, int]
    alt: str


class HeatMap(NamedTuple):
    """A number for each leaf and step.

    Attributes:
      values: by leaf, one for each step; NaN if the step lacks the leaf.
      ticks: the legend of the colours, from 0 to the largest tick.
    """

    steps: Sequence[str]
    values: Mapping[str, Sequence[float]]
    ticks: Mapping[int, str]
    alt: str


class Curves(NamedTuple):
    """Curves over the same windows.

    Attributes:
      linear: on a logarithmic axis, the number up to which it is linear; None for a linear axis.
    """

    curves: Mapping[str, Sequence[float]]
    ylabel: str
    linear: float | None
    alt: str


class Band(NamedTuple):
    """A part of a timeline that is repeated.

    Attributes:
      start, width: parts of the timeline.
      depth: how many bands are around it.
      label: how often.
      words: what it is.
    """

    start: float
    width: float
    depth: int
    label: str
    words: str


class Mark(NamedTuple):
    """A place of a timeline, its label, and what is there."""

    at: float
    label: str
    words: str


class Timeline(NamedTuple):
    """A timeline: events one after another.

    Attributes:
      lanes: by name, heights from 0 to 1 of equally wide parts.
      marks: in the last lane, from left to right.
      length: of all, in words.
      note: how to read it.
    """

    lanes: Mapping[str, Sequence[float]]
    bands: Sequence[Band]
    marks: Sequence[Mark]
    length: str
    note: str
    alt: str


Chart: TypeAlias = Histogram | HeatMap | Curves | Timeline


class Section(NamedTuple):
    """A part of a report: a note, charts, a table.

    Attributes:
      charts: shown on a page only.
      folded: whether the table is closed until it is clicked; a screen tells its number of rows.
      whole: whether a screen shows all rows of the table.
      anchor: the name that links have.
      text: an explanation in Markdown; shown on a page only.
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
        """The columns that are not empty in the first rows, and the first one."""
        return [i for i in range(len(self.columns)) if i == 0 or any(row.cells[i] for row in self.rows[:shown])]


SHOWN = 12
"""How many rows of a long table are shown."""

LONGEST = 400
"""Characters of a cell; of a longer one the middle is left out."""


def legible_lines(text: str) -> str:
    """`gradcombine.errors.legible` of each line."""
    return "\n".join(map(legible, text.split("\n")))


def legible_section(section: Section) -> Section:
    """The section, with names from files and programs as they may be shown: see `gradcombine.errors.legible`."""

    def chart(each: Chart) -> Chart:
        match each:
            case Histogram():
                return each._replace(title=legible(each.title, LONGEST), alt=legible(each.alt, 2 * LONGEST))
            case HeatMap():
                values = {legible(name, LONGEST): row for name, row in each.values.items()}
                return each._replace(steps=[legible(x, LONGEST) for x in each.steps], values=values)
            case Curves():
                return each
            case Timeline():
                bands = [x._replace(label=legible(x.label), words=legible(x.words)) for x in each.bands]
                marks = [x._replace(label=legible(x.label), words=legible(x.words)) for x in each.marks]
                return each._replace(bands=bands, marks=marks)

    rows = [row._replace(cells=[legible(x, LONGEST) for x in row.cells]) for row in section.rows]
    return section._replace(
        title=legible(section.title),
        note=legible_lines(section.note),
        charts=list(map(chart, section.charts)),
        rows=rows,
    )


def show(console: Console, verdict: str, passes: bool | None, sections: Sequence[Section]) -> None:
    """Prints the first rows of each section's table, between the verdict and the verdict once more.

    Args:
      passes: whether the answer is a good one, in green, or red; None, in yellow: it is not known.
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
        console.print(Text(f"Rows that only --html and --json have: {', '.join(folded)}\n", "dim"))
    console.print(answer)


def _table(section: Section, shown: int, width: int) -> Table | None:
    """The rows as a table; None where a word of one has no room in its column."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    rows = section.rows[:shown]
    used = section.used(shown)  # two spaces are between them
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
    """The rows one below the other: the first cell, and the others with the names of their columns."""
    lines, used = list[tuple[str, str]](), section.used(shown)
    for row in section.rows[:shown]:
        style = "" if row.passes else "red"
        lines.append((f"{row.cells[used[0]]}\n", f"{style} bold"))
        cells = [f"{section.columns[i]} {row.cells[i]}" for i in used[1:] if row.cells[i]]
        lines.extend((f"  {line}\n", style) for line in _joined(cells, width - 2))
    return Text.assemble(*lines[:-1], (lines[-1][0].rstrip("\n"), lines[-1][1]))


def _joined(cells: Sequence[str], width: int) -> list[str]:
    """Lines of cells with commas between; none is broken."""
    lines = [""]
    for cell in cells:
        if lines[-1] and len(lines[-1]) + len(cell) + 2 > width:
            lines.append("")
        lines[-1] += f", {cell}" if lines[-1] else cell
    return lines


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """Widths at which no word is broken; None if there is no room for that."""
    least = [max((len(word) for text in texts for word in text.split()), default=0) for texts in columns]
    if sum(least) > room:
        return None
    chosen = [max(map(len, texts)) for texts in columns]
    while sum(chosen) > room:
        _, widest = max((size, i) for i, size in enumerate(chosen) if size > least[i])
        chosen[widest] -= 1
    return chosen
