"""Report of `gradcombine check`: verdict, remedies and distances, as sections and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradcombine.errors import operation
from gradcombine.reporting.earlier import read_earlier
from gradcombine.reporting.sections import Cells, HeatMap, Section
from gradcombine.verify.check.step_report import Cause, Fault, StepReport, Verdict

VERSION = 1
"""Version of the JSON format."""

STATUS = {Verdict.PASSES: 0, Verdict.FAILS: 1, Verdict.CANNOT_TELL: 2}
"""Exit status of each verdict; errors also exit with 2."""

GOOD = {Verdict.PASSES: True, Verdict.FAILS: False, Verdict.CANNOT_TELL: None}
"""Whether each verdict is good; None if unknown."""

_SUMS = "return sums and counts from each microbatch, add up both, and divide once at the end"
_AT_THE_END = "apply it once, to the combined gradient at the end of a window"

REMEDIES: Mapping[Cause, str] = {
    Cause.MEAN_OF_MEANS: f"{_SUMS}; or weight each mean by its number of tokens or examples",
    Cause.SUM: "divide by the sum of the weights, or average instead of adding",
    Cause.SCALED: "divide once, by the sum of the weights, and not also by the number of microbatches or devices",
    Cause.COEFFICIENTS: "weight each microbatch by the number of tokens or examples that its loss is a mean over",
    Cause.DENOMINATOR: "divide each term of the loss by its own total count over the window (docs/losses.md)",
    Cause.CHANGED_BEFORE: _AT_THE_END,
    Cause.ADDED: _AT_THE_END,
    Cause.MOVED: _AT_THE_END,
    Cause.MOVED_EACH: "keep the parameters fixed until the end of a window, and update them once",
    Cause.PRECISION: "accumulate in float32, whatever the dtype of the gradients",
    Cause.LOST: "split the batch so that each example is in exactly one part; a shorter last part has a smaller weight",
    Cause.DOUBLED: "split the batch so that each example is in exactly one part",
    Cause.PLACEHOLDERS: "give padding rows the weight 0, and count only real rows in the divisor",
    Cause.KEY: "fold the index of the microbatch, or of the example, into the random key",
    Cause.RANDOM: "derive the random numbers of an example from its index, or check the step without randomness",
    Cause.NOT_EXCHANGED: "sum numerators and weights over the devices (psum), then divide",
    Cause.NEIGHBOURS: "shift labels within each row, before the batch is divided or flattened",
    Cause.SELECTION: "select from the full batch, before it is divided",
    Cause.STATISTICS: "synchronize the statistics over the batch; or, if this is intended, use `--allow statistics` or "
    "`report.allowing('statistics')`",
    Cause.ADVANCED: "update it once per window; or, if this is intended, use `--allow state` or "
    "`report.allowing('state')`",
    Cause.SCATTER: "add rows that share an index (`.at[i].add`) instead of setting them",
    Cause.STATE: "seed random numbers in each call, pass state in as an argument, and clear accumulators",
    Cause.NOT_FINITE: "guard the divisor of a microbatch without tokens; sums and counts need no guard",
    Cause.INACCURATE: "look for a narrow dtype inside the step",
    Cause.BY_PLACE: "advance schedules and decay once per window, not at each microbatch",
}


def verdict(report: StepReport) -> str:
    """Returns the verdict as one sentence."""
    divisions = [run.name for run in report.runs[1:] if "reverse" not in run.name and "padding" not in run.name]
    if report.verdict is Verdict.PASSES:
        allowed = "".join(f", except for an allowed cause: {x.cause}" for x in report.allowed[:1])
        return f"the same: {_listed(divisions)} give the result of one batch{allowed}"
    if not report.runs:
        return f"cannot tell: {report.faults[0]}: {REMEDIES[report.faults[0].cause]}"
    if report.verdict is Verdict.CANNOT_TELL:
        return f"cannot tell: not compared: {report.not_checked[0]}"
    return f"not the same: {report.faults[0]}"


def sections(report: StepReport, source: str = "") -> list[Section]:
    """Returns the causes with remedies, the distances of each division, and what was not compared."""
    parts = list[Section]()
    if report.faults:
        rows = [Cells((f"{x.run}: {x.cause}", x.line, x.detail), False) for x in report.faults]
        parts.append(Section("Causes", source, columns=("cause", "line", "details"), rows=rows, whole=True))
        if remedies := dict.fromkeys(REMEDIES[x.cause] for x in report.faults if x.cause in REMEDIES):
            rows = [Cells((text,)) for text in remedies]
            parts.append(Section("What to write instead", columns=("remedy",), rows=rows, whole=True))
    rows = [
        Cells(
            (
                run.name,
                f"{run.invariance:.2g}",
                run.leaf,
                "" if run.accuracy is None else f"{run.accuracy:.2g}",
                "" if run.noises is None else f"{run.noises:.2g}",
            ),
            run.invariance <= 1 and (run.accuracy is None or run.accuracy <= 1),
        )
        for run in report.runs
    ]
    note = (
        "Distances in units of the rounding bound (at most 1 passes); the last column in units of the rounding noise."
    )
    columns = ("division", "from one batch", "worst leaf", "from the reference", "times the noise")
    parts.append(Section("Divisions", note, _charts(report), columns=columns, rows=rows, whole=True))
    notes = [Cells((f"allowed: {fault}",), True) for fault in report.allowed]
    notes += [Cells((f"not compared: {x}",), False) for x in report.not_checked]
    notes += [Cells((f"not requested: {x}",), True) for x in report.not_asked]
    if notes:
        parts.append(Section("Not covered", columns=("note",), rows=notes, whole=True))
    return parts


MAX_LEAVES = 40
"""Number of leaves in the heat map; the worst ones are shown."""


def _charts(report: StepReport) -> list[HeatMap]:
    """Heat map of each leaf's distance from one batch in each division, as powers of ten of the bound."""
    runs = report.runs[1:]
    if not runs:
        return []
    worst = {name: max(run.shares.get(name, 0.0) for run in runs) for name in runs[0].shares}
    names = sorted(worst, key=lambda name: -worst[name])[:MAX_LEAVES]
    values = {name: [_power(run.shares.get(name, math.nan)) for run in runs] for name in names}
    top = max((x for row in values.values() for x in row if not math.isnan(x)), default=0)
    ticks = {0: "within rounding"} | {i: f"1e{i} times" for i in range(2, max(math.ceil(top), 1) + 1, 2)}
    ticks[max(math.ceil(top), 1)] = f"1e{max(math.ceil(top), 1)} times"
    alt = f"Heat map of the distance of each leaf from one batch; the {len(names)} worst of {len(worst)} leaves"
    return [HeatMap([run.name for run in runs], values, dict(sorted(ticks.items())), alt)]


