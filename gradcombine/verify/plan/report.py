"""Report of a plan: on a screen, and as JSON."""

from __future__ import annotations

from typing import Any

from gradcombine.audit import audit_report
from gradcombine.audit.subject import size_text
from gradcombine.reporting.sections import Cells, Section
from gradcombine.verify.plan.rows import Figures, Plan, Row

VERSION = 1
"""Of the JSON."""


def sections(plan: Plan) -> list[Section]:
    """All that a plan tells of each way, the best first; its code is last, for a reader of a terminal to take."""
    compiled = [row for row in plan.rows if row.compiled is not None]
    found = list[Section]()
    if compiled:
        columns = ("way", "bound, s", "by", "sent", "moved", "memory")
        rows = [_compared(row, row.compiled) for row in compiled if row.compiled is not None]
        found.append(Section(f"A window on {_where(plan)}", _note(plan), columns=columns, rows=rows, whole=True))
        rows = [_predicted(row, row.compiled, row.predicted) for row in compiled if row.compiled and row.predicted]
        note = "and by how much what was compiled differs"
        columns = ("way", "sent", "moved", "memory")
        found.append(Section("Predicted", note, columns=columns, rows=rows, whole=True))
        found.append(_listed("Why", [(row, row.why) for row in compiled]))
    refused = [(row, row.refused) for row in plan.rows if row.refused]
    findings = [(row, ", ".join(row.findings)) for row in plan.rows if row.findings]
    return [*found, *[_listed("Refused", refused)] * bool(refused), *[_listed("Findings", findings)] * bool(findings)]


def verdict(plan: Plan) -> str:
    """One line."""
    best, fitting = plan.best, sum(row.fits for row in plan.rows)
    if best is None:
        refused = sum(bool(row.refused) for row in plan.rows)
        return f"none of {len(plan.rows)} ways fits a device of {plan.target.name}; {refused} were refused"
    bound = "" if best.seconds is None else f", {best.seconds:.3g} s a window at the bound of {best.by}"
    return f"{best.name} is the best of {len(plan.rows)} ways, of which {fitting} fit{bound}"


def status(plan: Plan) -> int:
    """The exit status of the command."""
    if plan.best is not None:
        return 1 if plan.best.findings else 0
    return 3 if any(row.lacking for row in plan.rows) else 2


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, with sizes in bytes and times in seconds."""
    return {
        "version": VERSION,
        "target": plan.target.name,
        "mesh": plan.axes,
        "axis": plan.axis,
        "microbatches": plan.microbatches,
        "ways": [
            {
                "name": row.name,
                "fits": row.fits,
                "lacking": row.lacking,
                "refused": row.refused,
                "seconds": row.seconds,
                "by": row.by,
                "why": row.why,
                "compiled": row.compiled and row.compiled._asdict(),
                "predicted": row.predicted and row.predicted._asdict(),
                "bounds": {name: bound._asdict() for name, bound in row.bounds.items()},
                "programs": [
                    {"calls": calls} | program
                    for (_, calls), program in zip(
                        row.calls, audit_report.as_json([one for one, _ in row.calls])["programs"], strict=True
                    )
                ],
                "code": row.code,
            }
            for row in plan.rows
        ],
    }


def _listed(title: str, rows: list[tuple[Row, str]]) -> Section:
    return Section(
        title, columns=("way",), rows=[Cells((f"{row.name}: {text}",), row.fits) for row, text in rows], whole=True
    )


def _where(plan: Plan) -> str:
    axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items())
    return f"{plan.target.name}: {plan.microbatches} microbatches, {axes}, replicas along {plan.axis}"


def _note(plan: Plan) -> str:
    if plan.target.figures is None:
        return f"nothing is published of {plan.target.name}: by the bytes moved and sent"
    return "of each device; the bound if all overlaps"


def _compared(row: Row, compiled: Figures) -> Cells:
    seconds = "" if row.seconds is None else f"{row.seconds:.3g}"
    return Cells(
        (row.name, seconds, row.by, size_text(compiled.sent), size_text(compiled.moved), size_text(compiled.memory)),
        row.fits,
    )


def _predicted(row: Row, compiled: Figures, predicted: Figures) -> Cells:
    pairs = zip(
        (predicted.sent, predicted.moved, predicted.memory),
        (compiled.sent, compiled.moved, compiled.memory),
        strict=True,
    )
    return Cells((row.name, *(f"{size_text(a)} {_difference(a, b)}" for a, b in pairs)))


def _difference(predicted: float, compiled: float) -> str:
    if not predicted:
        return "" if not compiled else f"(+{size_text(compiled)})"
    return f"({compiled / predicted - 1:+.0%})"
