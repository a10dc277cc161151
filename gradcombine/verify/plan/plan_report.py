"""Report of a plan: on a screen, and as JSON."""

from __future__ import annotations

from typing import Any

from gradcombine.audit import audit_report
from gradcombine.audit.subject import size_text
from gradcombine.reporting.sections import Cells, Section
from gradcombine.verify.plan.ranking import Figures, Plan

VERSION = 1
"""Of the JSON."""


def sections(plan: Plan) -> list[Section]:
    """All that a plan tells of each way, the best first; its code is last, for a reader of a terminal to take."""
    compiled = [(row, row.compiled) for row in plan.rows if row.compiled is not None]
    found = list[Section]()
    if compiled:
        axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items())
        where = f"{plan.target.name}: {plan.microbatches} microbatches, {axes}, replicas along {plan.axis}"
        note = "of each device; the bound if all overlaps"
        if plan.target.figures is None:
            note = f"no rates are published for {plan.target.name}: ordered by the bytes moved and sent"
        columns, rows = ("way", "bound, s", "by", "sent", "moved", "memory"), list[Cells]()
        for row, figures in compiled:
            seconds = "" if row.seconds is None else f"{row.seconds:.3g}"
            rows.append(Cells((row.name, seconds, row.by, *map(size_text, _sizes(figures))), row.fits))
        found.append(Section(f"A window on {where}", note, columns=columns, rows=rows, whole=True))
        rows = [
            Cells((row.name, *map(_difference, _sizes(row.predicted), _sizes(figures))))
            for row, figures in compiled
            if row.predicted
        ]
        note = "and by how much what was compiled differs"
        found.append(Section("Predicted", note, columns=("way", "sent", "moved", "memory"), rows=rows, whole=True))
    words = {
        "Why": [(row, row.why) for row, _ in compiled],
        "Refused": [(row, row.refused) for row in plan.rows if row.refused],
        "Findings": [(row, ", ".join(row.findings)) for row in plan.rows if row.findings],
    }
    for title, said in words.items():
        if said:
            rows = [Cells((f"{row.name}: {text}",), row.fits) for row, text in said]
            found.append(Section(title, columns=("way",), rows=rows, whole=True))
    return found


def _sizes(figures: Figures) -> tuple[float, float, float]:
    """In the order of the columns."""
    return figures.sent, figures.moved, figures.memory


def _difference(predicted: float, compiled: float) -> str:
    if not predicted:
        return f"{size_text(predicted)} " + (f"(+{size_text(compiled)})" if compiled else "")
    return f"{size_text(predicted)} ({compiled / predicted - 1:+.0%})"


def verdict(plan: Plan) -> str:
    """One line."""
    best, fitting = plan.best, sum(row.fits for row in plan.rows)
    if best is None:
        refused = sum(bool(row.refused) for row in plan.rows)
        return f"none of {len(plan.rows)} ways fits a device of {plan.target.name}; {refused} were rejected"
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
