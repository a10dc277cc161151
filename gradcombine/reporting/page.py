"""Writes a report as one self-contained HTML file, for instance to attach to a pull request."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markdown_it import MarkdownIt
from markupsafe import Markup
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from gradcombine.errors import legible
from gradcombine.reporting.sections import (
    LONGEST,
    Band,
    Chart,
    Curves,
    HeatMap,
    Histogram,
    Section,
    Timeline,
    legible_lines,
    legible_section,
)

FOLDED = 20
"""Longer tables are folded, unless one of their rows fails."""

LABEL = 0.07
"""Width of a label on a phone, as a fraction of the timeline."""

BLUE = "#3b6ea5"
_LINES = ("-", "--", ":")


def write(path: Path, title: str, verdict: str, passes: bool | None, sections: Sequence[Section]) -> None:
    """Writes the page.

    Args:
      path: of the file.
      title: headline.
      verdict: a sentence.
      passes: whether the verdict is good; None if it is unknown.
      sections: in order.
    """
    sections = list(map(legible_section, sections))
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_finalized,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
    )
    timeline, markdown = environment.get_template("timeline.html"), MarkdownIt()

    def drawn(chart: Chart) -> _Drawing | Markup:
        if isinstance(chart, Timeline):
            labelled, named = _labelled([mark.at for mark in chart.marks]), _named(chart.bands)
            return Markup(timeline.render(chart=chart, lanes=_outlines(chart), labelled=labelled, named=named))
        return _Drawing(_draw(chart), legible(chart.alt, 2 * LONGEST))

    parts = [
        (
            section,
            [drawn(chart) for chart in section.charts],
            section.used(),
            section.folded or (len(section.rows) > FOLDED and all(row.passes for row in section.rows)),
            Markup(markdown.render(section.text)),
        )
        for section in sections
    ]
    text = environment.get_template("page.html").render(title=title, verdict=verdict, passes=passes, parts=parts)
    path.write_text(text, encoding="utf-8")


def _finalized(value: object) -> object:
    """The text of a value that a template shows, except for markup."""
    return legible_lines(value) if type(value) is str else value


def _outlines(chart: Timeline) -> dict[str, str]:
    """The outline of each lane as an SVG path in a 1000 x 1000 square."""
    outlines = dict[str, str]()
    for name, heights in chart.lanes.items():
        steps, last = list[str](), -1
        for i, height in enumerate(heights):
            top = 1000 - round(1000 * height)
            if top != last:
                steps.append(f"H{1000 * i / len(heights):g}V{top}")
                last = top
        outlines[name] = f"M0 1000{''.join(steps)}H1000V1000Z"
    return outlines


def _labelled(positions: Sequence[float]) -> list[int]:
    """Indices of the positions, from left to right, that have room for a label."""
    chosen, last = list[int](), -1.0
    for i, position in enumerate(positions):
        if position - last >= LABEL:
            chosen.append(i)
            last = position
    return chosen


def _named(bands: Sequence[Band]) -> set[int]:
    """Indices of the bands that have room for a label among the bands of their depth."""
    depths = ([i for i, band in enumerate(bands) if band.depth == depth] for depth in {x.depth for x in bands})
    rows = ((row, _labelled([bands[i].start for i in row])) for row in depths)
    return {row[i] for row, chosen in rows for i in chosen if bands[row[i]].start <= 1 - LABEL}


class _Drawing(NamedTuple):
    """A chart as a base64-encoded SVG, with its alternative text."""

    svg: str
    alt: str


def _draw(chart: Histogram | HeatMap | Curves) -> str:
    """Draws a chart as a base64-encoded SVG. Equal charts give equal bytes."""
    match chart:
        case Histogram():
            figure = _histogram(chart)
        case HeatMap():
            figure = _heat_map(chart)
        case Curves():
            figure = _curves(chart)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})  # pyright: ignore[reportUnknownMemberType]
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _plot(width: float, height: float) -> tuple[Figure, Any]:
    # Not with pyplot, which has global state and may open windows.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _histogram(chart: Histogram) -> Figure:
    figure, axes = _plot(4.2, 2.4)
    labels = list(chart.counts)
    axes.bar(range(len(labels)), list(chart.counts.values()), color=BLUE)
    axes.set_yscale("symlog", linthresh=1)
    shown = range(0, len(labels), max(1, math.ceil(len(labels) / 8)))
    axes.set_xticks(list(shown), [labels[i] for i in shown], fontsize=7)
    axes.set_title(_short(chart.title), fontsize=8)
    axes.set_xlabel("ulp", fontsize=7)
    axes.set_ylabel("elements", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    return figure


def _heat_map(chart: HeatMap) -> Figure:
    figure, axes = _plot(min(14, 4 + 0.25 * len(chart.steps)), 1.5 + 0.18 * len(chart.values))
    top = max(chart.ticks)
    shades = (f"#{255 - 3 * i:02x}{200 - 6 * i:02x}{120 - 3 * i:02x}" for i in range(top))
    colours = ListedColormap(["#f2f2f2", *shades])
    values = np.array(list(chart.values.values()))
    image = axes.imshow(values, aspect="auto", cmap=colours, vmin=-0.5, vmax=top + 0.5, interpolation="nearest")
    axes.set_yticks(range(len(chart.values)), list(map(_short, chart.values)), fontsize=6)
    axes.set_xticks(range(len(chart.steps)), list(map(_short, chart.steps)), fontsize=6)
    axes.set_xlabel("step", fontsize=7)
    ticks: Any = figure.colorbar(image, ax=axes, ticks=list(chart.ticks)).ax  # pyright: ignore[reportUnknownMemberType]
    ticks.set_yticklabels(list(chart.ticks.values()), fontsize=6)
    return figure


def _curves(chart: Curves) -> Figure:
    figure, axes = _plot(6.5, 3.2)
    for i, (name, values) in enumerate(chart.curves.items()):
        line = _LINES[i % len(_LINES)] if chart.linear is None else ".-"
        axes.plot(range(1, len(values) + 1), values, line, label=name, linewidth=1.6)
    if chart.linear is not None:
        axes.set_yscale("symlog", linthresh=chart.linear)
    axes.set_xlabel("window", fontsize=8)
    axes.set_ylabel(chart.ylabel, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    return figure


def _short(name: str) -> str:
    """The end of a name, legible and with ``$`` escaped for matplotlib."""
    name = legible(name)
    return (name if len(name) <= 60 else f"...{name[-57:]}").replace("$", r"\$")
