"""Report of a diff, as sections for the terminal and HTML, and as JSON."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from gradcombine.reporting.sections import Cells, HeatMap, Histogram, Section
from gradcombine.verify.compare.meter import Element, LeafDifference
from gradcombine.verify.compare.reference import LIMIT, Judgement
from gradcombine.verify.compare.ulp import NAN_DISTANCE, kind_of, rounding_unit
from gradcombine.verify.diff.by_step import RunReport
from gradcombine.verify.diff.common_layout import says_gradients
from gradcombine.verify.diff.comparing import DiffReport, Row

COLUMNS = ("leaf", "matched by", "shape", "dtype", "largest", "median", "relative", "1 - cosine", "NaN", "inf", "worst")
_STEP_COLUMNS = ("step", "leaves that differ", "not compared", "largest", "worst leaf")

PLOTTED = 8
"""Maximum number of leaves with a histogram."""

MAPPED = 60
"""Maximum number of leaves in a heat map."""

NEAR_ZERO = 16
"""Roundings of the largest element, up to which a leaf may be 0 in exact arithmetic."""

_TICKS = {0: "equal", 1: "1 ulp", 8: "2^7", 16: "2^15", 24: "2^23", 33: "2^32 or NaN"}


def verdict(report: DiffReport | RunReport) -> str:
    """The result in a sentence."""
    if isinstance(report, RunReport):
        if report.passes:
            return "The only step passes." if len(report.steps) == 1 else f"All {len(report.steps)} steps pass."
        if report.first is not None:
            return f"The first step that differs is {report.first}: {verdict(report.steps[report.first])}"
        return "The runs could not be compared completely."
    judged = Counter(row.judgement.verdict for row in report.rows if row.judgement is not None)
    if report.passes:
        noise = " Both sides are within their rounding noise of the reference." if judged else ""
        by_values = sum(row.pair.reason in ("values", "shape") for row in report.rows)
        matched = f" {by_values:,} were matched by values or shape, not by name." if by_values else ""
        return f"All {len(report.rows):,} leaves ({report.elements:,} elements) pass.{noise}{matched}"
    off = [(f"({verdict})", number) for verdict, number in judged.items() if verdict != "within noise"]
    counts = (
        *(off or [("do not pass", sum(not row.passes for row in report.rows))]),
        ("have no counterpart", len(report.only_a) + len(report.only_b)),
        ("could not be compared", len(report.left_out)),
    )
    failures = [f"{number:,} {text}" for text, number in counts if number]
    compared = f"{len(report.rows):,} leaves were compared" if report.rows else "No leaf was compared"
    return "; ".join([compared, *failures]) + "."


def sections(report: DiffReport | RunReport) -> list[Section]:
    """The tables and charts: first what was not compared, then what differs, worst first."""
    parts = _of_runs(report) if isinstance(report, RunReport) else _of_dumps(report)
    return [section for section in parts if section.rows]


def as_json(report: DiffReport | RunReport) -> dict[str, Any]:
    """The report as JSON-serializable values."""
    if isinstance(report, RunReport):
        return {
            "passes": report.passes,
            "only_a": report.only_a,
            "only_b": report.only_b,
            "left_out": report.left_out,
            "steps": {step: as_json(of_step) for step, of_step in report.steps.items()},
        }
    return {
        "passes": report.passes,
        "elements": report.elements,
        "only_a": list(report.only_a),
        "only_b": list(report.only_b),
        "left_out": [each._asdict() for each in report.left_out],
        "mixed_up": [list(each) for each in report.mixed_up],
        "tied": [list(each) for each in report.tied],
        "crossed": [list(each) for each in report.crossed],
        "leaves": [
            {"a": row.pair.a, "b": row.pair.b, "matched_by": row.pair.reason, "axes": row.pair.axes}
            | ({"flipped": row.pair.flipped} if row.pair.flipped else {})
            | ({"shapes": row.reshaped} if row.reshaped else {})
            | {"passes": row.passes}
            | ({} if row.judgement is None else {"judgement": _without_name(row.judgement)})
            | _without_name(row.difference)
            for row in report.rows
        ],
    }


def _of_dumps(report: DiffReport) -> list[Section]:
    equal = [row for row in report.rows if row.difference.equal_bits and row.difference.same_dtype]
    differ = [row for row in report.rows if not (row.difference.equal_bits and row.difference.same_dtype)]
    plotted = [row for row in differ if not row.difference.equal_bits][:PLOTTED]
    tied = dict(report.tied)
    return [
        Section(
            "Leaves that were not compared",
            "A rules file can ignore them (ignore_a, ignore_b).",
            columns=("leaf", "reason"),
            rows=[Cells(each, False) for each in report.left_out],
        ),
        Section(
            "Leaves without a counterpart",
            "A rules file can ignore them (ignore_a, ignore_b).",
            columns=("leaf", ""),
            rows=[
                Cells((name, f"only in {side}" + (f", with the bits of {tied[name]}" if name in tied else "")), False)
                for side, names in _sides(report)
                for name in names
            ],
        ),
        Section(
            "Leaves that agree only with their axes in another order than their shapes and names imply",
            "Typical of a kernel that was transposed by mistake or should have been transposed, or of flax's kernel of "
            "a transposed convolution that should have been flipped. It fails if the other kernels follow the "
            "convention of their names. Where all others contradict it, a square kernel that follows it is listed, and "
            "fails. If it is intended, add a rule (transpose).",
            columns=("leaf", "axes of B"),
            rows=[Cells((row.difference.name, _axes(row)), row.passes) for row in report.rows if row.transposed],
        ),
        Section(
            "Kernels that are compared as those of transposed convolutions",
            "Equal with the spatial axes of B reversed, as between PyTorch and flax. Kernels of other convolutions are "
            "not reversed; it fails if they may be those of depthwise convolutions.",
            columns=("leaf", "axes of B", "reversed axes"),
            rows=[
                Cells((row.difference.name, _axes(row), ", ".join(map(str, row.pair.flipped))), row.passes)
                for row in report.rows
                if row.pair.flipped
            ],
        ),
        Section(
            "Leaves with different shapes",
            "Compared without axes of length 1, or with two adjacent axes merged, such as heads, or channels.",
            columns=("leaf", "shape in A", "shape in B"),
            rows=[
                Cells((row.difference.name, *(" x ".join(map(str, shape)) for shape in row.reshaped)), row.passes)
                for row in report.rows
                if row.reshaped is not None
            ],
        ),
        Section(
            "Which side is off",
            "Distance of each side from the reference, in units of the side's rounding noise; a side is off above "
            f"{LIMIT:g}. The noise is that of the given number of successive roundings. If the reference is off, both "
            "sides may compute the same different function.",
            columns=("leaf", "verdict", "A", "B", "roundings"),
            rows=[
                Cells((each.name, each.verdict, *(f"{x:,.3g}" for x in (each.a, each.b, each.roundings))), each.passes)
                for each in (row.judgement for row in report.rows)
                if each is not None
            ],
        ),
        Section(
            "Leaves that resemble another leaf",
            "They do not resemble the leaf that their names pair them with, or have none, as if leaves were swapped.",
            columns=("leaf of A", "resembles leaf of B"),
            rows=[Cells(each, False) for each in report.mixed_up],
        ),
        Section(
            "Leaves that values match, but names pair with another leaf",
            "As if layers were loaded in another order, or modules swapped. If it is intended, add a rule.",
            columns=("leaf of A", "equal leaf of B", "leaf of B by name"),
            rows=[Cells(each, False) for each in report.crossed],
        ),
        Section(
            "Leaves that differ, but are as small as the rounding error of the largest leaf",
            "Such are gradients that are 0 in exact arithmetic, as of the bias of attention's keys or a bias before a "
            "normalization; but a small gradient may also be wrong. A float64 --reference decides; --atol passes them.",
            columns=("leaf", "largest difference", "largest magnitude", "of all leaves"),
            rows=[Cells(cells, False) for cells in _near_zero(report.rows)],
        ),
        Section(
            "Leaves that differ",
            "Worst first. Distances in units in the last place (ulp); relative to the leaf's largest element.",
            [_histogram(row) for row in plotted],
            COLUMNS,
            [_cells(row) for row in differ],
        ),
        Section("Leaves with equal bits", columns=COLUMNS, rows=[_cells(row) for row in equal], folded=True),
    ]


def _near_zero(rows: Iterable[Row]) -> Iterator[tuple[str, ...]]:
    """The leaves that fail, though all their elements are at most `NEAR_ZERO` roundings of their stage's largest."""
    stages: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        stage = row.pair.a.split("/")[0]
        if all(kind_of(np.dtype(dtype)) != "integer" for dtype in row.difference.dtypes):
            stages[stage if says_gradients(stage) else ""].append(row)
    for stage in stages.values():
        scale = max(row.difference.largest for row in stage)
        for leaf in (row.difference for row in stage if not row.passes and row.difference.same_specials):
            limit = NEAR_ZERO * max(rounding_unit(np.dtype(dtype)) for dtype in leaf.dtypes) * scale
            if 0 < leaf.absolute <= limit and leaf.largest <= limit:
                yield leaf.name, *(f"{x:.1e}" for x in (leaf.absolute, leaf.largest, scale))


