"""Results of a verification, as JSON and as sections for the terminal or an HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, cast

from gradcombine.reporting.sections import Cells, Curves, Section
from gradcombine.types import Tree
from gradcombine.verify.compare.comparison import compare
from gradcombine.verify.compare.ulp import NAN_DISTANCE

BITS, BOUND, DIFFERS, CLEAN, NAMED = "bits", "bound", "differs", "clean", "named"
"""Expected outcomes: the reference's bits; a distance within the rounding bound; for contrast, a distance beyond
the bound; a step without defects; for contrast, a step whose defect is reported.
"""


class Finding(NamedTuple):
    """One row of the report.

    Attributes:
      section: part of the report.
      labels: identify the row within its section.
      promise: the expected outcome, one of the constants above or another word.
      holds: whether it has that outcome.
      ulps: largest distance from the reference, in units in the last place; None if there is no reference.
      relative: largest distance from the reference, relative to the largest magnitude of the leaf.
      share: measured value divided by the bound.
      equal: whether all bits equal the reference's.
    """

    section: str
    labels: dict[str, Any]
    promise: str
    holds: bool
    ulps: int | None = None
    relative: float | None = None
    share: float | None = None
    equal: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}: {' / '.join(str(label) for label in self.labels.values())}"

    @property
    def measured(self) -> str:
        """Result of the row, as a short text."""
        if self.promise in (CLEAN, NAMED):
            return self.promise if self.holds else {CLEAN: "defects", NAMED: "missed"}[self.promise]
        if self.ulps is None:
            return f"a ratio of {_number(self.share)}"
        if self.equal or (self.promise == DIFFERS and self.holds):
            return "equal bits" if self.equal else "differs"
        if self.ulps == NAN_DISTANCE:
            return "NaN"
        return f"{self.ulps:,} ulp" if self.ulps else "sign of 0"


def compared(
    section: str, labels: dict[str, Any], promise: str, result: Tree, reference: Tree, share: float
) -> Finding:
    """The row of a result that promises `BITS`, `BOUND` or `DIFFERS`.

    Args:
      section, labels, promise: of the row.
      result: trees of arrays.
      reference: trees that the distances are measured from.
      share: largest error divided by its bound; rows that promise bits have to keep to it as well.
    """
    difference = compare(result, reference)
    relative = max(leaf.relative for leaf in difference.leaves)
    holds = {BITS: difference.equal_bits and share <= 1, BOUND: share <= 1, DIFFERS: share > 1}[promise]
    return Finding(section, labels, promise, holds, difference.max_ulp, relative, share, difference.equal_bits)


class Report(NamedTuple):
    """Results of a verification.

    Attributes:
      findings: rows of all sections.
      curves: losses of the trainings, by name.
      settings: settings, versions and environment.
      seconds: duration.
    """

    findings: list[Finding]
    curves: dict[str, list[float]]
    settings: dict[str, Any]
    seconds: float

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.holds]


LOSSES = "Losses"

SUMMARY = (
    "The gradients of a classifier, of microbatches of different sizes, are combined by NumPy, JAX and TensorFlow "
    "in lists, over time, over replicas and both, eager and compiled, and compared bit by bit with one reference; "
    "then the classifier is trained in both frameworks."
)

GRID = (
    "Combine: the same contributions in every place",
    "=: equal to the bits of NumPy's list in the same order, for every number of replicas.\n"
    "A number: where the framework's all-reduce determines the order, the largest distance from the exact mean, "
    "divided by the rounding bound; it passes up to 1. An empty cell: this mode has no such place.\n"
    "Two marks: from left to right, and in the canonical tree's order. both: over time, then over replicas.",
)

TABLES = {
    "combine": (
        "Combine, row by row",
        "measured: the largest distance from NumPy's list in the same order, over all elements and replicas.\n"
        "of bound: the largest distance from the exact mean, divided by the rounding bound.",
    ),
    "full batch": (
        "Full batch: microbatches of different sizes compared with one batch",
        "measured: the largest distance from the full batch's gradient, computed in one pass.\n"
        "relative: to the leaf's largest element. of bound: divided by the rounding bound of both computations.\n"
        "The mean of means is a contrast: it must differ by more than the bound.",
    ),
    "kernels": (
        "Kernels: the gradient of one batch in JAX compared with TensorFlow",
        "Nothing is combined here. In the combine above, NumPy's gradients are the input of all rows.",
    ),
    "defects": (
        "Defects: steps with a known defect, and a correct one, in check and audit",
        "`gradcombine check module:make_case` and `gradcombine audit module:make_step` analyze your steps.",
    ),
    "training": (
        "Training with accumulated gradients, in both frameworks",
        "ratio: the measured value divided by the allowed one. The losses of the windows are below.",
    ),
    "audit": (
        "Audit: the library's steps, as compiled",
        "One exchange per window, no unnecessary work or copies; `gradcombine audit` reports on any step.",
    ),
}
"""Title and note of each section's table."""

_BLOCKS = "▁▂▃▄▅▆▇█"
"""Heights of a curve's values, from the lowest to the highest; a value that is not finite is a ``!``."""


