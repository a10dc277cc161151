"""The report as a page with plots, to be attached to a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gradcombine.verify import page
from gradcombine.verify.sections import Cells, Figure, Section
from gradcombine.verify.suite.findings import BITS, BOUND, Finding, Report
from gradcombine.verify.suite.report import NOTES, TITLES, found, number
from gradcombine.verify.ulp import NAN_DISTANCE

_COLOURS = {BITS: "#2e7d32", BOUND: "#3b6ea5"}
_LINES = ("-", "--", ":")


def write(path: Path, report: Report) -> None:
    """Writes the page: what was found, row by row, the distances, the curves, and all that ran with its versions."""
    rows, failed = len(report.findings), report.failed
    verdict = (
        f"All {rows} rows keep what they promise." if not failed else f"{len(failed)} of {rows} promises not kept."
    )
    sections = [_section(name, list(rows)) for name, rows in groupby(report.findings, key=lambda row: row.section)]
    if failed:
        columns = ("row", "promise", "found")
        names = [Cells((row.name, row.promise, found(row)), False) for row in failed]
        sections.insert(0, Section("Not kept", columns=columns, rows=names))
    page.write(path, "gradcombine verify", verdict, not failed, [*sections, _curves(report.curves), _settings(report)])


def _section(name: str, findings: Sequence[Finding]) -> Section:
    figures = [_distances(findings)] if name == "combine" else []
    measured = ("found", "relative", "of bound") if name != "training" else ("ratio",)
    columns = (*findings[0].labels, "promise", *measured, "")
    # Many rows are folded away, unless one of them failed.
    folded = len(findings) > 20 and all(finding.holds for finding in findings)
    return Section(TITLES[name], NOTES[name], figures, columns, [_cells(row) for row in findings], folded)


def _cells(row: Finding) -> Cells:
    # In the training, what was found is the ratio itself.
    measured = (found(row), number(row.relative)) if row.section != "training" else ()
    mark = "ok" if row.holds else "no"
    return Cells((*map(str, row.labels.values()), row.promise, *measured, number(row.share), mark), row.holds)


def _distances(findings: Sequence[Finding]) -> Figure:
    """A line for each row but for its number of replicas, a dot for each such number."""
    lines: dict[str, list[Finding]] = {}
    for finding in findings:
        others = [str(value) for name, value in finding.labels.items() if name != "replicas"]
        lines.setdefault("  ".join(others), []).append(finding)
    figure, axes = page.plot(10, 0.9 + 0.19 * len(lines))
    for promise, colour in _COLOURS.items():
        dots = [
            (_ulps(x), y) for y, rows in enumerate(lines.values()) for x in rows if x.holds and x.promise == promise
        ]
        axes.scatter(*zip(*dots, strict=True), s=14, c=colour, alpha=0.7, label=f"promised: {promise}", zorder=2)
    broken = [(_ulps(x), y) for y, rows in enumerate(lines.values()) for x in rows if not x.holds]
    if broken:
        axes.scatter(*zip(*broken, strict=True), s=40, c="#c62828", marker="x", label="not kept", zorder=3)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=-0.3)
    axes.set_yticks(range(len(lines)), list(lines), fontsize=7)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.grid(axis="y", linewidth=0.3)
    axes.set_xlabel("largest distance from the reference, in ulp; a dot for each number of replicas", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.legend(fontsize=7, loc="lower right")
    return page.drawn(figure, "Distance in ulp of every row of the combine from NumPy's list in the same order")


def _ulps(row: Finding) -> float:
    """What a logarithmic axis can show: NaN at the end of float32, two signs of zero as less than one ulp."""
    if row.ulps is None or row.equal:
        return 0.0
    return 2.0**32 if row.ulps == NAN_DISTANCE else max(float(row.ulps), 0.5)


def _curves(curves: Mapping[str, Sequence[float]]) -> Section:
    figure, axes = page.plot(6.5, 3.2)
    for (name, losses), line in zip(curves.items(), _LINES, strict=False):
        axes.plot(range(1, len(losses) + 1), losses, line, label=name, linewidth=1.6)
    axes.set_xlabel("window", fontsize=8)
    axes.set_ylabel("loss", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    losses = page.drawn(figure, "The losses of the windows, a curve for each training")
    figure, axes = page.plot(6.5, 3.2)
    base = np.array(curves["jax"])
    for name in (name for name in curves if name != "jax"):
        axes.plot(range(1, len(base) + 1), np.abs(np.array(curves[name]) - base), ".-", label=f"{name} - jax")
    axes.set_yscale("symlog", linthresh=1e-9)
    axes.set_xlabel("window", fontsize=8)
    axes.set_ylabel("distance", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7)
    apart = page.drawn(figure, "The distance of the other trainings' losses from those in JAX")
    columns = ("window", *curves)
    values = zip(*curves.values(), strict=True)
    rows = [Cells((str(i), *(f"{x:.7f}" for x in losses))) for i, losses in enumerate(values, 1)]
    note = "The mean of means is there as a contrast: the same training with the microbatches' weights left out."
    return Section("Losses", note, [losses, apart], columns, rows, folded=True)


def _settings(report: Report) -> Section:
    rows = [Cells((name, text)) for name, text in _named("", report.settings)]
    rows.append(Cells(("seconds", f"{report.seconds:.0f}")))
    return Section("Versions and settings", columns=("", ""), rows=rows)


def _named(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _named(f"{name}: {key}" if name else str(key), inner)
    else:
        yield name, " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