def _of_runs(report: RunReport) -> list[Section]:
    """A heat map and a row per step, then the details of the first step that differs."""
    lines: list[Cells] = []
    for step, of_step in report.steps.items():
        failed = [row for row in of_step.rows if not row.passes]
        worst = _cells(failed[0]).cells if failed else ("",) * len(COLUMNS)
        missing = len(of_step.only_a) + len(of_step.only_b) + len(of_step.left_out)
        counts = f"{len(failed)} of {len(of_step.rows)}", str(missing or "")
        lines.append(Cells((str(step), *counts, worst[4], worst[0]), of_step.passes))
    not_compared = [(f"step {step}", f"only in {side}") for side, steps in _sides(report) for step in steps]
    not_compared += [(name, "no step in its name, or an unknown format") for name in report.left_out]
    first = [] if report.first is None else sections(report.steps[report.first])
    return [
        Section("Steps", charts=_heat_map(report), columns=_STEP_COLUMNS, rows=lines, whole=True),
        Section("Not compared", columns=("", "reason"), rows=[Cells(each, False) for each in not_compared]),
        *(each._replace(title=f"Step {report.first}: {each.title}") for each in first),
    ]


def _cells(row: Row) -> Cells:
    """A pair of leaves as a table row with `COLUMNS`."""
    leaf = row.difference
    matched = [row.pair.reason] * (row.pair.reason != "name") + [f"axes {_axes(row)}"] * bool(row.pair.axes)
    return Cells(
        (
            leaf.name,
            ", ".join([*matched, *["flipped"] * bool(row.pair.flipped)]),
            " x ".join(map(str, leaf.shape)) or "scalar",
            leaf.dtypes[0] if leaf.same_dtype else " | ".join(leaf.dtypes),
            *(
                "NaN" if leaf.nan_against_number and ulp == NAN_DISTANCE else f"{ulp:,} ulp"
                for ulp in (leaf.max_ulp, leaf.median_ulp)
            ),
            f"{leaf.relative:.1e}",
            f"{1 - leaf.cosine:.1e}",
            *(" | ".join(map(str, pair)) if any(pair) else "" for pair in (leaf.nans, leaf.infs)),
            _worst(leaf),
        ),
        row.passes,
    )


