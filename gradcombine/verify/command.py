"""The ``gradcombine`` command line."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

import gradcombine
from gradcombine.audit import audit_report
from gradcombine.audit.auditing import audit_named
from gradcombine.errors import invalid, operation, require_installed
from gradcombine.reporting.sections import Cells, Section, show
from gradcombine.verify.check_command import check_command
from gradcombine.verify.diff import diff_report
from gradcombine.verify.diff.by_step import diff_steps, is_steps
from gradcombine.verify.diff.common_layout import says_gradients
from gradcombine.verify.diff.comparing import Allowed, diff
from gradcombine.verify.diff.dumps import Dump, open_dump
from gradcombine.verify.diff.rules import Rules, read_rules
from gradcombine.verify.explain.origin import explain
from gradcombine.verify.plan import plan_named, plan_report, strategies
from gradcombine.verify.record import flight_diff
from gradcombine.verify.record.flight import is_log, read_log
from gradcombine.verify.suite import frameworks, outcomes
from gradcombine.verify.terminal import Files, Html, Json, errors, numbers, plain, progress

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

NEAREST = 8
"""Number of candidates shown if none reproduces the result."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gradcombine {gradcombine.__version__}")
        raise typer.Exit


@app.callback()
def gradcombine_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Checks, compares and audits training steps that combine gradients over lists, time and replicas.

    To start: `gradcombine check train:make_case`, or `gradcombine diff before.npz after.npz`
    """


app.command("check")(check_command)


@app.command("diff")
def diff_command(
    dumps: Annotated[
        tuple[str, str],
        typer.Argument(help="Dumps A and B in any supported formats, or two directories with one dump per step."),
    ],
    max_ulp: Annotated[
        int | None, typer.Option(help="Pass leaves that differ by at most this many ulp.", min=0)
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(
            help="Pass leaves whose largest difference, relative to their largest element, is at most this.", min=0
        ),
    ] = None,
    atol: Annotated[
        float | None,
        typer.Option(
            help="Pass leaves whose largest difference is at most this: gradients that are 0 in exact arithmetic.",
            min=0,
        ),
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="A TOML file that maps leaves of A to leaves of B.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            help="The same leaves in float64, to find out which side is inaccurate, in units of its rounding noise."
        ),
    ] = None,
    roundings: Annotated[
        float | None,
        typer.Option(help="Length of the longest chain of roundings, for the noise. Default: estimated.", min=1),
    ] = None,
    gradients: Annotated[
        bool | None,
        typer.Option(
            "--gradients/--values",
            help="Whether the dumps contain gradients or values. It matters where two biases on one side are one on "
            "the other: values are added, gradients are not. Default: by names (grads.pt, gradients/...).",
        ),
    ] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Compares two dumps leaf by leaf, bit for bit: gradients, parameters, states, or the digest logs of two runs.

    Reads .npz, .safetensors, .pt, .h5 and .weights.h5 files, tf.train and Orbax checkpoints; the two dumps may come
    from different frameworks.

    Exit status: 0 if all leaves were compared and pass, 1 if not, 2 if something cannot be read.

    Example: `gradcombine diff tensorflow.npz jax.safetensors --max-ulp 4`
    """
    (a, b), files = dumps, Files(json, html)
    with errors("diff"):
        files.require("diff")
        allowed, mapping = Allowed(max_ulp, rtol, atol), read_rules(rules) if rules else Rules()
        if reference is not None and allowed != Allowed():
            raise invalid("--reference, or --max-ulp, --rtol and --atol", "both")
        if any(map(is_log, dumps)):
            if (reference, roundings, allowed) != (None, None, Allowed()):
                options = "--max-ulp, --rtol, --atol, --reference or --roundings"
                raise invalid(f"no {options} with logs of digests, which are equal or not", "one")
            logs = flight_diff.diff_logs(read_log(a), read_log(b), mapping)
            result = flight_diff.verdict(logs), logs.passes, flight_diff.sections(logs), flight_diff.as_json(logs)
        else:
            if gradients is None and any(says_gradients(Path(path).name) for path in dumps):
                gradients = True
            with progress("opening") as step:
                if all(map(is_steps, dumps)):
                    compare = partial(diff_steps, a, b, reference=reference)
                else:
                    exact = None if reference is None else open_dump(reference)
                    compare = partial(diff, open_dump(a), open_dump(b), reference=exact)
                report = compare(
                    allowed=allowed, rules=mapping, roundings=roundings, gradients=gradients, progress=step
                )
            result = (
                diff_report.verdict(report),
                report.passes,
                diff_report.sections(report),
                diff_report.as_json(report),
            )
        files.write(f"{a} against {b}", *result)
    raise typer.Exit(0 if result[1] else 1)


