"""Report of `gradcombine check`: the verdict, remedies and figures; as sections, as JSON, beside an earlier one."""

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
"""Of the JSON."""

STATUS = {Verdict.PASSES: 0, Verdict.FAILS: 1, Verdict.CANNOT_TELL: 2}
"""The exit status of each verdict; 2 is also for what cannot be imported, divided or run."""

GOOD = {Verdict.PASSES: True, Verdict.FAILS: False, Verdict.CANNOT_TELL: None}
"""Whether each verdict is good; None: it is not known."""

_SUMS = "return sums and counts from each microbatch, add up both, and divide once at the end"
_AT_THE_END = "run it once, on the combined gradient at the end of a window"

REMEDIES: Mapping[Cause, str] = {
    Cause.MEAN_OF_MEANS: f"{_SUMS}; or weigh each mean by its tokens or examples",
    Cause.SUM: "divide by the sum of the weights, or average in place of adding",
    Cause.SCALED: "divide once: by the sum of the weights, and not by the number of microbatches or devices as well",
    Cause.COEFFICIENTS: "weigh each microbatch by what its loss is a mean over",
    Cause.DENOMINATOR: "divide each term of the loss by the total of its own count over the window (docs/losses.md)",
    Cause.CHANGED_BEFORE: _AT_THE_END,
    Cause.ADDED: _AT_THE_END,
    Cause.MOVED: _AT_THE_END,
    Cause.MOVED_EACH: "keep the parameters until the end of a window, and update once",
    Cause.PRECISION: "accumulate in float32, whatever dtype the gradients have",
    Cause.LOST: "divide the batch into parts that hold each example once; a shorter last part has its own weight",
    Cause.DOUBLED: "divide the batch into parts that hold each example once",
    Cause.PLACEHOLDERS: "give rows of padding the weight 0, and count only real ones in the divisor",
    Cause.KEY: "fold the number of the microbatch, or of the example, into the random key",
    Cause.RANDOM: "draw by the number of the example, and compare steps without randomness where that is not wanted",
    Cause.NOT_EXCHANGED: "add up numerators and weights over the devices (psum), and divide after it",
    Cause.NEIGHBOURS: "shift labels within each row, before the batch is divided or flattened",
    Cause.SELECTION: "choose among the examples of the whole batch before it is divided",
    Cause.STATISTICS: "synchronize them over the batch; or, if it is meant so, `--allow statistics`, "
    "`report.allowing('statistics')`",
    Cause.ADVANCED: "move it once a window; or, if it is meant so, `--allow state`, `report.allowing('state')`",
    Cause.SCATTER: "add rows where indices meet (`.at[i].add`), in place of setting them",
    Cause.STATE: "seed random numbers in each call, pass in what a call keeps, and clear its accumulators",
    Cause.NOT_FINITE: "guard the divisor of a microbatch without tokens: sums and counts need none",
    Cause.INACCURATE: "look for a narrow dtype inside of the step",
    Cause.BY_PLACE: "step schedules and decay once a window, not at each microbatch",
}
"""Remedies, by cause."""


def verdict(report: StepReport) -> str:
    """One sentence."""
    divisions = [run.name for run in report.runs[1:] if "reverse" not in run.name and "padding" not in run.name]
    if report.verdict is Verdict.PASSES:
        meant = "".join(f", but for what was allowed: {x.cause}" for x in report.allowed[:1])
        return f"the same: {_listed(divisions)} give what one batch gives{meant}"
    if not report.runs:
        return f"cannot tell: {report.faults[0]}: {REMEDIES[report.faults[0].cause]}"
    if report.verdict is Verdict.CANNOT_TELL:
        return f"cannot tell: not compared: {report.not_checked[0]}"
    first = report.faults[0]
    text = f"not the same: {first.run}: {first.cause}" + (f", at {first.line}" if first.line else "")
    return f"{text}: {first.detail}" if first.detail else text


def sections(report: StepReport, source: str = "") -> list[Section]:
    """The causes with their remedies, the divisions with their figures, and what was not compared."""
    parts = list[Section]()
    if report.faults:
        rows = [Cells((f"{x.run}: {x.cause}", x.line, x.detail), False) for x in report.faults]
        parts.append(Section("Causes", source, columns=("cause", "line", "figures"), rows=rows, whole=True))
        if known := dict.fromkeys(REMEDIES[x.cause] for x in report.faults if x.cause in REMEDIES):
            rows = [Cells((text,)) for text in known]
            parts.append(Section("Write instead", columns=("remedy",), rows=rows, whole=True))
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
    note = "Distances from one batch and from the reference over what rounding allows: up to 1 they pass."
    columns = ("division", "from one batch", "worst leaf", "from the reference", "times the noise")
    parts.append(Section("Divisions", note, _charts(report), columns=columns, rows=rows, whole=True))
    left = [f"allowed: {fault}" for fault in report.allowed]
    left += [*(f"not compared: {x}" for x in report.not_checked), *(f"not asked for: {x}" for x in report.not_asked)]
    if left:
        rows = [Cells((x,), not x.startswith("not compared")) for x in left]
        parts.append(Section("Left out", columns=("what",), rows=rows, whole=True))
    return parts


MAPPED = 40
"""The leaves of the picture, the worst of all."""


def _charts(report: StepReport) -> list[HeatMap]:
    """Each leaf's distance from one batch in each division, over the bound, as powers of ten."""
    runs = report.runs[1:]
    if not runs:
        return []
    worst = {name: max(run.shares.get(name, 0.0) for run in runs) for name in runs[0].shares}
    names = sorted(worst, key=lambda name: -worst[name])[:MAPPED]
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
    """Everything; a distance that is not finite as None."""
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
    """The causes of an earlier report, each with its division, from the file that ``--json`` wrote.

    Raises:
      GradCombineError: a file that cannot be read, or of another form or version.
    """
    return read_earlier(
        path, VERSION, lambda content: frozenset((str(x["cause"]), str(x["run"])) for x in content["causes"])
    )


def new_causes(report: StepReport, before: frozenset[tuple[str, str]]) -> list[str]:
    """The causes that an earlier report does not have, one line each."""
    return [str(fault) for fault in report.faults if (fault.cause.name, fault.run) not in before]


def _listed(names: list[str]) -> str:
    *rest, last = names or ["no division"]
    return f"{', '.join(rest)} and {last}" if rest else last
