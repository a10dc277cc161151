"""``gradcombine verify``: does all of it hold on this machine?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from gradcombine.errors import require_installed
from gradcombine.reporting.sections import show
from gradcombine.verify.suite import outcomes, places
from gradcombine.verify.terminal import Files, Html, Json, errors, plain, progress

VERIFIES = ("jax", "tensorflow", "optax")
"""Packages that a run needs."""


def verify_command(
    json: Json = None,
    html: Html = None,
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
    files = Files(json, html)
    with errors("verify"):
        require_installed("verify", *VERIFIES, extra="verify")
        files.require("verify")
    with progress("importing JAX and TensorFlow") as step:
        places.prepare_devices()
        from gradcombine.verify.suite import run  # imports JAX, which reads what was prepared

        begun = iter(range(1 << 20))
        report = run.verify(replicas, full, inject_fault, lambda name, steps: step(name, next(begun), steps))

    verdict, passes, console = outcomes.verdict(report), not report.failed, Console()
    show(console, f"{verdict} ({report.seconds:.0f} s)", passes, outcomes.sections(outcomes.summary(report)))
    for finding in report.failed:
        # By name at the end, where a reader of a long output looks.
        line = f"  {finding.name}: promised {finding.promise}, found {outcomes.measured(finding)}"
        console.print(plain(line, "bold red"))
    files.write_json(outcomes.as_json(report))
    files.write_page("gradcombine verify", verdict, passes, outcomes.sections(report))
    raise typer.Exit(0 if passes else 1)
