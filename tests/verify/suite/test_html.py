"""The HTML page and the terminal curves of a small hand-made verification report."""

from __future__ import annotations

import io
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from gradcombine.reporting import page
from gradcombine.reporting.sections import Cells, Section, show
from gradcombine.verify.command import app
from gradcombine.verify.compare.ulp import NAN_DISTANCE
from gradcombine.verify.suite import frameworks, run
from gradcombine.verify.suite import outcomes as findings
from gradcombine.verify.suite.outcomes import BITS, BOUND, Finding, Report


def row(framework: str, replicas: int, promise: str, holds: bool, ulps: int, **others: Any) -> Finding:
    labels = {"framework": framework, "mode": "pmap", "place": "replicas", "replicas": replicas, "order": "tree"}
    return Finding("combine", labels, promise, holds, ulps, 1e-7, 0.5, **others)


def report(*more: Finding) -> Report:
    findings = [row("numpy", 1, BOUND, True, 3), row("jax", 2, BITS, True, 0, equal=True), *more]
    findings.append(Finding("training", {"framework": "jax", "law": "falls"}, "falls", True, share=0.3125))
    losses = {"jax": [2.5, 1.5, 0.5], "tensorflow": [2.5, 1.5, 0.5], "mean of means": [2.5, 1.75, 1.25]}
    settings = {"command": "gradcombine verify", "date": "2026-01-01", "versions": {"numpy": "<2>"}}
    settings |= {"libraries": {}, "machine": {"python": "3.11"}, "replicas": [1, 2], "inject_fault": False}
    return Report(findings, losses, settings, 4.0)


def written(path: Path, report: Report) -> str:
    """The page of a report."""
    page.write(path, "gradcombine verify", findings.verdict(report), not report.failed, findings.sections(report))
    return re.sub(r"</td>\s+<td", "</td><td", path.read_text().replace('<td class="long">', "<td>"))


BROKEN = (row("jax", 4, BITS, False, NAN_DISTANCE), row("jax", 8, BITS, False, 7))


@pytest.mark.sampled
@pytest.mark.parametrize("more", [(), BROKEN], ids=["kept", "broken"])
def test_a_page_holds_every_row_and_stands_alone(tmp_path: Path, more: tuple[Finding, ...]) -> None:
    text = written(tmp_path / "out.html", report(*more))
    found = re.findall(r"<tr(?: class=\"bad\")?>.*?</tr>", text, re.S)
    assert len([line for line in found if "<td>pmap</td>" in line]) == 2 + len(more)
    assert "<td>numpy pmap</td><td>0.5</td>" in text
    assert f"<td>jax pmap</td><td>{'no' if more else '='}</td>" in text
    assert "<td>3 ulp</td>" in text and "<td>equal bits</td>" in text and "<td>a ratio of 0.31</td>" in text
    assert text.count("data:image/svg+xml;base64,") == 2
    assert "<td>numpy &lt;2&gt;</td>" in text and "<td>replicas</td><td>1 2</td>" in text
    assert "<td>1.7500000</td>" in text
    assert "http" not in text.replace("http://www.w3.org", "") and "<script" not in text


@pytest.mark.full
def test_a_broken_promise_is_named_first(tmp_path: Path) -> None:
    text = written(tmp_path / "out.html", report(*BROKEN))
    assert "2 of 5 rows fail." in text
    assert text.index("Failed") < text.index("Combine: the same contributions")
    assert "<td>combine: jax / pmap / replicas / 4 / tree</td><td>bits</td><td>NaN</td>" in text
    assert text.count('class="bad"') == 5
    assert "Failed" not in {each.title for each in findings.sections(report())}


def test_the_grid_has_the_worst_of_the_numbers_of_replicas_in_a_cell() -> None:
    def grid(*more: Finding) -> dict[str, tuple[Any, bool]]:
        (table,) = (each for each in findings.sections(report(*more)) if each.title.startswith("Combine: "))
        return {line.cells[0]: (line.cells[1:], line.passes) for line in table.rows}

    bound = row("jax", 8, BOUND, True, 3)._replace(share=0.75)
    assert grid(bound) == {"numpy pmap": (("0.5",), True), "jax pmap": (("0.75",), True)}
    other = bound._replace(labels=bound.labels | {"place": "time"})
    assert grid(other) == {"numpy pmap": (("0.5", ""), True), "jax pmap": (("=", "0.75"), True)}
    other = bound._replace(labels=bound.labels | {"order": "sequential"})
    assert grid(other) == {"numpy pmap": (("0.5",), True), "jax pmap": (("=\N{NO-BREAK SPACE}0.75",), True)}
    assert grid(BROKEN[1])["jax pmap"] == (("no",), False)


