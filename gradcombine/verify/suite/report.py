"""The report: tables on the screen, and everything as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradcombine.verify.suite import curves
from gradcombine.verify.suite.findings import BOUND, Finding, Report
from gradcombine.verify.ulp import NAN_DISTANCE

TITLES = {
    "combine": "Combine: the same contributions in every place",
    "full batch": "Full batch: microbatches of different sizes against one batch",
    "kernels": "Kernels: one batch's gradient by JAX and by TensorFlow",
    "training": "Training with accumulated gradients, in both frameworks",
}

NOTES = {
    "combine": "found: the largest distance from NumPy's list in the same order, over all elements and replicas.\n"
    "promise: the same bits, or a rounding bound where the framework's own all-reduce chooses the order.\n"
    "of bound: the largest distance from the exact mean, over what rounding may do.",
    "full batch": "found: the largest distance from the whole batch's gradient, computed in one pass.\n"
    "relative: to the leaf's largest element. of bound: over what rounding may do in both computations.",
    "kernels": "Nothing is combined here. In the combine above, one framework's gradients are the input of all rows.",
    "training": "ratio: what was found over what is allowed. The windows' losses are below.",
}


def show(console: Console, report: Report) -> None:
    """Prints all tables, and names the rows that failed."""
    for section, findings in groupby(report.findings, key=lambda finding: finding.section):
        console.print(_table(section, list(findings)), Text(NOTES[section], "dim"), "", sep="\n")
    console.print(_curves(report), "", _verdict(report), sep="\n")


def write_json(path: Path, report: Report) -> None:
    """Writes every row, curve, setting and version."""
    content = {
        "settings": report.settings,
        "seconds": round(report.seconds, 2),
        "failed": [finding.name for finding in report.failed],
        "rows": [_row(finding) for finding in report.findings],
        "curves": report.curves,
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _row(finding: Finding) -> dict[str, Any]:
    row = {"name": finding.name} | dataclasses.asdict(finding)
    # JSON has no infinity and no NaN.
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def _table(section: str, findings: list[Finding]) -> Table:
    table = _titled(TITLES[section])
    grouped = section == "combine"
    for label in list(findings[0].labels)[grouped:]:
        table.add_column(label, overflow="fold", no_wrap=label in ("framework", "order"))
    table.add_column("promise")
    measured = section != "training"
    relative = section in ("full batch", "kernels")
    if measured:
        table.add_column("found", no_wrap=True)
    if relative:
        table.add_column("relative", justify="right")
    table.add_column("of\nbound" if measured else "ratio", justify="right")
    table.add_column("")
    framework = None
    for finding in _folded(findings):
        if grouped and finding.labels["framework"] != framework:
            framework = finding.labels["framework"]
            table.add_row(Text(framework, "bold"))
        cells = [*map(str, list(finding.labels.values())[grouped:]), finding.promise]
        cells += [found(finding)] if measured else []
        cells += [number(finding.relative)] if relative else []
        mark = Text("ok", "green") if finding.holds else Text("no", "bold red")
        table.add_row(*cells, number(finding.share), mark, style=None if finding.holds else "red")
    return table


def _titled(title: str) -> Table:
    return Table(
        title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )


def _folded(findings: Iterable[Finding]) -> Iterable[Finding]:
    """Rows that differ in the number of replicas alone, and hold alike, as one row with the worst of each measure."""

    def key(finding: Finding) -> tuple[object, ...]:
        others = [value for name, value in finding.labels.items() if name != "replicas"]
        return (*others, finding.promise, finding.holds, finding.equal or finding.promise == BOUND)

    for _, alike in groupby(findings, key=key):
        rows = list(alike)
        labels = dict(rows[0].labels)
        if "replicas" in labels:
            labels["replicas"] = " ".join(str(row.labels["replicas"]) for row in rows)
        yield dataclasses.replace(
            rows[0],
            labels=labels,
            equal=all(row.equal for row in rows),
            ulps=max((row.ulps for row in rows if row.ulps is not None), default=None),
            relative=max((row.relative for row in rows if row.relative is not None), default=None),
            share=max((row.share for row in rows if row.share is not None), default=None),
        )


def found(finding: Finding) -> str:
    """What a row found, in a word."""
    if finding.equal:
        return "equal bits"
    if finding.ulps == NAN_DISTANCE:
        return "NaN"
    if finding.ulps is None:
        return f"a ratio of {number(finding.share)}"
    return "sign of 0" if finding.ulps == 0 else f"{finding.ulps:,} ulp"


def number(value: float | None) -> str:
    """A figure of two digits; nothing where there is none."""
    return "" if value is None else f"{value:.2g}"


def _curves(report: Report) -> RenderableType:
    table = _titled("Losses")
    for column in ("window", *report.curves, "jax - tensorflow"):
        table.add_column(column, justify="right")
    for window in range(0, len(report.curves["jax"]), 3):
        values = [curve[window] for curve in report.curves.values()]
        apart = report.curves["jax"][window] - report.curves["tensorflow"][window]
        table.add_row(str(window + 1), *(f"{value:.7f}" for value in values), f"{apart:.1e}")
    return Group(table, "", curves.plot(report.curves))


def _verdict(report: Report) -> RenderableType:
    rows, failed = len(report.findings), report.failed
    took = f"{report.seconds:.0f} s"
    if not failed:
        return Text(f"All {rows} rows keep what they promise ({took}).", "green")
    headline = Text(f"Not kept: {len(failed)} of {rows} promises ({took}).", "bold red")
    return Group(
        headline, *(Text(f"  {row.name}: promised {row.promise}, found {found(row)}", "red") for row in failed)
    )
