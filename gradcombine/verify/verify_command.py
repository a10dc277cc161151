"""``gradcombine verify``: whether the library's guarantees hold on this machine."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer
from rich.console import Console

from gradcombine.errors import require_installed
from gradcombine.verify.suite import frameworks, outcomes
from gradcombine.verify.terminal import Files, Html, Json, errors, plain, progress

REQUIRED = ("jax", "tensorflow", "optax")
"""Packages that the command needs."""


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
        require_installed("verify", *REQUIRED, extra="verify")
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
