"""``gradcombine check``: whether a training step gives the same result for k microbatches as for one batch."""

from __future__ import annotations

import inspect
import math
import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from gradcombine.audit.auditing import callable_named, require_arguments
from gradcombine.audit.compiling import foreign
from gradcombine.errors import GradCombineError, invalid, operation
from gradcombine.reporting.earlier import read_earlier
from gradcombine.reporting.sections import Cells, HeatMap, Section, show
from gradcombine.verify.check.checking import checked
from gradcombine.verify.check.step_program import format_line
from gradcombine.verify.check.step_report import BY_DESIGN, REMEDIES, Cause, Fault, StepReport, Verdict, headline
from gradcombine.verify.terminal import Files, Html, Json, errors, numbers, plain, print_error, progress

NEEDED = ("make_step", "params", "batch")
OPTIONAL = ("microbatches", "devices", "returns", "pad", "terms", "reference", "unit")

VERSION = 1
"""Version of the JSON format."""

OUTCOMES = {Verdict.PASSES: (0, True), Verdict.FAILS: (1, False), Verdict.CANNOT_TELL: (2, None)}
"""Exit status of each verdict, and whether it is good (None: unknown); errors also exit with 2."""


def check_command(
    what: Annotated[
        str,
        typer.Argument(
            help="module:callable that returns (make_step, params, batch), or a dict of arguments of "
            "gradcombine.verify.check_step. make_step(microbatches) returns step(params, batch)."
        ),
    ],
    microbatches: Annotated[str | None, typer.Option(help="Numbers of microbatches, such as 2,4.")] = None,
    devices: Annotated[str | None, typer.Option(help="Numbers of devices, such as 1,8.")] = None,
    returns: Annotated[
        str | None, typer.Option(help="What the step returns: gradients (means over the examples), or params.")
    ] = None,
    terms: Annotated[
        str | None, typer.Option(help="module:callable, (params, examples) -> {term: (gradient of its sum, weight)}.")
    ] = None,
    allow: Annotated[
        str | None, typer.Option(help=f"Causes that are intended: {', '.join(BY_DESIGN)}.", metavar="CAUSES")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Give up after this many seconds.", min=0.001)] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json report: fail only on new causes.", metavar="FILE")
    ] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Checks that a training step gives the same result for k microbatches as for one batch; if not, names the cause.

    Exit status: 0 if it does, 1 if not (with --baseline: for a new cause), 2 if it cannot tell, because something
    cannot be imported, split, run, repeated or compared.

    Example: `gradcombine check train:make_case --microbatches 2,4`
    """
    console, files = Console(), Files(json, html)
    with errors("check"):
        files.require("check")
        before = None if baseline is None else read_earlier(baseline, VERSION, _causes)
        options: dict[str, Any] = {} if returns is None else {"returns": returns}
        for name, text in (("microbatches", microbatches), ("devices", devices)):
            if text is not None:
                options[name] = numbers(name, text, int)
        if terms is not None:
            options["terms"] = callable_named("check", terms)
        intended = [] if allow is None else [x.strip() for x in allow.split(",")]
        with progress("importing") as step, _exits_after(timeout):
            report, source = _check_named(what, options, step)
        if not report.runs:
            expected = f"a step whose results repeat from call to call: {REMEDIES[Cause.STATE]}"
            raise GradCombineError("check", expected, f"different results for {report.faults[0].run}")
        report = report.allowing(*intended)
        verdict, parts = headline(report), sections(report, source and f"The step is made at {source}.")
        status, passes = OUTCOMES[report.verdict]
        files.write_json(as_json(report))
        files.write_page(f"gradcombine check {what}", verdict, passes, parts)
        show(console, verdict, passes, parts)
        if before is not None and report.verdict is Verdict.FAILS:
            lines = [str(fault) for fault in report.faults if (fault.cause.name, fault.run) not in before]
            status, summary = (1, "new causes:") if lines else (0, "no new causes")
            console.print(plain("\n".join((summary, *lines)), "bold red" if lines else "green"), soft_wrap=True)
    raise typer.Exit(status)


@contextmanager
def _exits_after(seconds: float | None) -> Generator[None]:
    """Prints an error and exits with status 2 if the body takes longer than ``seconds``; None for no limit.

    An exception would wait for a compiler to return, and crash the import of an extension module.
    """
    if seconds is None:
        yield
        return

    def end() -> None:
        try:
            print_error(invalid(f"a check that takes less than {seconds:g} s", "one that takes longer"), "check")
        finally:
            os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _causes(content: Any) -> frozenset[tuple[str, str]]:
    """Returns the causes of an earlier report, each with its division."""
    return frozenset((str(x["cause"]), str(x["run"])) for x in content["causes"])


@operation("check")
def _check_named(
    what: str, options: Mapping[str, Any], progress: Callable[[str, int, int], None]
) -> tuple[StepReport, str]:
    """Checks the step of "module:callable"; returns the report, and the file and line of ``make_step`` if known."""
    case: Any = foreign("a callable without arguments that returns", what, callable_named("check", what))
    if isinstance(case, tuple) and len(cast("tuple[Any, ...]", case)) == len(NEEDED):
        case = dict(zip(NEEDED, cast("tuple[Any, ...]", case), strict=True))
    case = require_arguments(f"{what} to return (make_step, params, batch), or", case, NEEDED, OPTIONAL)
    make_step, params, batch = (case.pop(name) for name in NEEDED)
    return checked(make_step, params, batch, case | dict(options), progress), _source_of(make_step)


def _source_of(function: Any) -> str:
    """Returns the file and line of a function, as "step.py:12"; empty if it has no source."""
    try:
        _, line = inspect.getsourcelines(inspect.unwrap(function))
        return format_line(inspect.getsourcefile(inspect.unwrap(function)) or "", line)
    except (TypeError, OSError, ValueError):
        return ""


def sections(report: StepReport, source: str = "") -> list[Section]:
    """Returns the causes with remedies, the distances of each division, and what was not compared."""
    remedies = dict.fromkeys(REMEDIES[x.cause] for x in report.faults if x.cause in REMEDIES)
    causes = [Cells((f"{x.run}: {x.cause}", x.line, x.detail), False) for x in report.faults]
    divisions = [
        Cells(
            (run.name, f"{run.invariance:.2g}", run.leaf, _short(run.accuracy), _short(run.noises)),
            run.invariance <= 1 and (run.accuracy is None or run.accuracy <= 1),
        )
        for run in report.runs
    ]
    notes = [Cells((f"allowed: {fault}",), True) for fault in report.allowed]
    notes += [Cells((f"not compared: {x}",), False) for x in report.not_checked]
    notes += [Cells((f"not included: {x}",), True) for x in report.not_asked]
    note = (
        "Distances in units of the rounding bound (at most 1 passes); the last column in units of the rounding noise."
    )
    columns = ("division", "from one batch", "worst leaf", "from the reference", "times the noise")
    parts = [
        Section("Causes", source, columns=("cause", "line", "details"), rows=causes, whole=True),
        Section("What to write instead", columns=("remedy",), rows=[Cells((x,)) for x in remedies], whole=True),
        Section("Divisions", note, _charts(report), columns=columns, rows=divisions, whole=True),
        Section("Not covered", columns=("note",), rows=notes, whole=True),
    ]
    return [part for part in parts if part.rows]


def _short(x: float | None) -> str:
    return "" if x is None else f"{x:.2g}"


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
    top = max(1, *(math.ceil(x) for row in values.values() for x in row if not math.isnan(x)))
    ticks = {0: "within rounding"} | {i: f"1e{i} times" for i in sorted({*range(2, top, 2), top})}
    alt = f"Heat map of the distance of each leaf from one batch; the {len(names)} worst of {len(worst)} leaves"
    return [HeatMap([run.name for run in runs], values, ticks, alt)]


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
    named = {"cause": fault.cause.name, "text": str(fault.cause), "instead": REMEDIES.get(fault.cause, "")}
    return fault._asdict() | named


def _finite(x: float | None) -> float | None:
    return None if x is None or not math.isfinite(x) else x
