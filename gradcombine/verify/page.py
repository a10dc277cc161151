"""A report as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure as Plot

from gradcombine.verify.report import Figure, Section


def write(path: Path, title: str, verdict: str, passes: bool, sections: Sequence[Section]) -> None:
    """Writes the page.

    Args:
      path: of the file.
      title, verdict: its head line, and the answer in one sentence.
      passes: whether the answer is a good one.
      sections: what follows.
    """
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(template)
    text = page.render(title=title, verdict=verdict, passes=passes, sections=sections)
    path.write_text(text, encoding="utf-8")


def plot(width: float, height: float) -> tuple[Plot, Any]:
    """An empty plot of this size in inches, and its axes; no window and no global state is involved."""
    figure = Plot(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def drawn(figure: Plot, alt: str) -> Figure:
    """The plot as a part of the page; the same plot gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return Figure(base64.b64encode(buffer.getvalue()).decode("ascii"), alt)
