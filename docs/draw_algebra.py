"""Draws the algebra: `python docs/draw_algebra.py` writes docs/static/algebra-light.svg and algebra-dark.svg."""

from __future__ import annotations

from pathlib import Path

THEMES = {
    "light": {"text": "#1f2328", "quiet": "#57606a", "line": "#8c959f", "fill": "#ffffff"},
    "dark": {"text": "#e6edf3", "quiet": "#9da7b3", "line": "#6e7681", "fill": "#161b22"},
}
LIST, TIME, REPLICAS = "#0969da", "#1a7f37", "#bc4c00"
ON_DARK = {LIST: "#58a6ff", TIME: "#3fb950", REPLICAS: "#f0883e"}
ROWS, COLUMNS, LISTED = 3, 4, 3
CELL, GAP, LEFT, TOP = 96, 24, 150, 84
"""Width of a microbatch, what lies between two, and where the first is, in pixels."""


def picture(theme: str) -> str:
    colors = THEMES[theme]

    def shade(color: str) -> str:
        return ON_DARK[color] if theme == "dark" else color

    drawn: list[str] = []

    def text(
        x: float, y: float, words: str, color: str, size: int = 15, anchor: str = "middle", extra: str = ""
    ) -> None:
        drawn.append(
            f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" text-anchor="{anchor}"{extra}>{words}</text>'
        )

    def arrow(path: str, color: str) -> None:
        drawn.append(
            f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.5" marker-end="url(#{color[1:]})"/>'
        )

    def box(x: float, y: float, width: float, height: float, color: str) -> None:
        drawn.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colors["fill"]}" '
            f'stroke="{color}" stroke-width="1.5"/>'
        )

    height = 56
    end = LEFT + COLUMNS * (CELL + GAP)
    middle = TOP + (ROWS - 1) * (height + 30) / 2 + height / 2
    for row in range(ROWS):
        y = TOP + row * (height + 30)
        text(LEFT - 20, y + height / 2 + 5, f"replica {row}", colors["quiet"], anchor="end")
        for column in range(COLUMNS):
            x = LEFT + column * (CELL + GAP)
            box(x, y, CELL, height, colors["line"])
            for k in range(LISTED):
                box(x + 10 + k * 27, y + 17, 22, 22, shade(LIST))
            if column + 1 < COLUMNS:
                arrow(f"M{x + CELL + 2},{y + height / 2} h{GAP - 9}", shade(TIME))
        start, stop = end - GAP + 6, end + 62
        arrow(
            f"M{start},{y + height / 2} C{start + 50},{y + height / 2} {stop - 50},{middle} {stop},{middle}",
            shade(REPLICAS),
        )
    box(end + 72, middle - 34, 132, 68, colors["text"])
    text(end + 138, middle - 5, "one gradient", colors["text"])
    text(end + 138, middle + 17, "divided once", colors["quiet"], 13)
    for column in range(COLUMNS):
        text(LEFT + column * (CELL + GAP) + CELL / 2, TOP - 14, f"microbatch {column}", colors["quiet"], 13)
    below = TOP + ROWS * (height + 30) + 18
    names = ("a list: gc.combine", LIST), ("time: gc.accumulate", TIME), ("replicas: gc.all_reduce", REPLICAS)
    for k, (name, color) in enumerate(names):
        text(LEFT + k * 232, below, name, shade(color), 16, "start", ' font-weight="600"')
    text(LEFT, 34, "One monoid: init, update, merge, finalize", colors["text"], 19, "start", ' font-weight="600"')
    width, height = end + 222, below + 22
    heads = "".join(
        f'<marker id="{shade(c)[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{shade(c)}"/></marker>'
        for c in ON_DARK
    )
    title = "Contributions in lists, over time and over replicas become one gradient"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" '
        f'font-family="system-ui, sans-serif"><title>{title}</title><defs>{heads}</defs>{"".join(drawn)}</svg>\n'
    )


if __name__ == "__main__":
    for theme in THEMES:
        (Path(__file__).parent / "static" / f"algebra-{theme}.svg").write_text(picture(theme))
