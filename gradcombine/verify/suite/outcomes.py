"""Results of a verification: its rows once, as JSON and as sections of a screen or a page."""

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
"""Promises of a row: the reference's bits; a distance within the rounding bound; as a contrast, one beyond it; no
defect in a step; as a contrast, a defect that has to be named.
"""

LIST, TIME, REPLICAS, TIME_AND_REPLICAS = "list", "time", "replicas", "time x replicas"
"""Places of a row of the combine."""


@dataclass(frozen=True)
class Finding:
    """One row: what was compared, what it promised, and what was found.

    Attributes:
      section: the part of the report that it belongs to.
      labels: what tells the row from the others of its section.
      promise: in a word.
      holds: whether the promise was kept.
      ulps: the largest distance from the reference, in units in the last place; None where there is no reference.
      relative: the largest distance from the reference, relative to the largest magnitude of the same leaf.
      share: what was found over what is allowed.
      equal: whether all bits are those of the reference.
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
    """Everything that was found.

    Attributes:
      findings: the rows of all sections.
      curves: the losses of the trainings, by name.
      settings: what was run, and with which versions.
      seconds: how long it took.
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
    "full batch": "Full batch: microbatches of different sizes against one batch",
    "kernels": "Kernels: one batch's gradient by JAX and by TensorFlow",
    "training": "Training with accumulated gradients, in both frameworks",
    "defects": "Defects: steps that check and audit have to name, and one repaired",
    "audit": "Audit: what the library's own steps do when they are compiled",
}

_NOTES = {
    "combine": "=: the bits of NumPy's list in the same order, for every number of replicas.\n"
    "A number: where the framework's own all-reduce chooses the order, the largest distance from the exact mean, "
    "over what rounding may do; up to 1 it holds. An empty cell: there is no such place in this mode.\n"
    "First from left to right, then in the canonical tree's order. both: over time, and then over replicas.",
    "full batch": "found: the largest distance from the whole batch's gradient, computed in one pass.\n"
    "relative: to the leaf's largest element. of bound: over what rounding may do in both computations.\n"
    "The mean of means is a contrast: it has to differ by more than rounding.",
    "kernels": "Nothing is combined here. In the combine above, one framework's gradients are the input of all rows.",
    "training": "ratio: what was found over what is allowed. The windows' losses are below.",
    "defects": "`gradcombine check module:make_case` and `gradcombine audit module:make_step` answer for your steps.",
    "audit": "Exchanges once a window, no work or copy without use; `gradcombine audit` reports on any step.",
}

_DISTANCES = (
    "found: the largest distance from NumPy's list in the same order, over all elements and replicas.\n"
    "of bound: the largest distance from the exact mean, over what rounding may do."
)

_BLOCKS = "▁▂▃▄▅▆▇█"


def verdict(report: Report) -> str:
    """The answer in a sentence."""
    rows, failed = len(report.findings), len(report.failed)
    return f"{failed} of {rows} promises not kept." if failed else f"All {rows} rows keep what they promise."


def sections(report: Report) -> list[Section]:
    """The tables and charts: what failed, every row, the losses, and all that ran with its versions."""

    def table(row: Finding) -> tuple[str, str]:
        return row.section, row.labels["framework"] if row.section == "combine" else ""

    settings = [Cells((name, text)) for name, text in _named("", report.settings)]
    settings.append(Cells(("seconds", f"{report.seconds:.0f}")))
    failed = [Cells((row.name, row.promise, found(row)), False) for row in report.failed]
    return [
        *([Section("Not kept", columns=("row", "promise", "found"), rows=failed, whole=True)] if failed else []),
        Section("What was done", _done(report)),
        _grid(report),
        *(_section(*key, list(rows)) for key, rows in groupby(report.findings, key=table)),
        *_losses(report.curves),
        Section("Versions and settings", columns=("", ""), rows=settings, folded=True),
    ]


def summary(report: Report) -> Report:
    """The report for a screen: rows that differ only in the number of replicas, and hold alike, are one row.

    Its measures are the worst ones. Relative distances of the combine, where those in ulp say more, are left out.
    """
    return report._replace(findings=list(_merged(report.findings)))


def as_json(report: Report) -> dict[str, Any]:
    """Every row, curve, setting and version, as what json can write."""
    return {
        "settings": report.settings,
        "seconds": round(report.seconds, 2),
        "failed": [finding.name for finding in report.failed],
        "rows": [_row(finding) for finding in report.findings],
        "curves": report.curves,
    }


def found(finding: Finding) -> str:
    """The result of a row, in a word."""
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
    """A curve as one block a value, the lowest for ``low`` and below, the highest for ``high``; ``!``: not finite.

    >>> blocks([0.0, 0.5, 1.0, float("nan")], 0.0, 1.0)
    '▁▅█!'
    """
    return "".join(_block(value, low, high) for value in values)


