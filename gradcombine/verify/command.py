"""The command line."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

import gradcombine
from gradcombine.audit import audit_named
from gradcombine.audit import audit_report as report
from gradcombine.errors import invalid, require_installed
from gradcombine.reporting.sections import Section, show
from gradcombine.verify.check_command import check_command
from gradcombine.verify.diff import diff_report
from gradcombine.verify.diff.by_step import diff_steps, is_steps
from gradcombine.verify.diff.comparing import Allowed, diff
from gradcombine.verify.diff.dumps import Dump, open_dump
from gradcombine.verify.diff.mapping import Rules, read_rules
from gradcombine.verify.diff.recurrent import says_gradients
from gradcombine.verify.explain.origin import explain
from gradcombine.verify.plan import plan_named
from gradcombine.verify.plan import report as plan_report
from gradcombine.verify.record import flight_diff
from gradcombine.verify.record.flight import is_log, read_log
from gradcombine.verify.terminal import DRAWS, errors, label, numbers, plain
from gradcombine.verify.verify_command import verify_command

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")

NEAREST = 8
"""How many candidates are shown if none gives the result."""


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
    """Combines gradients over lists, time and replicas: one algebra, the same answer in JAX and TensorFlow.

    To begin: `gradcombine check train:make_case`, or `gradcombine diff before.npz after.npz`
    """


app.command("check")(check_command)


@app.command("diff")
def diff_command(
    a: Annotated[str, typer.Argument(help="A dump, or a directory with one dump a step.")],
    b: Annotated[str, typer.Argument(help="Another one, in any of the formats.")],
    max_ulp: Annotated[int | None, typer.Option(help="Pass leaves up to this many ulp apart.", min=0)] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="Pass leaves whose largest difference is at most this part of their largest element.", min=0),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="A TOML file that maps the leaves of one side to those of the other.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="The same leaves in float64: says which side is inaccurate, in units of its rounding noise."),
    ] = None,
    roundings: Annotated[
        float | None, typer.Option(help="Successive roundings in that noise; estimated by default.", min=1)
    ] = None,
    gradients: Annotated[
        bool | None,
        typer.Option(
            "--gradients/--values",
            help="Whether the dumps hold gradients or values, where two biases of one side are one of the other: "
            "values are added up, gradients are not. By default decided by names (grads.pt, gradients/...).",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.", metavar="FILE")] = None,
) -> None:
    """Compares two dumps leaf by leaf, to the bit: gradients, parameters, states, or two runs' logs of digests.

    Reads .npz, .safetensors, .pt, .h5 and .weights.h5 files, tf.train and Orbax checkpoints; a dump of one framework
    may be compared with one of another.

    Exit status: 0 if all leaves were compared and pass, 1 if not, 2 for what cannot be read.

    Example: `gradcombine diff tensorflow.npz jax.safetensors --max-ulp 4`
    """
    with errors("diff"):
        if html is not None:
            require_installed("diff", *DRAWS)
        for option, path in (("--json", json), ("--html", html)):
            if path is not None and not path.resolve().parent.is_dir():
                raise invalid(f"a path in an existing folder for {option}", str(path))
        if reference is not None and (max_ulp, rtol) != (None, None):
            raise invalid("--reference, or --max-ulp and --rtol", "both")
        if reference is None and roundings is not None:
            raise invalid("--roundings with a --reference", "none")
        allowed, chosen = Allowed(max_ulp, rtol), read_rules(rules) if rules else Rules()
        if is_log(a) or is_log(b):
            if reference is not None or allowed != Allowed():
                expected = "no --max-ulp, --rtol or --reference with logs of digests, which are equal or not"
                raise invalid(expected, "one")
            passes = _diffed_logs((a, b), chosen, json, html)
        else:
            if gradients is None and any(says_gradients(Path(path).name) for path in (a, b)):
                gradients = True
            asked = _Asked(allowed=allowed, rules=chosen, roundings=roundings, gradients=gradients)
            passes = _diffed((a, b), asked, reference, json, html)
    raise typer.Exit(0 if passes else 1)


class _Asked(TypedDict):
    """Arguments that `diff` and `diff_steps` share."""

    allowed: Allowed
    rules: Rules
    roundings: float | None
    gradients: bool | None


def _diffed(paths: tuple[str, str], asked: _Asked, reference: str | None, json: Path | None, html: Path | None) -> bool:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    several = is_steps(paths[0]) and is_steps(paths[1])
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("opening", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=label(name[-40:]), completed=done, total=total)

        if several:
            report = diff_steps(*paths, **asked, reference=reference, progress=progress)
        else:
            third = None if reference is None else open_dump(reference)
            dumps = open_dump(paths[0]), open_dump(paths[1])
            report = diff(*dumps, **asked, reference=third, progress=progress)
    verdict, sections = diff_report.verdict(report), diff_report.sections(report)
    _tell(paths, verdict, report.passes, sections, diff_report.as_json(report), json, html)
    return report.passes


def _diffed_logs(paths: tuple[str, str], rules: Rules, json: Path | None, html: Path | None) -> bool:
    report = flight_diff.diff_logs(read_log(paths[0]), read_log(paths[1]), rules)
    verdict, sections = flight_diff.verdict(report), flight_diff.sections(report)
    _tell(paths, verdict, report.passes, sections, flight_diff.as_json(report), json, html)
    return report.passes


def _tell(
    paths: tuple[str, str],
    verdict: str,
    passes: bool,
    sections: Sequence[Section],
    content: object,
    json: Path | None,
    html: Path | None,
) -> None:
    show(Console(), verdict, passes, sections)
    if json is not None:
        json.write_text(json_format.dumps(content, indent=1, allow_nan=False) + "\n")
    if html is not None:
        from gradcombine.reporting import page  # needs matplotlib, which takes a second to import

        page.write(html, f"{paths[0]} against {paths[1]}", verdict, passes, sections)


@app.command("explain")
def explain_command(
    contributions: Annotated[list[str], typer.Argument(help="The dumps that were combined, in their order.")],
    result: Annotated[str, typer.Option(help="The dump that was made of them.")],
    weights: Annotated[str | None, typer.Option(help="One weight for each contribution, separated by commas.")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Numbers of replicas to try, separated by commas; by default all that divide the contributions."
        ),
    ] = None,
) -> None:
    """Finds the order of additions, precision and scaling by which contributions give a result, to the bit.

    Leaves that the result lacks are ignored.

    Exit status: 0 if a known order gives the result, 1 if none does, or if all do, which explains nothing, 2 for what
    cannot be read.

    Example: `gradcombine explain rank0.npz rank1.npz --result reduced.npz --weights 3,1`
    """
    console = Console()
    with errors("explain"):
        dumps, wanted = [open_dump(path) for path in contributions], open_dump(result)
        trees = [_loaded(dump, path, wanted) for dump, path in zip(dumps, contributions, strict=True)]
        scales = None if weights is None else numbers("weights", weights, float)
        counts = None if ranks is None else numbers("ranks", ranks, int)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            whole = {name: entry.whole() for name, entry in wanted.items()}
            explanation = explain(
                trees,
                whole,
                scales,
                ranks=counts,
                progress=lambda tried, name: bar.update(task, description=label(name)),
            )
    console.print(plain(str(explanation), "green" if explanation.matches else "red"), soft_wrap=True)
    if not explanation.matches and explanation.elements:
        for verdict in explanation.verdicts[:NEAREST]:
            line = f"  {verdict.share:8.2%} equal, up to {verdict.max_ulp:,} ulp: {verdict.candidate}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if explanation.matches else 1)


@app.command("audit")
def audit_command(
    what: Annotated[
        str,
        typer.Argument(
            help="module:callable that returns a jitted function or a tf.function and its arguments, a file of "
            "optimized HLO, a folder that XLA dumped to, or that of a SavedModel."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="Hardware that you don't have, to compile for: h100:8, h100:64x8, v5e:16x16, v5p:8x8x8, or the file "
            "of a card's description and :8. By default, this machine."
        ),
    ] = None,
    fail_on: Annotated[
        str | None, typer.Option(help="Names of the findings to fail on, with commas between; by default all.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An earlier --json: fail only on what got worse since.", metavar="FILE")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a timeline.", metavar="FILE")] = None,
) -> None:
    """Shows the work of a compiled step before it runs: what it moves, copies, exchanges and repeats.

    Exit status: 0 if there is nothing to fail on, 1 for findings of the names in --fail-on, or, with --baseline, for
    what got worse, 2 for what cannot be read or compiled, 3 for a step that does not fit the target's memory.

    Example: `gradcombine audit train:step --target h100:8`
    """
    console = Console()
    with errors("audit"):
        require_installed("audit", "jax")
        if html is not None:
            require_installed("audit", *DRAWS)
        for option, path in (("--json", json), ("--html", html)):
            if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
                raise invalid(f"a path in an existing folder for {option}", str(path))
        chosen, before = report.names(fail_on), None if baseline is None else report.read_baseline(baseline)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
            bar.add_task(f"compiling for {label(target)}" if target else "compiling")
            reports = audit_named(what, target)
        if json is not None:
            json.write_text(json_format.dumps(report.as_json(reports), indent=1, allow_nan=False) + "\n")
        for one in reports:
            clean = not any(x.name in chosen for x in one.findings)
            # Of many programs, those are shown in which there is something to see.
            shown = report.sections(one) if one.findings or len(reports) == 1 else ()
            show(console, report.verdict(one, chosen), clean, shown)
        verdict, clean = report.verdict_of_all(reports, chosen)
        lines = None if before is None else report.worse(reports, before, chosen)
        if lines is not None:
            clean = not lines
            answer = "worse than before" if lines else "no worse than before"
            verdict = f"{answer}; {verdict}"
            console.print(plain("\n".join((answer, *lines)), "green" if clean else "bold red"), soft_wrap=True)
        if html is not None:
            from gradcombine.reporting import page  # needs matplotlib, which takes a second to import

            title = f"gradcombine audit {what}" + (f" for {target}" if target else "")
            page.write(html, title, verdict, clean, report.page_sections(reports, chosen, lines))
    raise typer.Exit(0 if clean else 1)


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
        typer.Option(help="Hardware that you don't have, as for audit. By default, this machine."),
    ] = None,
    ways: Annotated[
        str | None,
        typer.Option(help="Names of ways, with commas between, for instance window,every+zero1,window+bfloat16."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", metavar="FILE")] = None,
) -> None:
    """Compares ways to run a window of microbatches: compiled side by side, with the code of the best.

    Exit status: 0 if a way fits, 1 if the audit of the best one has findings, 2 for what cannot be read or compiled, 3
    if no way fits the target's memory.

    Example: `gradcombine plan train:problem --target h100:8`
    """
    console = Console()
    with errors("plan"):
        require_installed("plan", "jax", "optax", extra="optax")
        if json is not None and not json.resolve().parent.is_dir():
            raise invalid("a path in an existing folder for --json", str(json))
        columns = SpinnerColumn(), TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("importing", total=None)

            def progress(name: str, done: int, total: int) -> None:
                bar.update(task, description=label(name), completed=done, total=total)

            made = plan_named(what, target, None if ways is None else ways.split(","), progress)
        best = made.best
        show(console, plan_report.verdict(made), best is not None, plan_report.sections(made))
        if best is not None:
            console.print(plain(f"\n{best.name}:\n", "bold"))
            console.print(plain(best.code), soft_wrap=True)
        if json is not None:
            json.write_text(json_format.dumps(plan_report.as_json(made), indent=1, allow_nan=False) + "\n")
    raise typer.Exit(plan_report.status(made))


app.command("verify")(verify_command)


def _loaded(dump: Dump, path: str, wanted: Dump) -> dict[str, np.ndarray]:
    missing = [name for name in wanted if name not in dump]
    if missing:
        raise invalid(f"the result's leaf {missing[0]} in {Path(path).name}", "none")
    return {name: dump[name].whole() for name in wanted}
