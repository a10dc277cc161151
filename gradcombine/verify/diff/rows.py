"""What a diff has to say: its rows once, as JSON and as the tables of a screen or a page."""

from __future__ import annotations

import math
from typing import Any

from gradcombine.verify.diff.measure import DiffReport, Row
from gradcombine.verify.diff.steps import StepReport
from gradcombine.verify.report import Cells, Section
from gradcombine.verify.ulp import NAN_DISTANCE

COLUMNS = ("leaf", "matched by", "shape", "dtype", "largest", "median", "relative", "1 - cosine", "NaN", "inf", "worst")
_STEP_COLUMNS = ("step", "leaves that differ", "not compared", "largest", "worst leaf")
DIFFER = "Leaves that differ"
"""The section that a page adds histograms to."""


def verdict(report: DiffReport) -> str:
    """The answer in a sentence."""
    if report.passes:
        return f"All {len(report.rows):,} leaves ({report.elements:,} elements) pass."
    counts = (
        ("do not pass", sum(not row.passes for row in report.rows)),
        ("have no counterpart", len(report.only_a) + len(report.only_b)),
        ("could not be compared", len(report.left_out)),
    )
    found = [f"{number:,} {text}" for text, number in counts if number]
    compared = f"{len(report.rows):,} leaves were compared" if report.rows else "No leaf was compared"
    return "; ".join([compared, *found]) + "."


def sections(report: DiffReport) -> list[Section]:
    """The tables: what was not compared before all, then the leaves that differ, the worst first."""
    alone = [(name, side) for side, names in (("A", report.only_a), ("B", report.only_b)) for name in names]
    equal = [row for row in report.rows if row.difference.equal_bits and row.difference.same_dtype]
    differ = [row for row in report.rows if not (row.difference.equal_bits and row.difference.same_dtype)]
    found = [
        Section(
            "Leaves that were not compared",
            "A rules file can leave them out (ignore_a, ignore_b).",
            columns=("leaf", "reason"),
            rows=[Cells(each, False) for each in report.left_out],
        ),
        Section(
            "Leaves without a counterpart",
            columns=("leaf", ""),
            rows=[Cells((name, f"only in {side}"), False) for name, side in alone],
        ),
        Section(
            "Leaves that are alike only in another order of axes, though their shapes agree",
            "A kernel that was transposed by mistake looks like that. If it was not, a rule can say so (transpose).",
            columns=("leaf", "axes of B"),
            rows=[Cells((row.difference.name, _axes(row)), row.passes) for row in report.rows if row.turned],
        ),
        Section(
            DIFFER,
            "The worst first. Distances in units in the last place (ulp); relative to the leaf's largest element.",
            columns=COLUMNS,
            rows=[cells(row) for row in differ],
        ),
        Section("Leaves with equal bits", columns=COLUMNS, rows=[cells(row) for row in equal], folded=True),
    ]
    return [section for section in found if section.rows]


def cells(row: Row) -> Cells:
    """A pair of leaves as a row of `COLUMNS`."""
    found, reason = row.difference, "" if row.pair.reason == "name" else row.pair.reason
    return Cells(
        (
            found.name,
            ", ".join(filter(None, (reason, f"axes {_axes(row)}" if row.pair.axes else ""))),
            " x ".join(map(str, found.shape)) or "scalar",
            found.dtypes[0] if found.same_dtype else " | ".join(found.dtypes),
            *(
                "NaN" if found.nan_against_number and ulp == NAN_DISTANCE else f"{ulp:,} ulp"
                for ulp in (found.max_ulp, found.median_ulp)
            ),
            f"{found.relative:.1e}",
            f"{1 - found.cosine:.1e}",
            *(" | ".join(map(str, pair)) if any(pair) else "" for pair in (found.nans, found.infs)),
            "" if found.worst is None else f"[{found.worst.at}] {found.worst.a!r} | {found.worst.b!r}",
        ),
        row.passes,
    )


def as_json(report: DiffReport) -> dict[str, Any]:
    """The report as what json can write."""
    return {
        "passes": report.passes,
        "elements": report.elements,
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "left_out": [each._asdict() for each in report.left_out],
        "leaves": [
            {"a": row.pair.a, "b": row.pair.b, "matched_by": row.pair.reason, "axes": row.pair.axes}
            | {"passes": row.passes}
            | {key: _plain(value) for key, value in row.difference._asdict().items() if key != "name"}
            for row in report.rows
        ],
    }


def step_verdict(report: StepReport) -> str:
    """The answer for two runs in a sentence."""
    if report.passes:
        return f"All {len(report.steps)} steps pass."
    if report.first is not None:
        return f"The first step that differs is {report.first}: {verdict(report.steps[report.first])}"
    return "Not all of both runs was compared."


def step_sections(report: StepReport) -> list[Section]:
    """A line a step, then the first step that differs in full."""
    lines = []
    for step, found in report.steps.items():
        apart = [row for row in found.rows if not row.passes]
        worst = cells(apart[0]).cells if apart else ("",) * len(COLUMNS)
        lost = len(found.only_a) + len(found.only_b) + len(found.left_out)
        lines.append(
            Cells((str(step), f"{len(apart)} of {len(found.rows)}", str(lost or ""), worst[4], worst[0]), found.passes)
        )
    alone = [(f"step {step}", f"only in {side}") for side, steps in _sides(report) for step in steps]
    alone += [(name, "no step in its name") for name in report.left_out]
    out = [
        Section("Steps", columns=_STEP_COLUMNS, rows=lines, whole=True),
        Section("Not compared", columns=("", "reason"), rows=[Cells(each, False) for each in alone]),
    ]
    if report.first is not None:
        out += [s._replace(title=f"Step {report.first}: {s.title}") for s in sections(report.steps[report.first])]
    return [section for section in out if section.rows]


def steps_as_json(report: StepReport) -> dict[str, Any]:
    """The report of two runs as what json can write."""
    return {
        "passes": report.passes,
        "only_a": report.only_a,
        "only_b": report.only_b,
        "left_out": report.left_out,
        "steps": {step: as_json(found) for step, found in report.steps.items()},
    }


def _sides(report: StepReport) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("A", report.only_a), ("B", report.only_b))


def _axes(row: Row) -> str:
    return ", ".join(map(str, row.pair.axes or ()))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        named = hasattr(value, "_asdict")
        return {k: _plain(v) for k, v in value._asdict().items()} if named else [_plain(v) for v in value]  # pyright: ignore
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
