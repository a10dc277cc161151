"""Draws the results of `python benchmarks/gate.py --store`: `python docs/draw_performance.py`.

Writes docs/static/performance-light.svg and performance-dark.svg, and the table of docs/performance.md.
"""

from __future__ import annotations

import json
import math
import re
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RATIOS, PAGE = ROOT / "benchmarks/ratios.json", ROOT / "docs/performance.md"
PLACE = re.compile(r"(?<=<!-- ratios: begin -->\n).*?(?=<!-- ratios: end -->)", re.S)
THEMES = {
    "light": {"text": "#1f2328", "quiet": "#57606a", "line": "#d0d7de", "faster": "#1a7f37", "slower": "#bc4c00"},
    "dark": {"text": "#e6edf3", "quiet": "#9da7b3", "line": "#3d444d", "faster": "#3fb950", "slower": "#f0883e"},
}
WIDTH, EDGE, TITLE, ROW = 480, 8, 30, 44
"""Sizes in pixels: the width, narrow enough for a phone, the margin, and the heights of a title and of a row."""
LEAST, MOST = 1 / 32, 64
"""Ends of the logarithmic axis."""


def rows() -> list[dict[str, Any]]:
    return json.loads(RATIOS.read_text())["rows"]


def picture(theme: str) -> str:
    """A bar per ratio, starting at 1, the peer's time; a line is the median's interval, a triangle the aim."""
    colors, drawn = THEMES[theme], list[str]()

    def at(ratio: float) -> float:
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return round(EDGE + share * (WIDTH - 2 * EDGE), 1)

    def text(x: float, y: float, words: str, color: str, size: int, extra: str = "") -> None:
        drawn.append(f'<text x="{x}" y="{y}" fill="{colors[color]}" font-size="{size}"{extra}>{words}</text>')

    y = 22
    text(EDGE, y, "CPU time relative to the peer's", "text", 16, ' font-weight="600"')
    text(EDGE, y + 20, "left of 1: less than the peer; a triangle is the aim", "quiet", 13)
    y += 34
    top = y + 10
    ticks = [2.0**k for k in range(round(math.log2(LEAST)), round(math.log2(MOST)) + 1)]
    for title, group in groupby(rows(), key=lambda row: row["group"]):
        y += TITLE
        text(EDGE, y, escape(title), "quiet", 13, ' font-weight="600"')
        for row in group:
            own, ratio = escape(row["own"]), row["ratio"]
            text(EDGE, y + 20, f"{own} / {escape(row['peer'])}", "text", 13)
            text(WIDTH - EDGE, y + 20, figure(ratio), "text", 13, ' text-anchor="end" font-weight="600"')
            start, stop = sorted((at(ratio), at(1)))
            color = colors["faster" if ratio <= 1 else "slower"]
            drawn.append(f'<rect x="{start}" y="{y + 26}" width="{stop - start:.1f}" height="9" fill="{color}"/>')
            low, high = at(row["low"]), at(row["high"])
            drawn.append(f'<path d="M{low},{y + 30.5}H{high}" stroke="{colors["text"]}" stroke-width="2"/>')
            if row["aim"] is not None:
                drawn.append(f'<path d="M{at(row["aim"])},{y + 36} l4,6 h-8 z" fill="{colors["quiet"]}"/>')
            y += ROW
    y += 12
    lines = "".join(
        f'<path d="M{at(x)},{top}V{y}" stroke="{colors["quiet" if x == 1 else "line"]}"/>'
        f'<text x="{at(x)}" y="{y + 16}" fill="{colors["quiet"]}" font-size="12" text-anchor="middle">{label(x)}</text>'
        for x in ticks[1:-1]
    )
    title = "Time of the library's calls relative to their peers, one bar per call"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 26}" role="img" aria-label="{title}" '
        f'font-family="system-ui, sans-serif"><title>{title}</title>{lines}{"".join(drawn)}</svg>\n'
    )


def label(tick: float) -> str:
    return f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}"


def figure(ratio: float) -> str:
    """A ratio with two significant digits.

    >>> figure(1.0349), figure(0.0871)
    ('1.03', '0.087')
    """
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def table() -> str:
    """The ratios as a Markdown table."""
    lines = ["| call | relative to | CPU time | time | aim | |", "| --- | --- | --- | --- | --- | --- |"]
    for title, group in groupby(rows(), key=lambda row: row["group"]):
        lines.append(f"| **{title}** | | | | | |")
        for row in group:
            aim = row["aim"]
            status = (
                "" if aim is None else "reached" if row["ratio"] <= aim else "missed" if row["low"] > aim else "open"
            )
            ratio = f"{figure(row['ratio'])} ({figure(row['low'])}-{figure(row['high'])})"
            cells = row["own"], row["peer"], ratio, figure(row["clock"]), "" if aim is None else figure(aim), status
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table replaced."""
    return PLACE.sub(lambda _: table(), PAGE.read_text())


if __name__ == "__main__":
    for theme in THEMES:
        (ROOT / f"docs/static/performance-{theme}.svg").write_text(picture(theme))
    PAGE.write_text(page())
