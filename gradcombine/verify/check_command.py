"""``gradcombine check``: are k microbatches one batch, in a step of your own?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradcombine.audit.auditing import callable_named
from gradcombine.errors import GradCombineError
from gradcombine.reporting.sections import show
from gradcombine.verify.check import check_report as report
from gradcombine.verify.check.named import check_named
from gradcombine.verify.check.step_report import BY_DESIGN, Cause, Verdict
from gradcombine.verify.terminal import Files, Html, Json, errors, numbers, plain, progress


def check_command(
    what: Annotated[
        str,
        typer.Argument(
            help="module:callable that returns (make_step, params, batch), or a dict of these and of other arguments "
            "of gradcombine.verify.check_step. make_step(microbatches) returns step(params, batch)."
        ),
    ],
    microbatches: Annotated[str | None, typer.Option(help="Numbers of microbatches, as 2,4.")] = None,
    devices: Annotated[str | None, typer.Option(help="Numbers of devices, as 1,8.")] = None,
    returns: Annotated[
        str | None, typer.Option(help="What the step returns: gradients (means over the examples), or params.")
    ] = None,
    terms: Annotated[
        str | None, typer.Option(help="module:callable, (params, examples) -> {term: (gradient of its sum, weight)}.")
    ] = None,
    allow: Annotated[
        str | None, typer.Option(help=f"Causes that are intended: {', '.join(BY_DESIGN)}.", metavar="CAUSES")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which to give up.", min=0.001)] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json: fail only on causes that are new.", metavar="FILE")
    ] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Checks that k microbatches give what one batch does, in a step of your own, and names the cause if not.

    Exit status: 0 if they do, 1 if not (with --baseline, for a cause that is new), 2 if it cannot tell: for what cannot
    be imported, divided, run, repeated or compared.

    Example: `gradcombine check train:make_case --microbatches 2,4`
    """
    console, files = Console(), Files(json, html)
    with errors("check"):
        files.require("check")
        before = None if baseline is None else report.read_baseline(baseline)
        others: dict[str, Any] = {} if returns is None else {"returns": returns}
        for name, text in (("microbatches", microbatches), ("devices", devices)):
            if text is not None:
                others[name] = numbers(name, text, int)
        if terms is not None:
            others["terms"] = callable_named("check", terms)
        meant = [] if allow is None else [x.strip() for x in allow.split(",")]
        with progress("importing") as step:
            found, source = check_named(what, others, timeout, step)
        if not found.runs:
            expected = f"a step that gives the same at each call: {report.REMEDIES[Cause.STATE]}"
            raise GradCombineError("check", expected, f"other results for {found.faults[0].run}")
        found = found.allowing(*meant)
        verdict, sections = report.verdict(found), report.sections(found, source and f"The step is made at {source}.")
        passes, status = report.GOOD[found.verdict], report.STATUS[found.verdict]
        show(console, verdict, passes, sections)
        if before is not None and found.verdict is Verdict.FAILS:
            lines = report.new_causes(found, before)
            status, answer = (1, "causes that are new:") if lines else (0, "no cause that is new")
            console.print(plain("\n".join((answer, *lines)), "bold red" if lines else "green"), soft_wrap=True)
        files.write_json(report.as_json(found))
        files.write_page(f"gradcombine check {what}", verdict, passes, sections)
    raise typer.Exit(status)
