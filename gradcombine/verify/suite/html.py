"""The report as a page with plots, to be attached to a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from gradcombine.verify import page
from gradcombine.verify.report import Figure, Section
from gradcombine.verify.suite.findings import BITS, BOUND, COMBINE, LOSSES, Finding, Report, failures, sections, verdict
from gradcombine.verify.ulp import NAN_DISTANCE

FOLDED = 20
"""Longer tables are folded away, unless one of their rows failed."""

_COLOURS = {BITS: "#2e7d32", BOUND: "#3b6ea5"}
_LINES = ("-", "--", ":")


def write(path: Path, report: Report) -> None:
    """Writes the page: what was found, row by row, the distances, the curves, and all that ran with its versions."""
    combined = [finding for finding in report.findings if finding.section == "combine"]
    figures = {COMBINE: [_distances(combined)], LOSSES: _curves(report.curves)}
    tables = [
        each._replace(
            figures=figures.get(each.title, ()),
            folded=each.folded or (len(each.rows) > FOLDED and all(row.passes for row in each.rows)),
        )
        for each in sections(report)
    ]
    if report.failed:
        failed = Section("Not kept", columns=("row", "promise", "found"), rows=failures(report))
        tables.insert(0, failed)
    page.write(path, "gradcombine verify", verdict(report), not report.failed, tables)


def _distances(findings: Sequence[Finding]) -> Figure:
    """A line for the rows that differ in their number of replicas alone, a dot for each such number."""
    lines: dict[str, list[Finding]] = {}
    for finding in findings:
        others = [str(value) for name, value in finding.labels.items() if name != "replicas"]
        lines.setdefault("  ".join(others), []).append(finding)
    figure, axes = page.plot(10, 0.9 + 0.19 * len(lines))
    for promise, colour in _COLOURS.items():
        dots = [
            (_ulps(x), y) for y, line in enumerate(lines.values()) for x in line if x.holds and x.promise == promise
        ]
        axes.scatter(*zip(*dots, strict=True), s=14, c=colour, alpha=0.7, label=f"promised: {promise}", zorder=2)
    broken = [(_ulps(x), y) for y, line in enumerate(lines.values()) for x in line if not x.holds]
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


def _curves(curves: Mapping[str, Sequence[float]]) -> list[Figure]:
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
    return [losses, apart]