def _power(share: float) -> float:
    if math.isinf(share):
        return 16.0
    return share if math.isnan(share) else max(0.0, math.log10(max(share, 1.0)))


def as_json(report: StepReport) -> dict[str, Any]:
    """Returns the full report as JSON values, with None for distances that are not finite."""
    return {
        "version": VERSION,
        "verdict": str(report.verdict),
        "causes": [_fault(fault) for fault in report.faults],
        "allowed": [_fault(fault) for fault in report.allowed],
        "divisions": [
            run._asdict()
            | {"invariance": _finite(run.invariance), "shares": {name: _finite(x) for name, x in run.shares.items()}}
            | {"accuracy": _finite(run.accuracy), "noises": _finite(run.noises)}
            for run in report.runs
        ],
        "reference": report.reference,
        "not_checked": list(report.not_checked),
        "not_asked": list(report.not_asked),
    }


def _fault(fault: Fault) -> dict[str, str]:
    return {
        "cause": fault.cause.name,
        "text": str(fault.cause),
        "run": fault.run,
        "detail": fault.detail,
        "line": fault.line,
        "instead": REMEDIES.get(fault.cause, ""),
    }


def _finite(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else x


@operation("check")
def read_baseline(path: Path) -> frozenset[tuple[str, str]]:
    """Reads the causes of an earlier report, each with its division, from a file written with ``--json``.

    Raises:
      GradCombineError: for a file that cannot be read, or has another format or version.
    """
    return read_earlier(
        path, VERSION, lambda content: frozenset((str(x["cause"]), str(x["run"])) for x in content["causes"])
    )


def new_causes(report: StepReport, before: frozenset[tuple[str, str]]) -> list[str]:
    """Returns the causes that the earlier report does not list, one line each."""
    return [str(fault) for fault in report.faults if (fault.cause.name, fault.run) not in before]


def _listed(names: list[str]) -> str:
    *rest, last = names or ["no division"]
    return f"{', '.join(rest)} and {last}" if rest else last