@app.command("explain")
def explain_command(
    contributions: Annotated[list[str], typer.Argument(help="The dumps of the contributions, in order.")],
    result: Annotated[str, typer.Option(help="The dump of the combined result.")],
    weights: Annotated[str | None, typer.Option(help="One weight per contribution, comma-separated.")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Numbers of replicas to try, comma-separated. Default: all divisors of the number of contributions."
        ),
    ] = None,
) -> None:
    """Finds the summation order, precision and scaling that reproduce a result from its contributions, bit for bit.

    Leaves that are missing from the result are ignored.

    Exit status: 0 if a known order reproduces the result, 1 if none or, without explaining anything, all do, 2 if a
    file cannot be read.

    Example: `gradcombine explain rank0.npz rank1.npz --result reduced.npz --weights 3,1`
    """
    opened = operation("explain", renames=True)(open_dump)
    with errors("explain"):
        dumps, combined = [opened(path) for path in contributions], opened(result)
        trees = [_loaded(dump, path, combined) for dump, path in zip(dumps, contributions, strict=True)]
        scales = None if weights is None else numbers("weights", weights, float)
        counts = None if ranks is None else numbers("ranks", ranks, int)
        with progress("reading") as step:
            arrays = {name: entry.whole() for name, entry in combined.items()}
            explanation = explain(trees, arrays, scales, ranks=counts, progress=lambda tried, name: step(name, 0, 0))
    verdict, *details = str(explanation).split("\n")
    sections = [Section("Also", "\n".join(line.strip() for line in details))] if details else []
    if not explanation.matches and explanation.elements:
        nearest = explanation.verdicts[:NEAREST]
        rows = [Cells((str(x.candidate), f"{x.share:.2%}", f"{x.max_ulp:,} ulp")) for x in nearest]
        sections.append(Section("Nearest", columns=("candidate", "equal", "largest difference"), rows=rows))
    show(Console(), verdict, bool(explanation.matches), sections)
    raise typer.Exit(0 if explanation.matches else 1)


@app.command("audit")
def audit_command(
    what: Annotated[
        str,
        typer.Argument(
            help="module:callable that returns (jitted function or tf.function, arguments); or a file of optimized "
            "HLO, a directory of --xla_dump_to, or a SavedModel."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Hardware to compile for, which need not be attached: h100:8, h100:64x8, v5e:16x16, v5p:8x8x8, or "
            "FILE:8 with a GpuTargetConfigProto. Default: this machine."
        ),
    ] = None,
    fail_on: Annotated[str | None, typer.Option(help="Findings that fail, comma-separated. Default: all.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json report: fail only on what got worse.", metavar="FILE")
    ] = None,
    json: Json = None,
    html: Html = None,
) -> None:
    """Reports what a compiled step moves, copies, exchanges and recomputes, without running it.

    Exit status: 0 if no finding fails, 1 for findings listed in --fail-on or, with --baseline, for what got worse, 2
    for what cannot be read or compiled, or if a part that was not analyzed may contain a defect listed in --fail-on, 3
    if the step does not fit in the target's memory.

    Example: `gradcombine audit train:step --target h100:8`
    """
    console, files = Console(), Files(json, html)
    with errors("audit"):
        require_installed("audit", "jax")
        files.require("audit")
        failing = audit_report.names(fail_on)
        before = None if baseline is None else audit_report.read_baseline(baseline)
        with progress("importing") as step:
            reports = audit_named(what, target, lambda name: step(name, 0, 0))
        files.write_json(audit_report.as_json(reports))
        for report in reports:
            # If there are several programs, sections are printed only for those with findings.
            sections = audit_report.sections(report) if report.findings or len(reports) == 1 else ()
            show(console, audit_report.verdict(report, failing), audit_report.passes(report, failing), sections)
        verdict, passes = audit_report.verdict_of_all(reports, failing), audit_report.passes_of_all(reports, failing)
        lines = None if before is None else audit_report.worse(reports, before, failing)
        if lines is not None:
            passes = not lines
            comparison = "worse than before" if lines else "no worse than before"
            verdict = f"{comparison}; {verdict}"
            console.print(plain("\n".join((comparison, *lines)), "green" if passes else "bold red"), soft_wrap=True)
        title = f"gradcombine audit {what}" + (f" for {target}" if target else "")
        files.write_page(title, verdict, passes, audit_report.page_sections(reports, failing, lines))
    raise typer.Exit(audit_report.STATUS[passes])


