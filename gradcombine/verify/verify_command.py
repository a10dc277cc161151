"""``gradcombine verify``: does all of it hold on this machine?"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradcombine.errors import require_installed
from gradcombine.reporting.sections import show
from gradcombine.verify.suite import outcomes as findings
from gradcombine.verify.suite import places
from gradcombine.verify.terminal import DRAWS, errors, label, plain

VERIFIES = ("jax", "tensorflow", "optax")
"""Packages that a run needs."""


def verify_command(
    json: Annotated[
        Path | None, typer.Option(help="Write all rows to this file.", dir_okay=False, metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots to this file.", dir_okay=False, metavar="FILE")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="The largest number of replicas; it and 2 are run.", min=1, max=places.DEVICES)
    ] = places.DEVICES,
    full: Annotated[
        bool,
        typer.Option("--full", help="Run 1, 2, 4 and 8 replicas, up to the largest, and shard_map without check_vma."),
    ] = False,
    inject_fault: Annotated[
        bool,
        typer.Option(
            "--inject-fault", help="Flip one bit of one row's input, and audit a step with a defect: both have to fail."
        ),
    ] = False,
) -> None:
    """Checks the library on this machine: gradients of a real model in NumPy, JAX and TensorFlow, bit by bit.

    Exit status: 0 if every row keeps what it promises, 1 if not, 2 for wrong options.

    Example: `gradcombine verify --html report.html`
    """
    with errors("verify"):
        require_installed("verify", *VERIFIES, *(() if html is None else DRAWS), extra="verify")
    for option, path in (("--json", json), ("--html", html)):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"{path.parent} is not a directory", param_hint=option)
    console = Console()
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading JAX and TensorFlow", total=None)
        places.prepare_devices()
        from gradcombine.verify.suite import run  # imports JAX, which reads what was prepared

        def started(step: str, steps: int) -> None:
            begun = progress.tasks[0].total is not None
            progress.update(task, description=label(step), total=steps, advance=1 if begun else 0)

        report = run.verify(replicas, full, inject_fault, started)

    verdict, passes = findings.verdict(report), not report.failed
    show(console, f"{verdict} ({report.seconds:.0f} s)", passes, findings.sections(findings.summary(report)))
    for finding in report.failed:
        # By name at the end, where a reader of a long output looks.
        console.print(
            plain(f"  {finding.name}: promised {finding.promise}, found {findings.found(finding)}", "bold red")
        )
    if json is not None:
        json.write_text(json_format.dumps(findings.as_json(report), indent=1, allow_nan=False) + "\n")
    if html is not None:
        from gradcombine.reporting import page  # needs matplotlib, which takes a second to import

        page.write(html, "gradcombine verify", verdict, passes, findings.sections(report))
    if not passes:
        raise typer.Exit(1)
