"""The report of a diff as a page with plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap

from gradcombine.verify import page
from gradcombine.verify.diff import rows
from gradcombine.verify.diff.measure import DiffReport, Row
from gradcombine.verify.diff.steps import StepReport
from gradcombine.verify.report import Figure, Section

PLOTTED = 8
"""How many leaves get a histogram."""

MAPPED = 60
"""How many leaves a heat map has."""


def write(path: Path, names: tuple[str, str], report: DiffReport) -> None:
    """Writes the report of two dumps."""
    tables = _with_plots(report, rows.sections(report))
    page.write(path, _title(names), rows.verdict(report), report.passes, tables)


def write_steps(path: Path, names: tuple[str, str], report: StepReport) -> None:
    """Writes the report of two runs: a heat map of leaves and steps, then the first step that differs."""
    tables = rows.step_sections(report)
    if report.first is not None:
        tables = _with_plots(report.steps[report.first], tables)
    page.write(path, _title(names), rows.step_verdict(report), report.passes, [_heat_map(report), *tables])


def _title(names: tuple[str, str]) -> str:
    return f"{names[0]} against {names[1]}"


def _with_plots(report: DiffReport, sections: Sequence[Section]) -> list[Section]:
    """The same sections, with histograms before the leaves that differ."""
    apart = [row for row in report.rows if not row.difference.equal_bits][:PLOTTED]
    plots = [_histogram(row) for row in apart]
    return [each._replace(figures=plots) if each.title.endswith(rows.DIFFER) else each for each in sections]


def _histogram(row: Row) -> Figure:
    figure, axes = page.plot(4.2, 2.4)
    *counts, nans = row.difference.ulp_counts
    labels = ["0", *(f"2^{i}" for i in range(len(counts) - 1))] + (["NaN"] if nans else [])
    axes.bar(range(len(labels)), counts + ([nans] if nans else []), color="#3b6ea5")
    axes.set_yscale("symlog", linthresh=1)
    shown = range(0, len(labels), max(1, math.ceil(len(labels) / 8)))
    axes.set_xticks(list(shown), [labels[i] for i in shown], fontsize=7)
    axes.set_title(_short(row.difference.name), fontsize=8)
    axes.set_xlabel("ulp", fontsize=7)
    axes.set_ylabel("elements", fontsize=7)
    axes.tick_params(axis="y", labelsize=7)
    return page.drawn(
        figure, f"Histogram of distances in ulp of {row.difference.name}: the largest is {row.difference.max_ulp}"
    )


def _heat_map(report: StepReport) -> Section:
    steps = list(report.steps)
    worst: dict[str, int] = {}
    for found in report.steps.values():
        for row in found.rows:
            worst[row.difference.name] = max(worst.get(row.difference.name, 0), row.difference.max_ulp)
    names = sorted(worst, key=lambda name: -worst[name])[:MAPPED]
    if not names:
        return Section("Leaves and steps", "No leaf is in both runs.")
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
    return Section("Leaves and steps", note, [picture])


def _heights(report: StepReport, names: Sequence[str], steps: Sequence[int]) -> np.ndarray:
    """The bit length of each distance, 33 at most; NaN where a step lacks the leaf."""
    lines = {name: i for i, name in enumerate(names)}
    heights = np.full((len(names), len(steps)), np.nan)
    for column, step in enumerate(steps):
        for row in report.steps[step].rows:
            if row.difference.name in lines:
                height = min(33, row.difference.max_ulp.bit_length())
                # Equal numbers may have unequal bits: the signs of zeros.
                heights[lines[row.difference.name], column] = height if row.difference.equal_bits else max(1, height)
    return heights


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"...{name[-57:]}"