@app.command("plan")
def plan_command(
    what: Annotated[
        str,
        typer.Argument(
            help="module:callable that returns a dict of the arguments of gradcombine.verify.plan: loss, params, "
            "batch, optimizer, microbatches."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Hardware to compile for, as for audit. Default: this machine."),
    ] = None,
    ways: Annotated[
        str | None,
        typer.Option(
            help="Strategies to compile, comma-separated, such as window,every+zero1,window+bfloat16. "
            f"Default: {len(strategies.DEFAULT)}."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Compiles a window of microbatches with several strategies, and prints the code of the cheapest one.

    Exit status: 0 if a strategy fits in memory, 1 if the audit of the cheapest one has findings, 2 for what cannot be
    read or compiled, 3 if no strategy fits in the target's memory.

    Example: `gradcombine plan train:problem --target h100:8`
    """
    console, files = Console(), Files(json)
    with errors("plan"):
        require_installed("plan", "jax", "optax", extra="optax")
        files.require("plan")
        with progress("importing") as step:
            ranking = plan_named(what, target, None if ways is None else ways.split(","), step)
        files.write_json(plan_report.as_json(ranking))
        best = ranking.best
        show(console, plan_report.verdict(ranking), best is not None, plan_report.sections(ranking))
        if best is not None:
            console.print(plain(f"\n{best.name}:\n", "bold"))
            console.print(plain(best.code), soft_wrap=True)
    raise typer.Exit(plan_report.status(ranking))


@app.command("verify")
def verify_command(
    json: Json = None,
    html: Html = None,
    replicas: Annotated[
        int, typer.Option(help="Run with 2 and with this many replicas.", min=1, max=frameworks.DEVICES)
    ] = frameworks.DEVICES,
    full: Annotated[
        bool,
        typer.Option("--full", help="Run with 1, 2, 4 ... --replicas, and shard_map without check_vma as well."),
    ] = False,
    inject_fault: Annotated[
        bool,
        typer.Option(
            "--inject-fault", help="Flip one bit in the input of one row, and audit a defective step: both must fail."
        ),
    ] = False,
) -> None:
    """Verifies the library on this machine: combines a model's gradients in NumPy, JAX and TensorFlow, bit for bit.

    Exit status: 0 if every guarantee holds, 1 if not, 2 for invalid options.

    Example: `gradcombine verify --html report.html`
    """
    files = Files(json, html)
    with errors("verify"):
        require_installed("verify", "jax", "tensorflow", "optax", extra="verify")
        files.require("verify")
    with progress("importing JAX and TensorFlow") as step:
        frameworks.prepare_devices()
        from gradcombine.verify.suite import run  # imports JAX, which reads the prepared environment

        counter = itertools.count()
        report = run.verify(replicas, full, inject_fault, lambda name, steps: step(name, next(counter), steps))

    sections, content = outcomes.sections(report), outcomes.as_json(report)
    files.write("gradcombine verify", outcomes.verdict(report), not report.failed, sections, content)
    for finding in report.failed:
        # Repeated at the end, where readers of a long output look.
        line = f"  {finding.name}: expected {finding.promise}, measured {finding.measured}"
        Console().print(plain(line, "bold red"))
    raise typer.Exit(1 if report.failed else 0)


def _loaded(dump: Dump, path: str, combined: Dump) -> dict[str, np.ndarray]:
    """The arrays of a contribution that the combined result has, too."""
    missing = [name for name in combined if name not in dump]
    if missing:
        raise invalid(f"the result's leaf {missing[0]} in {Path(path).name}", "none")
    return {name: dump[name].whole() for name in combined}
