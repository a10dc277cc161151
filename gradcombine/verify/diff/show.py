"""The report of a diff on the screen, and as JSON."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradcombine.verify.diff.measure import DiffReport, Row
from gradcombine.verify.diff.steps import StepReport
from gradcombine.verify.ulp import NAN_DISTANCE

SHOWN = 12
"""How many leaves are shown one by one."""


def show(console: Console, report: DiffReport) -> None:
    """Prints the leaves that differ, the worst first, and counts the rest."""
    rows = [row for row in report.rows if not (row.found.equal_bits and row.found.same_dtype)]
    if rows:
        console.print(_table(rows[:SHOWN]))
    for text, number in (
        ("more leaves differ, by no more than the last of these", len(rows) - SHOWN),
        ("leaves have equal bits", len(report.rows) - len(rows)),
        ("leaves of A have no counterpart", len(report.only_a)),
        ("leaves of B have no counterpart", len(report.only_b)),
    ):
        if number > 0:
            console.print(f"{number:,} {text}")
    for side, names in (("A", report.only_a), ("B", report.only_b)):
        if names:
            more = "" if len(names) <= SHOWN else f", and {len(names) - SHOWN} more"
            console.print(Text(f"  only in {side}: {', '.join(names[:SHOWN])}{more}", "red"))
    console.print(_verdict(report))


def show_steps(console: Console, report: StepReport) -> None:
    """Prints a line a step, then the first step that differs in full."""
    table = _empty_table("step", "leaves that differ", "largest distance", "worst leaf")
    for step, found in report.steps.items():
        apart = [row for row in found.rows if not row.passes]
        worst = found.rows[0] if found.rows else None
        name, distance = ("", "") if worst is None or not apart else (worst.found.name, ulps(worst.found.max_ulp))
        style = None if found.passes else "red"
        table.add_row(str(step), f"{len(apart)} of {len(found.rows)}", distance, Text(name), style=style)
    console.print(table)
    for side, steps in (("A", report.only_a), ("B", report.only_b)):
        if steps:
            console.print(Text(f"steps only in {side}: {', '.join(map(str, steps))}", "red"))
    if report.first is not None:
        console.print(f"\nThe first step that differs is {report.first}:\n")
        show(console, report.steps[report.first])
    elif report.passes:
        console.print(Text(f"All {len(report.steps)} steps pass.", "green"))


def as_json(report: DiffReport) -> dict[str, Any]:
    """The report as what json can write."""
    return {
        "passes": report.passes,
        "elements": report.elements,
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "leaves": [
            {"a": row.pair.a, "b": row.pair.b, "matched_by": row.pair.reason, "axes": row.pair.axes}
            | {"passes": row.passes}
            | {key: _plain(value) for key, value in row.found._asdict().items() if key != "name"}
            for row in report.rows
        ],
    }


def ulps(distance: int) -> str:
    """A distance as a short text."""
    return "NaN" if distance == NAN_DISTANCE else f"{distance:,} ulp"


def _table(rows: list[Row]) -> Table:
    special = any(any((*row.found.nans, *row.found.infs)) for row in rows)
    columns = ("leaf", "shape", "dtype", "largest", "median", "relative", "1 - cosine", "worst")
    table = _empty_table(*columns, *(["NaN, inf"] if special else []))
    for row in rows:
        found = row.found
        table.add_row(
            Text(_named(row)),
            "x".join(map(str, found.shape)) or "scalar",
            found.dtypes[0] if found.same_dtype else " | ".join(found.dtypes),
            ulps(found.max_ulp),
            ulps(found.median_ulp),
            f"{found.relative:.1e}",
            f"{1 - found.cosine:.1e}",
            "" if found.worst is None else f"{found.worst.a:.6g} | {found.worst.b:.6g}",
            *([" | ".join(_specials(found.nans, found.infs))] if special else []),
            style="red" if not row.passes else None,
        )
    return table


def _named(row: Row) -> str:
    turned = "" if row.pair.axes is None else f", axes {', '.join(map(str, row.pair.axes))}"
    matched = "" if row.pair.reason in ("name", "rule") else f"\n(by {row.pair.reason}{turned})"
    return f"{row.found.name}{matched or (turned and f'{chr(10)}({turned[2:]})')}"


def _specials(nans: tuple[int, int], infs: tuple[int, int]) -> list[str]:
    return [f"{nan}, {inf}" for nan, inf in zip(nans, infs, strict=True)]


def _empty_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="left" if column in ("leaf", "worst leaf") else "right")
    return table


def _verdict(report: DiffReport) -> Text:
    failed = sum(not row.passes for row in report.rows)
    if report.passes:
        return Text(f"The {len(report.rows)} leaves ({report.elements:,} elements) pass.", "green")
    unmatched = len(report.only_a) + len(report.only_b)
    return Text(f"{failed} of {len(report.rows)} leaves do not pass, {unmatched} have no counterpart.", "bold red")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        named = hasattr(value, "_asdict")
        return {k: _plain(v) for k, v in value._asdict().items()} if named else [_plain(v) for v in value]  # pyright: ignore
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