def verdict(report: Report) -> str:
    """Summary in one sentence."""
    rows, failed = len(report.findings), len(report.failed)
    result = f"{failed} of {rows} rows fail." if failed else f"All {rows} rows hold."
    return f"{result} ({report.seconds:.0f} s)"


def sections(report: Report) -> list[Section]:
    """Tables and charts: failures, all rows, losses, versions and settings."""
    settings = report.settings
    versions = settings["versions"] | settings["libraries"] | {"python": settings["machine"]["python"]}
    summary = f"{SUMMARY}\n{settings['date']}\n{settings['command']}\n{_text(versions)}"
    failed = [Cells((row.name, row.promise, row.measured), False) for row in report.failed]
    return [
        *([Section("Failed", columns=("row", "expected", "measured"), rows=failed, whole=True)] if failed else []),
        Section("Summary", summary),
        _grid([row for row in report.findings if row.section == "combine"]),
        *(_table(name, list(rows)) for name, rows in groupby(report.findings, key=attrgetter("section"))),
        *_losses(report.curves),
        Section(
            "Versions and settings",
            columns=("", ""),
            rows=[Cells((name, _text(value))) for name, value in settings.items()],
            folded=True,
        ),
    ]


def as_json(report: Report) -> dict[str, Any]:
    """The report as values that json can serialize."""
    rows = [{"name": finding.name, **finding._asdict()} for finding in report.findings]
    return {
        "settings": report.settings,
        "seconds": round(report.seconds, 2),
        "failed": [finding.name for finding in report.failed],
        "rows": [{key: _finite(value) for key, value in row.items()} for row in rows],
        "curves": {name: list(map(_finite, losses)) for name, losses in report.curves.items()},
    }


def _finite(value: Any) -> Any:
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table(section: str, findings: Sequence[Finding]) -> Section:
    """Table of a section's rows; that of the combine, which the grid summarizes, is folded."""
    columns = (*findings[0].labels, "expected", "measured", "relative", "of bound", "")
    rows: list[Cells] = []
    for row in findings:
        # Without a reference, the share is the result itself.
        distance = (_number(row.relative), _number(row.share)) if row.ulps is not None else ("", "")
        cells = (*map(str, row.labels.values()), row.promise, row.measured, *distance, "ok" if row.holds else "no")
        rows.append(Cells(cells, row.holds))
    return Section(*TABLES[section], columns=columns, rows=rows, whole=True, folded=section == "combine")


def _grid(findings: Sequence[Finding]) -> Section:
    """Table with a row for each mode and a column for each place; cells have a mark for each order of addition."""
    cells: dict[tuple[str, str, str], list[Finding]] = {}
    for row in findings:
        framework, mode, place, _, order = row.labels.values()
        cells.setdefault((f"{framework} {mode}", "both" if " x " in place else place, order), []).append(row)
    modes, places, orders = (list(dict.fromkeys(key[axis] for key in cells)) for axis in range(3))
    rows: list[Cells] = []
    for mode in modes:
        marks = [[_mark(cells[mode, x, order]) for order in orders if (mode, x, order) in cells] for x in places]
        rows.append(Cells((mode, *map("\N{NO-BREAK SPACE}".join, marks)), not any("no" in each for each in marks)))
    return Section(*GRID, columns=("", *places), rows=rows, whole=True)


def _mark(rows: Sequence[Finding]) -> str:
    """Worst result of rows that differ in their number of replicas."""
    if not all(row.holds for row in rows):
        return "no"
    return "=" if all(row.equal for row in rows) else _number(max(row.share or 0.0 for row in rows))


def _losses(curves: Mapping[str, Sequence[float]]) -> list[Section]:
    """Curves on a common scale, with their first and last values; and a table of all values."""
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)

    def block(value: float) -> str:
        level = (value - low) / ((high - low) or 1) * len(_BLOCKS)
        return _BLOCKS[min(int(level), len(_BLOCKS) - 1)] if math.isfinite(level) else "!"

    rows = [Cells((name, "".join(map(block, x)), f"{x[0]:.4f} to {x[-1]:.4f}")) for name, x in curves.items()]
    note = "The mean of means is a contrast: the same training without the microbatches' weights."
    windows = enumerate(zip(*curves.values(), strict=True), 1)
    values = [Cells((str(i), *(f"{x:.7f}" for x in losses))) for i, losses in windows]
    (first, base), *others = curves.items()
    distances = {f"{name} - {first}": [abs(a - b) for a, b in zip(x, base, strict=True)] for name, x in others}
    charts = [
        Curves(curves, "loss", None, "The losses of the windows, with a curve for each training"),
        Curves(distances, "distance", 1e-9, f"The distance of the other trainings' losses from those of {first}"),
    ]
    return [
        Section(LOSSES, note, charts, ("training", "loss", ""), rows, whole=True),
        Section("Losses by window", columns=("window", *curves), rows=values, folded=True),
    ]


def _text(value: Any) -> str:
    """Formats a setting."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in cast("dict[str, Any]", value).items())
    return " ".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _number(value: float | None) -> str:
    """Formats a number with two digits; empty for None."""
    return "" if value is None else f"{value:.2g}"