def _done(report: Report) -> str:
    """Summary of a run: time, versions, and the conclusion if all promises are kept."""
    settings = report.settings
    python = {name: version for name, version in settings.get("machine", {}).items() if name == "python"}
    known = settings["versions"] | settings.get("libraries", {}) | python
    versions = ", ".join(f"{name} {version}" for name, version in known.items())
    return (
        "The gradients of one classifier, in microbatches of different sizes, combined by NumPy, JAX and TensorFlow in "
        "lists, over time, over replicas and both, eager and compiled, compared bit by bit with one reference; then a "
        "training in both frameworks.\n"
        + "\n".join(text for text in (settings.get("date"), settings.get("command"), versions) if text)
    )


def _section(name: str, framework: str, findings: Sequence[Finding]) -> Section:
    measured = ("ratio",) if name == "training" else ("found", "relative", "of bound")
    labels = [label for label in findings[0].labels if not (framework and label == "framework")]
    title, note = (f"Combine in {framework}", _DISTANCES) if framework else (_TITLES[name], _NOTES[name])
    cells = [_cells(row, labels) for row in findings]
    folded = bool(framework) and all(row.holds for row in findings)
    return Section(title, note, columns=(*labels, "promise", *measured, ""), rows=cells, whole=True, folded=folded)


def _cells(row: Finding, labels: Sequence[str]) -> Cells:
    # In the training, what was found is the ratio itself.
    measured = (found(row), _number(row.relative)) if row.section != "training" else ()
    mark = "ok" if row.holds else "no"
    texts = (str(row.labels[label]) for label in labels)
    return Cells((*texts, row.promise, *measured, _number(row.share), mark), row.holds)


def _grid(report: Report) -> Section:
    """A line for each mode, a column for each place; a cell tells of both orders, and of all numbers of replicas."""
    cells: dict[tuple[str, str, str], list[Finding]] = {}
    for row in report.findings:
        if row.section == "combine":
            labels = row.labels
            place = "both" if labels["place"] == TIME_AND_REPLICAS else labels["place"]
            cells.setdefault((f"{labels['framework']} {labels['mode']}", place, labels["order"]), []).append(row)
    modes, columns, orders = (list(dict.fromkeys(key[side] for key in cells)) for side in range(3))
    rows: list[Cells] = []
    for mode in modes:
        found = [[cells.get((mode, column, order), []) for order in orders] for column in columns]
        marks = ("\N{NO-BREAK SPACE}".join(filter(None, map(_mark, each))) for each in found)
        rows.append(Cells((mode, *marks), all(row.holds for each in found for inner in each for row in inner)))
    return Section(_TITLES["combine"], _NOTES["combine"], columns=("", *columns), rows=rows, whole=True)


def _mark(rows: Sequence[Finding]) -> str:
    """The mark of rows that differ in their number of replicas: the worst of them."""
    if not rows:
        return ""
    if not all(row.holds for row in rows):
        return "no"
    return "=" if all(row.equal for row in rows) else _number(max(row.share or 0.0 for row in rows))


def _merged(findings: Iterable[Finding]) -> Iterator[Finding]:
    def key(finding: Finding) -> tuple[object, ...]:
        others = [value for name, value in finding.labels.items() if name != "replicas"]
        return (finding.section, *others, finding.promise, finding.holds, finding.equal or finding.promise == BOUND)

    for _, alike in groupby(findings, key=key):
        rows = list(alike)
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
    """The curves on one scale, with where each begins and ends; and their values."""
    finite = [value for curve in curves.values() for value in curve if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    rows = [Cells((name, blocks(x, low, high), f"{x[0]:.4f} to {x[-1]:.4f}")) for name, x in curves.items()]
    note = "The mean of means is there as a contrast: the same training with the microbatches' weights left out."
    windows = enumerate(zip(*curves.values(), strict=True), 1)
    values = [Cells((str(i), *(f"{x:.7f}" for x in losses))) for i, losses in windows]
    (first, base), *others = curves.items()
    apart = {f"{name} - {first}": [abs(a - b) for a, b in zip(x, base, strict=True)] for name, x in others}
    charts = [
        Curves(curves, "loss", None, "The losses of the windows, a curve for each training"),
        Curves(apart, "distance", 1e-9, f"The distance of the other trainings' losses from those of {first}"),
    ]
    return [
        Section(LOSSES, note, charts, ("training", "loss", ""), rows, whole=True),
        Section("Losses by window", columns=("window", *curves), rows=values, folded=True),
    ]


def _named(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            yield from _named(f"{name}: {key}" if name else str(key), inner)
    else:
        values = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else (value,)
        yield name, " ".join(map(str, values))


def _row(finding: Finding) -> dict[str, Any]:
    row = {"name": finding.name} | dataclasses.asdict(finding)
    # JSON has no infinity and no NaN.
    return {key: str(x) if isinstance(x, float) and not math.isfinite(x) else x for key, x in row.items()}


def _number(value: float | None) -> str:
    """A number with two digits; nothing for None."""
    return "" if value is None else f"{value:.2g}"


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return "!"
    part = (value - low) / (high - low) if high > low else 0.0
    return _BLOCKS[min(len(_BLOCKS) - 1, max(0, int(part * len(_BLOCKS))))]
