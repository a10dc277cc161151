"""The command line."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gradcombine
from gradcombine.verify import screen
from gradcombine.verify.diff.command import diff_command
from gradcombine.verify.origin.command import explain_command
from gradcombine.verify.packages import hint, missing
from gradcombine.verify.suite import devices, rows

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
app.command("diff")(diff_command)
app.command("explain")(explain_command)


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
    """Combines gradients over lists, time and replicas: one algebra, the same answer in JAX and TensorFlow."""


@app.command()
def verify(
    json: Annotated[
        Path | None, typer.Option(help="Write all rows to this file.", dir_okay=False, metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this file.", dir_okay=False, metavar="FILE")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="The largest number of replicas; 1, 2, 4 and 8 are run.", min=1, max=devices.COUNT)
    ] = devices.COUNT,
    inject_fault: Annotated[
        bool, typer.Option("--inject-fault", help="Flip one bit of one row's input: that row has to fail.")
    ] = False,
) -> None:
    """Combines the gradients of a real model on real images in NumPy, JAX and TensorFlow, and compares them bit by bit.

    Exit status 1 if a row does not keep what it promises.
    """
    lacking = missing(("jax", "tensorflow", "sklearn", *(("jinja2", "matplotlib") if html is not None else ())))
    if lacking:
        raise typer.BadParameter(hint(lacking))
    for option, path in (("--json", json), ("--html", html)):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"{path.parent} is not a directory", param_hint=option)
    console = Console()
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading JAX and TensorFlow", total=None)
        devices.prepare()
        from gradcombine.verify.suite import run  # imports JAX, which reads what prepare has set

        def started(step: str, steps: int) -> None:
            begun = progress.tasks[0].total is not None
            progress.update(task, description=step, total=steps, advance=1 if begun else 0)

        report = run.verify(replicas, inject_fault, started)

    # By name at the end, where a reader of a long output looks.
    failed = (f"  {name}: promised {promise}, found {found}" for (name, promise, found), _ in rows.failures(report))
    answer = "\n".join((f"{rows.verdict(report)} ({report.seconds:.0f} s)", *failed))
    screen.show(console, answer, not report.failed, rows.sections(rows.summary(report)))
    if json is not None:
        json.write_text(json_format.dumps(rows.as_json(report), indent=1, allow_nan=False) + "\n")
    if html is not None:
        # Only a page needs matplotlib, which takes a second to import.
        from gradcombine.verify.suite import html as page

        page.write(html, report)
    if report.failed:
        raise typer.Exit(1)
