"""The report of a diff as a page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap

from gradcombine.verify import page
from gradcombine.verify.diff.measure import DiffReport, Row
from gradcombine.verify.diff.show import ulps
from gradcombine.verify.diff.steps import StepReport
from gradcombine.verify.ulp import NAN_DISTANCE

PLOTTED = 8
"""How many leaves get a histogram."""

MAPPED = 60
"""How many leaves a heat map has."""

_COLUMNS = ("leaf", "matched by", "shape", "dtypes", "largest", "median", "relative", "cosine", "NaN", "inf", "worst")


def write(path: Path, names: tuple[str, str], report: DiffReport) -> None:
    """Writes the report of two dumps."""
    page.write(path, _title(names), _verdict(report), report.passes, _sections(report))


def write_steps(path: Path, names: tuple[str, str], report: StepReport) -> None:
    """Writes the report of two runs: a heat map of leaves and steps, then the first step that differs."""
    first = report.first
    verdict = f"All {len(report.steps)} steps pass." if report.passes else f"The first step that differs is {first}."
    if first is None and not report.passes:
        verdict = "Not all steps are in both runs."
    sections = [_heat_map(report)]
    lonely = [("A", step) for step in report.only_a] + [("B", step) for step in report.only_b]
    if lonely:
        rows = [page.Cells((f"step {step}", f"only in {side}"), False) for side, step in lonely]
        sections.append(page.Section("Steps without a counterpart", columns=("step", ""), rows=rows))
    if first is not None:
        note = f"Step {first}: {_verdict(report.steps[first])}"
        sections += [page.Section(f"Step {first}", note), *_sections(report.steps[first])]
    page.write(path, _title(names), verdict, report.passes, sections)


def _title(names: tuple[str, str]) -> str:
    return f"{names[0]} against {names[1]}"


def _verdict(report: DiffReport) -> str:
    if report.passes:
        return f"All {len(report.rows)} leaves ({report.elements:,} elements) pass."
    failed = sum(not row.passes for row in report.rows)
    unmatched = len(report.only_a) + len(report.only_b)
    return f"{failed} of {len(report.rows)} leaves do not pass; {unmatched} have no counterpart."


def _sections(report: DiffReport) -> list[page.Section]:
    apart = [row for row in report.rows if not row.found.equal_bits]
    equal = [row for row in report.rows if row.found.equal_bits]
    sections = [
        page.Section(
            "Leaves that differ",
            "The worst first. Distances in units in the last place (ulp); relative to the leaf's largest element.",
            [_histogram(row) for row in apart[:PLOTTED]],
            _COLUMNS,
            [_cells(row) for row in apart],
        ),
        page.Section("Leaves with equal bits", columns=_COLUMNS, rows=[_cells(row) for row in equal], folded=True),
    ]
    lonely = [(name, side) for side, names in (("A", report.only_a), ("B", report.only_b)) for name in names]
    if lonely:
        rows = [page.Cells((name, f"only in {side}"), False) for name, side in lonely]
        sections.insert(0, page.Section("Leaves without a counterpart", columns=("leaf", ""), rows=rows))
    return [section for section in sections if section.rows]


def _cells(row: Row) -> page.Cells:
    pair, found = row.pair, row.found
    matched = pair.reason + ("" if pair.axes is None else f", axes {', '.join(map(str, pair.axes))}")
    worst = "" if found.worst is None else f"[{found.worst.at}] {found.worst.a!r} | {found.worst.b!r}"
    shape = " x ".join(map(str, found.shape)) or "scalar"
    dtypes = found.dtypes[0] if found.same_dtype else " | ".join(found.dtypes)
    counts = [" | ".join(map(str, pair)) if any(pair) else "" for pair in (found.nans, found.infs)]
    distances = (ulps(found.max_ulp), ulps(found.median_ulp), f"{found.relative:.2e}", f"{found.cosine:.9f}")
    return page.Cells((found.name, matched, shape, dtypes, *distances, *counts, worst), row.passes)


def _histogram(row: Row) -> page.Figure:
    figure, axes = page.plot(4.2, 2.4)
    *counts, nans = row.found.ulp_counts
    labels = ["0", *(f"2^{i}" for i in range(len(counts) - 1))] + (["NaN"] if nans else [])
    axes.bar(range(len(labels)), counts + ([nans] if nans else []), color="#3b6ea5")
    axes.set_yscale("symlog", linthresh=1)
    shown = range(0, len(labels), max(1, math.ceil(len(labels) / 8)))
    axes.set_xticks(list(shown), [labels[i] for i in shown], fontsize=7)
    axes.set_title(_short(row.found.name), fontsize=8)
    axes.set_xlabel("ulp", fontsize=7)
    axes.set_ylabel("elements", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    return page.drawn(figure, f"Histogram of distances in ulp of {row.found.name}: the largest is {row.found.max_ulp}")


def _heat_map(report: StepReport) -> page.Section:
    steps = list(report.steps)
    worst: dict[str, int] = {}
    for found in report.steps.values():
        for row in found.rows:
            worst[row.found.name] = max(worst.get(row.found.name, 0), row.found.max_ulp)
    names = sorted(worst, key=lambda name: -worst[name])[:MAPPED]
    if not names:
        return page.Section("Leaves and steps", "No leaf is in both runs.")
    heights = _heights(report, names, steps)
    figure, axes = page.plot(min(14, 4 + 0.25 * len(steps)), 1.5 + 0.18 * len(names))
    colours = ListedColormap(["#f2f2f2", *(f"#{255 - 3 * i:02x}{200 - 6 * i:02x}{120 - 3 * i:02x}" for i in range(33))])
    image = axes.imshow(heights, aspect="auto", cmap=colours, vmin=-0.5, vmax=33.5, interpolation="nearest")
    axes.set_yticks(range(len(names)), [_short(name) for name in names], fontsize=6)
    axes.set_xticks(range(len(steps)), list(map(str, steps)), fontsize=6)
    axes.set_xlabel("step", fontsize=7)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 1, 8, 16, 24, 33])
    bar.ax.set_yticklabels(["equal", "1 ulp", "2^7", "2^15", "2^23", "2^32 or NaN"], fontsize=6)
    note = f"The largest distance of each leaf in each step; the {len(names)} worst of {len(worst)} leaves."
    picture = page.drawn(figure, "Heat map of the largest distance of each leaf in each step")
    return page.Section("Leaves and steps", note, [picture])


def _heights(report: StepReport, names: Sequence[str], steps: Sequence[int]) -> np.ndarray:
    """The bit length of each distance, 33 at most; NaN where a step lacks the leaf."""
    rows = {name: i for i, name in enumerate(names)}
    heights = np.full((len(names), len(steps)), np.nan)
    for column, step in enumerate(steps):
        for row in report.steps[step].rows:
            if row.found.name in rows:
                distance = row.found.max_ulp
                height = 33 if distance == NAN_DISTANCE else min(33, distance.bit_length())
                # Equal numbers may have unequal bits: the signs of zeros.
                heights[rows[row.found.name], column] = height if row.found.equal_bits else max(1, height)
    return heights


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"...{name[-57:]}"
