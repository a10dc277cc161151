"""Reports of a plan: sections for the terminal, and JSON."""

from __future__ import annotations

from typing import Any

from gradcombine.audit import audit_report
from gradcombine.audit.subject import size_text
from gradcombine.reporting.sections import Cells, Section
from gradcombine.verify.plan.strategies import Figures, Plan

VERSION = 1
"""Version of the JSON format."""


def sections(plan: Plan) -> list[Section]:
    """Sections of the report, in each the best strategy first."""
    compiled = [(row, row.compiled) for row in plan.rows if row.compiled is not None]
    sections = list[Section]()
    if compiled:
        axes = " x ".join(f"{name} {size}" for name, size in plan.axes.items())
        where = f"{plan.target.name}: {plan.microbatches} microbatches, {axes}, replicas along {plan.axis}"
        note = "per device; the bound assumes perfect overlap"
        if plan.target.figures is None:
            note = f"no rates are published for {plan.target.name}: ordered by the bytes moved and sent"
        columns, rows = ("strategy", "bound, s", "by", "sent", "moved", "memory"), list[Cells]()
        for row, figures in compiled:
            seconds = "" if row.seconds is None else f"{row.seconds:.3g}"
            rows.append(Cells((row.name, seconds, row.by, *map(size_text, _sizes(figures))), row.fits))
        sections.append(Section(f"A window on {where}", note, columns=columns, rows=rows, whole=True))
        rows = [
            Cells((row.name, *map(_difference, _sizes(row.predicted), _sizes(figures))))
            for row, figures in compiled
            if row.predicted
        ]
        note, columns = "and the difference of the compiled programs", ("strategy", "sent", "moved", "memory")
        sections.append(Section("Predicted", note, columns=columns, rows=rows, whole=True))
    texts = {
        "Why": [(row, row.why) for row, _ in compiled],
        "Rejected": [(row, row.refused) for row in plan.rows if row.refused],
        "Findings": [(row, ", ".join(row.findings)) for row in plan.rows if row.findings],
    }
    for title, pairs in texts.items():
        if pairs:
            rows = [Cells((f"{row.name}: {text}",), row.fits) for row, text in pairs]
            sections.append(Section(title, columns=("strategy",), rows=rows, whole=True))
    return sections


def _sizes(figures: Figures) -> tuple[float, float, float]:
    return figures.sent, figures.moved, figures.memory  # the order of the columns


def _difference(predicted: float, compiled: float) -> str:
    if not predicted:
        return f"{size_text(predicted)} " + (f"(+{size_text(compiled)})" if compiled else "")
    return f"{size_text(predicted)} ({compiled / predicted - 1:+.0%})"


def verdict(plan: Plan) -> str:
    """Summary in one line."""
    best, fitting = plan.best, sum(row.fits for row in plan.rows)
    if best is None:
        rejected = sum(bool(row.refused) for row in plan.rows)
        return f"none of {len(plan.rows)} strategies fits a device of {plan.target.name}; {rejected} were rejected"
    bound = "" if best.seconds is None else f", {best.seconds:.3g} s per window, bound by {best.by}"
    return f"{best.name} is the best of {len(plan.rows)} strategies, of which {fitting} fit{bound}"


def status(plan: Plan) -> int:
    """Exit status of the command."""
    if plan.best is not None:
        return 1 if plan.best.findings else 0
    return 3 if any(row.lacking for row in plan.rows) else 2


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON, with sizes in bytes and times in seconds."""
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
                "programs": [{"calls": calls} | audit_report.program_as_json(one) for one, calls in row.calls],
                "code": row.code,
            }
            for row in plan.rows
        ],
    }
