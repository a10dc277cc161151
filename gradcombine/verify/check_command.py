"""``gradcombine check``: whether a training step gives the same result for k microbatches as for one batch."""

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
        before = None if baseline is None else report.read_baseline(baseline)
        options: dict[str, Any] = {} if returns is None else {"returns": returns}
        for name, text in (("microbatches", microbatches), ("devices", devices)):
            if text is not None:
                options[name] = numbers(name, text, int)
        if terms is not None:
            options["terms"] = callable_named("check", terms)
        intended = [] if allow is None else [x.strip() for x in allow.split(",")]
        with progress("importing") as step:
            checked, source = check_named(what, options, timeout, step)
        if not checked.runs:
            expected = f"a step whose results repeat from call to call: {report.REMEDIES[Cause.STATE]}"
            raise GradCombineError("check", expected, f"different results for {checked.faults[0].run}")
        checked = checked.allowing(*intended)
        verdict = report.verdict(checked)
        sections = report.sections(checked, source and f"The step is made at {source}.")
        passes, status = report.GOOD[checked.verdict], report.STATUS[checked.verdict]
        show(console, verdict, passes, sections)
        if before is not None and checked.verdict is Verdict.FAILS:
            lines = report.new_causes(checked, before)
            status, summary = (1, "new causes:") if lines else (0, "no new causes")
            console.print(plain("\n".join((summary, *lines)), "bold red" if lines else "green"), soft_wrap=True)
        files.write_json(report.as_json(checked))
        files.write_page(f"gradcombine check {what}", verdict, passes, sections)
    raise typer.Exit(status)
