"""Draws the floors of a version of the library: python docs/draw_imports.py [COMMIT] > docs/static/imports.svg

A box is a package or a module of the top level, on the floor that the import-linter contract of that version gives it,
with its files and lines. A line is a package that imports another, as thick as there are files that do.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from html import escape

WIDTH, HEIGHT, GAP, ROW = 118, 40, 12, 92


def show(commit: str, path: str) -> str:
    return subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True).stdout


def room(module: str, rooms: list[str]) -> str | None:
    """The longest box that a module belongs to."""
    inside = [each for each in rooms if module == each or module.startswith(f"{each}.")]
    return max(inside, key=len, default=None)


def imported(text: str, modules: set[str]) -> set[str]:
    """The modules of the library that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                inner = f"{node.module}.{each.name}"
                names.add(inner if inner in modules else node.module)
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return names & modules


def main(commit: str = "HEAD") -> None:
    contract = tomllib.loads(show(commit, "pyproject.toml"))["tool"]["importlinter"]["contracts"][0]
    floors = [[name.strip().strip("()") for name in layer.split(":")] for layer in contract["layers"]]
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, "gradcombine"], capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {
        path[:-3].replace("/", ".").removesuffix(".__init__"): show(commit, path)
        for path in listed
        if path.endswith(".py")
    }
    rooms = [name for floor in floors for name in floor]
    files, lines, arrows = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for module, text in texts.items():
        own = room(module, rooms)
        if own is None:
            continue
        files[own] += 1
        lines[own] += text.count("\n")
        others = {room(name, rooms) for name in imported(text, set(texts))} - {own, None}
        arrows.update((own, other) for other in others if other is not None)
    widest = max(map(len, floors))
    across, down = widest * (WIDTH + GAP) + GAP, len(floors) * ROW + GAP + 20
    at: dict[str, tuple[float, float]] = {}
    for level, floor in enumerate(floors):
        margin = (across - len(floor) * (WIDTH + GAP) + GAP) / 2
        for i, name in enumerate(floor):
            at[name] = margin + i * (WIDTH + GAP), 24 + level * ROW
    total = f"{sum(files.values())} files, {sum(lines.values()):,} lines"
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" font-family="sans-serif">')
    print(f'<rect width="{across}" height="{down}" fill="white"/><text x="8" y="16" font-size="12">{total}</text>')
    for (a, b), count in arrows.items():
        (x, y), (u, v) = at[a], at[b]
        ends = f'x1="{x + WIDTH / 2}" y1="{y + HEIGHT}" x2="{u + WIDTH / 2}" y2="{v}"'
        title = f"<title>{count} files of {escape(a)} import {escape(b)}</title>"
        print(f'<line {ends} stroke="#3b6ea5" stroke-opacity="0.35" stroke-width="{count**0.5:.1f}">{title}</line>')
    for name, (x, y) in at.items():
        short = escape(name.removeprefix("gradcombine.").removeprefix("backends."))
        print(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="4" fill="#eef3f8" stroke="#3b6ea5"/>')
        size = f"{files[name]} files, {lines[name]:,} lines" if files[name] > 1 else f"{lines[name]:,} lines"
        for text, line, size_of in ((short, 17, 11), (size, 32, 9)):
            middle = f'x="{x + WIDTH / 2}" y="{y + line}" text-anchor="middle"'
            print(f'<text {middle} font-size="{size_of}">{text}</text>')
    print("</svg>")


if __name__ == "__main__":
    main(*sys.argv[1:])
