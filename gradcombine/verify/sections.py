"""What a report says, before it is a page or lines on a screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
