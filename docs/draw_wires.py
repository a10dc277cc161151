"""Draws the results of `python benchmarks/wires.py --store`: `python docs/draw_wires.py`.

Writes docs/static/wires-light.svg and wires-dark.svg, and the tables of docs/performance.md, "Wires".
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED, PAGE = ROOT / "benchmarks/wires.json", ROOT / "docs/performance.md"
PLACE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of the table -->)", re.S)
THEMES = {
    "light": {"text": "#1f2328", "quiet": "#57606a", "line": "#d0d7de", "ours": "#1a7f37", "hops": "#bc4c00"},
    "dark": {"text": "#e6edf3", "quiet": "#9da7b3", "line": "#3d444d", "ours": "#3fb950", "hops": "#f0883e"},
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480, 340, 48, 12, 64, 44
LEAST, MOST = 1e-3, 1.0
HOPS, BASE = "bfloat16 at each hop", "no wire"
DRAWN = (HOPS, 'cast("bfloat16")', "blocks(8)", 'cast("float8_e4m3")', "blocks(4)")


def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text())


def picture(theme: str) -> str:
    """The error of each wire over the number of replicas as SVG, both axes logarithmic."""
    colors, errors = THEMES[theme], stored()["error"]
    counts = [int(n) for n in errors[HOPS]]

    def at(n: float, error: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * math.log(n / counts[0]) / math.log(counts[-1] / counts[0])
        y = TOP + (HEIGHT - TOP - BOTTOM) * math.log(MOST / error) / math.log(MOST / LEAST)
        return round(x, 1), round(y, 1)

    def text(x: float, y: float, words: str, color: str, size: int = 13, extra: str = "") -> str:
        return f'<text x="{x}" y="{y}" fill="{colors[color]}" font-size="{size}"{extra}>{words}</text>'

    middle, end = ' text-anchor="middle"', ' text-anchor="end"'
    drawn = [
        text(8, 22, "Error of a sum over N replicas, relative to float64", "text", 16, ' font-weight="600"'),
        text(8, 42, "root mean square; green: sent through a wire", "quiet"),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "N", "quiet", 13, middle),
    ]
    for k in range(round(math.log10(LEAST)), round(math.log10(MOST)) + 1):
        y = at(counts[0], 10.0**k)[1]
        drawn.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{colors["line"]}"/>')
        drawn.append(text(LEFT - 6, y + 4, "1" if k == 0 else f"1e{k}", "quiet", 12, end))
    drawn += [text(at(n, LEAST)[0], HEIGHT - BOTTOM + 18, str(n), "quiet", 12, middle) for n in counts]
    for name in DRAWN:
        points, color = [at(int(n), error) for n, error in errors[name].items()], "hops" if name == HOPS else "ours"
        line = " ".join(f"{x},{y}" for x, y in points)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{colors[color]}" stroke-width="2"/>')
        drawn += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colors[color]}"/>' for x, y in points]
        x, y = points[2 if name == HOPS else 3]
        below = name == 'cast("bfloat16")'
        drawn.append(text(x, y + (18 if below else -8), name.replace('"', "&quot;"), color, 12, middle))
    label = "The error of an all-reduce in bfloat16 grows with the number of replicas; with a wire it is constant"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" '
    parts = "\n".join(drawn)
    return f'{head}font-family="system-ui, sans-serif"><title>{label}</title>\n{parts}\n</svg>\n'


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def ruled(head: list[str], rows: list[list[str]]) -> str:
    return row(head) + row(["---"] * len(head)) + "".join(map(row, rows))


def span(name: str) -> str:
    """The name, formatted as code if it is a call."""
    return f"`{name}`" if "(" in name or "=" in name else name


def error_table() -> str:
    errors = stored()["error"]
    rows = [[n, *(f"{column[n]:.1e}" for column in errors.values())] for n in errors[HOPS]]
    return ruled(["N", *map(span, errors)], rows)


def loss_table() -> str:
    """The mean loss over the seeds, and the loss of each seed relative to no wire."""
    losses = stored()["loss"]
    rows = list[list[str]]()
    for name, found in losses.items():
        over = [f"{100 * (x / base - 1):+.2f}" for x, base in zip(found, losses[BASE], strict=True)]
        rows.append([span(name), f"{sum(found) / len(found):.3f}", "" if name == BASE else ", ".join(over)])
    return ruled(["sent", "nats a token", "over no wire, %, by seed"], rows)


def page() -> str:
    """The page with the tables replaced."""
    tables = iter((error_table(), loss_table()))
    return PLACE.sub(lambda _: next(tables), PAGE.read_text())


if __name__ == "__main__":
    for theme in THEMES:
        (ROOT / f"docs/static/wires-{theme}.svg").write_text(picture(theme))
    PAGE.write_text(page())