def _worst(leaf: LeafDifference) -> str:
    if leaf.worst is None:
        return ""
    # A scalar of the leaf's dtype prints no more digits than this dtype has.
    sides = zip((leaf.worst.a, leaf.worst.b), leaf.dtypes, strict=True)
    return f"{leaf.position(leaf.worst)} {' | '.join(str(np.dtype(dtype).type(x)) for x, dtype in sides)}"


def _histogram(row: Row) -> Histogram:
    *counts, nans = row.difference.ulp_counts
    bars = dict(zip(["0", *(f"2^{i}" for i in range(len(counts) - 1))], counts, strict=True))
    alt = f"Histogram of distances in ulp of {row.difference.name}: the largest is {row.difference.max_ulp}"
    return Histogram(row.difference.name, bars | ({"NaN": nans} if nans else {}), alt)


def _heat_map(report: RunReport) -> list[HeatMap]:
    """The bit length of each leaf's largest distance in each step, for the worst leaves."""
    worst: dict[str, int] = {}
    lengths: dict[tuple[str, int], float] = {}
    for step, of_step in report.steps.items():
        for leaf in (row.difference for row in of_step.rows):
            worst[leaf.name] = max(worst.get(leaf.name, 0), leaf.max_ulp)
            # Equal numbers may have different bits: signed zeros.
            lengths[leaf.name, step] = min(33, max(leaf.max_ulp.bit_length(), int(not leaf.equal_bits)))
    names = sorted(worst, key=lambda name: -worst[name])[:MAPPED]
    values = {name: [lengths.get((name, step), math.nan) for step in report.steps] for name in names}
    alt = f"Heat map of the largest distance of each leaf in each step; the {len(names)} worst of {len(worst)} leaves"
    return [HeatMap(list(map(str, report.steps)), values, _TICKS, alt)] if names else []


def _sides(report: DiffReport | RunReport) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    return (("A", report.only_a), ("B", report.only_b))


def _axes(row: Row) -> str:
    return ", ".join(map(str, row.pair.axes or range(len(row.difference.shape))))


def _without_name(fields: LeafDifference | Judgement) -> dict[str, Any]:
    return {key: _plain(value) for key, value in fields._asdict().items() if key != "name"}


def _plain(value: Any) -> Any:
    if isinstance(value, Element):
        return {"at": value.at, "a": _plain(value.a), "b": _plain(value.b)}
    if isinstance(value, tuple):
        return [_plain(x) for x in cast("tuple[Any, ...]", value)]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    # JSON has no infinity and no NaN.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