@pytest.mark.parametrize(
    ("curves", "drawn"),
    [
        ([range(8)], ["▁▂▃▄▅▆▇█"]),
        ([[5, 5]], ["▁▁"]),
        ([[0, 2, np.inf, np.nan]], ["▁█!!"]),
        ([[4, 0], [2, np.float32(1)]], ["█▁", "▅▃"]),
    ],
)
def test_curves_share_a_scale(curves: list[list[float]], drawn: list[str]) -> None:
    named = {str(i): list(map(float, curve)) for i, curve in enumerate(curves)}
    (losses,) = (x for x in findings.sections(report()._replace(curves=named)) if x.title == findings.LOSSES)
    assert [row.cells[1] for row in losses.rows] == drawn
    assert losses.rows[0].cells[2] == f"{named['0'][0]:.4f} to {named['0'][-1]:.4f}"


def test_lines_of_a_note_stay_lines() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    show(console, "fine", True, [Section("Title", "first\nsecond \x1b[2K", columns=("a",), rows=[Cells(("1",))])])
    text = console.export_text()
    assert "first\nsecond \\x1b[2K\n" in text and "\\n" not in text


def test_a_page_escapes_its_title_and_verdict(tmp_path: Path) -> None:
    """They contain names of files and leaves."""
    page.write(tmp_path / "page.html", "a\x1b[2K<b>", "w\u202e", None, [])
    text = (tmp_path / "page.html").read_text()
    assert "a\\x1b[2K&lt;b&gt;" in text and "w\\u202e" in text
    assert "\x1b" not in text and "\u202e" not in text


def test_80_columns_break_no_word_and_the_verdict_is_first_and_last() -> None:
    labels = {"framework": "tensorflow", "mode": "MirroredStrategy", "replicas": "1 2 4 8"}
    where = product(("list", "time", "replicas", "time x replicas"), ("sequential", "tree"))
    rows = [
        Finding("combine", labels | {"place": place, "order": order}, BOUND, True, 956, None, 0.0625)
        for place, order in where
    ]
    parts = findings.sections(report()._replace(findings=rows))
    console = Console(width=80, file=io.StringIO())
    show(console, "All is well.", True, parts)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    (table,) = (part for part in parts if part.title.startswith("Combine: "))
    texts = *table.columns, *(text for row in table.rows for text in row.cells)
    assert set(" ".join(texts).split()) <= set(" ".join(lines).split())
    assert max(map(len, lines)) <= 80 and lines[0] == lines[-1] == "All is well."


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_name_and_no_number_is_folded(width: int) -> None:
    name, worst = "params/encoder/layers_0/attention/query/kernel", "[196] -1.2826493 | -1.2827775"
    columns = ("leaf", "shape", "dtype", "largest", "median", "relative", "worst")
    rows = [Cells((name, "64 x 64", "float32", "16,777,216 ulp", "1,076 ulp", "3.3e-05", worst), False)]
    console = Console(width=width, file=io.StringIO())
    show(console, "1 does not pass.", False, [Section("Leaves", columns=columns, rows=rows)])
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert max(map(len, text.splitlines())) <= width
    assert all(word in text for word in (name, *worst.split(), "16,777,216", "3.3e-05"))


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with the verification replaced by a stub."""
    monkeypatch.setattr(frameworks, "prepare_devices", lambda: None)
    monkeypatch.setattr(
        run, "verify", lambda replicas, full, inject_fault, started: report(*(BROKEN if inject_fault else ()))
    )


@pytest.mark.full
@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize(("options", "status"), [([], 0), (["--inject-fault"], 1)])
def test_the_command_writes_the_page(tmp_path: Path, options: list[str], status: int) -> None:
    path = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["verify", "--html", str(path), *options], env={"COLUMNS": "120"})
    assert done.exit_code == status, done.output
    assert re.search("jax +█▅▁ +2.5000 to 0.5000", done.output)
    assert ("rows fail." in path.read_text()) == bool(status)
    assert ("expected bits, measured NaN" in done.output) == bool(status)


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path: Path, option: str) -> None:
    for path in (tmp_path / "nowhere" / "out", tmp_path):
        done = CliRunner().invoke(app, ["verify", option, str(path)])
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"verify: expected a path in an existing folder for {option}, received ")
