"""Draws the layers of the library at a commit: python docs/draw_imports.py [COMMIT] > docs/static/imports.svg

A box is a package or top-level module with its numbers of files and lines, on its layer of the import-linter contract.
A line means that one package imports another; it is thicker the more files do.
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


def box_of(module: str, boxes: list[str]) -> str | None:
    """The innermost box that contains a module."""
    return max((box for box in boxes if module == box or module.startswith(f"{box}.")), key=len, default=None)


def imported(text: str, modules: set[str]) -> set[str]:
    """The library's modules that a file imports."""
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
    layers = [[name.strip().strip("()") for name in layer.split(":")] for layer in contract["layers"]]
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", commit, "gradcombine"], capture_output=True, text=True, check=True
    ).stdout.split()
    texts = {
        path[:-3].replace("/", ".").removesuffix(".__init__"): show(commit, path)
        for path in listed
        if path.endswith(".py")
    }
    boxes = [name for layer in layers for name in layer]
    files, lines, arrows = Counter[str](), Counter[str](), Counter[tuple[str, str]]()
    for module, text in texts.items():
        box = box_of(module, boxes)
        if box is None:
            continue
        files[box] += 1
        lines[box] += text.count("\n")
        others = {box_of(name, boxes) for name in imported(text, set(texts))} - {box, None}
        arrows.update((box, other) for other in others if other is not None)
    widest = max(map(len, layers))
    across, down = widest * (WIDTH + GAP) + GAP, len(layers) * ROW + GAP + 20
    at: dict[str, tuple[float, float]] = {}
    for level, layer in enumerate(layers):
        margin = (across - len(layer) * (WIDTH + GAP) + GAP) / 2
        for i, name in enumerate(layer):
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
