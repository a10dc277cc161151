"""Hostile leaf names from files, shown on the terminal, in HTML and in JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from gradcombine import GradCombineError
from gradcombine.errors import legible
from tests.verify.diff.test_command import run

NAMES = {
    "clears the screen": "w\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;all leaves pass\x07",
    "a control of 8 bits": "\x9b31mw",
    "turns the writing around": "\u202egniht",
    "isolates": "\u2066x",
    "two lines": "w\nAll 3 leaves pass.",
    "returns": "w\rAll 3 leaves pass.",
    "a lone surrogate": "\ud800w",
    "half a formula": "$x_{$",
    "a formula": "$\\undefined{1}$",
    "markup": "[/red][bold]w",
    "a page's": "<script>alert(1)</script>{{ 7 }}",
    "5 MB": "z" * 5_000_000,
}


def written(path: Path, names: list[str], start: int) -> Path:
    """Writes a .safetensors file, whose JSON header allows arbitrary names."""
    entries = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i, name in enumerate(names)
    }
    header = json.dumps(entries).encode()
    data = np.arange(start, start + 4 * len(names), dtype=np.float32).tobytes()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_name_changes_nothing_but_its_own_cell(tmp_path: Path, name: str) -> None:
    """For a compared leaf, one without a counterpart, and in an error; the page includes a histogram of the leaf."""
    a = written(tmp_path / "a.safetensors", ["other", NAMES[name], NAMES[name] + "alone"], 0)
    b = written(tmp_path / "b.safetensors", ["other", NAMES[name]], 1)
    status, output = run(a, b, "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    assert status == 1
    assert all(line.isprintable() and len(line) < 10_000 for line in output.split("\n"))
    assert "All 3 leaves pass." not in output.split("\n")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and len(page) < 10**6
    assert json.loads((tmp_path / "a.json").read_text())["only_a"] == [NAMES[name] + "alone"]
    message = str(GradCombineError("diff", "a leaf", NAMES[name], path=NAMES[name]))
    assert message.isprintable() and len(message) < 1000


def test_what_is_printable_stays() -> None:
    assert legible("größe/\u5c42 \u03b2") == "größe/\u5c42 \u03b2"
    assert legible("a\x00b\u2028") == r"a\x00b\u2028"
    assert legible("x" * 50, 20) == f"{'x' * 10} ... {'x' * 10}"
