"""Results of a verification, as JSON and as sections for the terminal or an HTML page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, cast

from gradcombine.reporting.sections import Cells, Curves, Section
from gradcombine.verify.compare.ulp import NAN_DISTANCE

BITS, BOUND, DIFFERS, CLEAN, NAMED = "bits", "bound", "differs", "clean", "named"
"""Expected outcomes: the reference's bits; a distance within the rounding bound; for contrast, a distance beyond
the bound; a step without defects; for contrast, a step whose defect is reported.
"""

LIST, TIME, REPLICAS, TIME_AND_REPLICAS = "list", "time", "replicas", "time x replicas"
"""Places of a row: gradients are combined in a list, over time, over replicas, or over time and then replicas."""


@dataclass(frozen=True)
class Finding:
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

_TITLES = {
    "combine": "Combine: the same contributions in every place",
    "full batch": "Full batch: microbatches of different sizes compared with one batch",
    "kernels": "Kernels: the gradient of one batch in JAX compared with TensorFlow",
    "training": "Training with accumulated gradients, in both frameworks",
    "defects": "Defects: steps with a known defect, and a correct one, in check and audit",
    "audit": "Audit: the library's steps, as compiled",
}

_NOTES = {
    "combine": "=: equal to the bits of NumPy's list in the same order, for every number of replicas.\n"
    "A number: where the framework's all-reduce determines the order, the largest distance from the exact mean, "
    "divided by the rounding bound; it passes up to 1. An empty cell: this mode has no such place.\n"
    "Two marks: from left to right, and in the canonical tree's order. both: over time, then over replicas.",
    "full batch": "measured: the largest distance from the full batch's gradient, computed in one pass.\n"
    "relative: to the leaf's largest element. of bound: divided by the rounding bound of both computations.\n"
    "The mean of means is a contrast: it must differ by more than the bound.",
    "kernels": "Nothing is combined here. In the combine above, one framework's gradients are the input of all rows.",
    "training": "ratio: the measured value divided by the allowed one. The losses of the windows are below.",
    "defects": "`gradcombine check module:make_case` and `gradcombine audit module:make_step` analyze your steps.",
    "audit": "One exchange per window, no unnecessary work or copies; `gradcombine audit` reports on any step.",
}

_DISTANCES = (
    "measured: the largest distance from NumPy's list in the same order, over all elements and replicas.\n"
    "of bound: the largest distance from the exact mean, divided by the rounding bound."
)

_BLOCKS = "▁▂▃▄▅▆▇█"


def verdict(report: Report) -> str:
    """Summary in one sentence."""
    rows, failed = len(report.findings), len(report.failed)
    return f"{failed} of {rows} rows fail." if failed else f"All {rows} rows hold."


def sections(report: Report) -> list[Section]:
    """Tables and charts: failures, all rows, losses, versions and settings."""

    def table(row: Finding) -> tuple[str, str]:
        return row.section, row.labels["framework"] if row.section == "combine" else ""

    settings = [Cells((name, text)) for name, text in _flattened("", report.settings)]
    settings.append(Cells(("seconds", f"{report.seconds:.0f}")))
    failed = [Cells((row.name, row.promise, measured(row)), False) for row in report.failed]
    return [
        *([Section("Failed", columns=("row", "expected", "measured"), rows=failed, whole=True)] if failed else []),
        Section("Summary", _description(report)),
        _grid(report),
        *(_section(*key, list(rows)) for key, rows in groupby(report.findings, key=table)),
        *_losses(report.curves),
        Section("Versions and settings", columns=("", ""), rows=settings, folded=True),
    ]


def summary(report: Report) -> Report:
    """Shortens a report for the terminal: merges rows with the same result that differ in the number of replicas only.

    Merged rows have the worst values. Relative distances of the combine, to which ulps are preferable, are left out.
    """
    return report._replace(findings=list(_merged(report.findings)))


def as_json(report: Report) -> dict[str, Any]:
    """The report as values that json can serialize."""
    return {
        "settings": report.settings,
        "seconds": round(report.seconds, 2),
        "failed": [finding.name for finding in report.failed],
        "rows": [_row(finding) for finding in report.findings],
        "curves": report.curves,
    }


def measured(finding: Finding) -> str:
    """Result of a row, as a short text."""
    if finding.equal:
        return "equal bits"
    if finding.promise == DIFFERS and finding.holds:
        return "differs"
    if finding.promise in (CLEAN, NAMED):
        return finding.promise if finding.holds else {CLEAN: "defects", NAMED: "missed"}[finding.promise]
    if finding.ulps == NAN_DISTANCE:
        return "NaN"
    if finding.ulps is None:
        return f"a ratio of {_number(finding.share)}"
    return "sign of 0" if finding.ulps == 0 else f"{finding.ulps:,} ulp"


def blocks(values: Sequence[float], low: float, high: float) -> str:
    """Draws a curve with one block per value, the lowest for ``low``, the highest for ``high``; ``!``: not finite.

    >>> blocks([0.0, 0.5, 1.0, float("nan")], 0.0, 1.0)
    '▁▅█!'
    """
    return "".join(_block(value, low, high) for value in values)


def _description(report: Report) -> str:
    """Description of the verification, with date, command and versions."""
    settings = report.settings
    python = {name: version for name, version in settings.get("machine", {}).items() if name == "python"}
    installed = settings["versions"] | settings.get("libraries", {}) | python
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    return (
        "The gradients of a classifier, of microbatches of different sizes, are combined by NumPy, JAX and TensorFlow "
        "in lists, over time, over replicas and both, eager and compiled, and compared bit by bit with one reference; "
        "then the classifier is trained in both frameworks.\n"
        + "\n".join(text for text in (settings.get("date"), settings.get("command"), versions) if text)
    )


def _section(name: str, framework: str, findings: Sequence[Finding]) -> Section:
    results = ("ratio",) if name == "training" else ("measured", "relative", "of bound")
    labels = [label for label in findings[0].labels if not (framework and label == "framework")]
    title, note = (f"Combine in {framework}", _DISTANCES) if framework else (_TITLES[name], _NOTES[name])
    cells = [_cells(row, labels) for row in findings]
    folded = bool(framework) and all(row.holds for row in findings)
    return Section(title, note, columns=(*labels, "expected", *results, ""), rows=cells, whole=True, folded=folded)


def _cells(row: Finding, labels: Sequence[str]) -> Cells:
    # The result of a training row is the ratio itself.
    results = (measured(row), _number(row.relative)) if row.section != "training" else ()
    mark = "ok" if row.holds else "no"
    texts = (str(row.labels[label]) for label in labels)
    return Cells((*texts, row.promise, *results, _number(row.share), mark), row.holds)


def _grid(report: Report) -> Section:
    """Table with a row for each mode and a column for each place; cells have a mark for each order of addition."""
    cells: dict[tuple[str, str, str], list[Finding]] = {}
    for row in report.findings:
        if row.section == "combine":
            labels = row.labels
            place = "both" if labels["place"] == TIME_AND_REPLICAS else labels["place"]
            cells.setdefault((f"{labels['framework']} {labels['mode']}", place, labels["order"]), []).append(row)
    modes, columns, orders = (list(dict.fromkeys(key[side] for key in cells)) for side in range(3))
    rows: list[Cells] = []
    for mode in modes:
        by_column = [[cells.get((mode, column, order), []) for order in orders] for column in columns]
        marks = ("\N{NO-BREAK SPACE}".join(filter(None, map(_mark, by_order))) for by_order in by_column)
        rows.append(Cells((mode, *marks), all(x.holds for by_order in by_column for each in by_order for x in each)))
    return Section(_TITLES["combine"], _NOTES["combine"], columns=("", *columns), rows=rows, whole=True)


def _mark(rows: Sequence[Finding]) -> str:
    """Worst result of rows that differ in their number of replicas."""
    if not rows:
        return ""
    if not all(row.holds for row in rows):
        return "no"
    return "=" if all(row.equal for row in rows) else _number(max(row.share or 0.0 for row in rows))


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    def key(finding: Finding) -> tuple[object, ...]:
        others = [value for name, value in finding.labels.items() if name != "replicas"]
        return (finding.section, *others, finding.promise, finding.holds, finding.equal or finding.promise == BOUND)

    for _, group in groupby(findings, key=key):
        rows = list(group)
        labels = dict(rows[0].labels)
        if "replicas" in labels:
            labels["replicas"] = " ".join(str(row.labels["replicas"]) for row in rows)
        worst = {
            measure: max((getattr(row, measure) for row in rows if getattr(row, measure) is not None), default=None)
            for measure in ("ulps", "relative", "share")
        }
        if rows[0].section == "combine":
            worst["relative"] = None
        yield dataclasses.replace(rows[0], labels=labels, equal=all(row.equal for row in rows), **worst)


def _losses(curves: Mapping[str, Sequence[float]]) -> list[Section]:
    """Curves on a common scale, with their first and last values; and a table of all values."""
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    rows = [Cells((name, blocks(x, low, high), f"{x[0]:.4f} to {x[-1]:.4f}")) for name, x in curves.items()]
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


def _flattened(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _flattened(f"{name}: {key}" if name else str(key), inner)
    else:
        values = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
        yield name, " ".join(map(str, values))


def _row(finding: Finding) -> dict[str, Any]:
    row = {"name": finding.name} | dataclasses.asdict(finding)
    # JSON has no infinity and no NaN.
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def _number(value: float | None) -> str:
    """Formats a number with two digits; empty for None."""
    return "" if value is None else f"{value:.2g}"


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    fraction = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(fraction * len(_BLOCKS))))]
