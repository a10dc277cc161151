"""`gradcombine diff` on the command line."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gradcombine.errors import GradCombineError
from gradcombine.verify.diff.measure import Allowed, diff
from gradcombine.verify.diff.show import as_json, show, show_steps
from gradcombine.verify.diff.steps import diff_steps, is_steps
from gradcombine.verify.dumps import open_dump
from gradcombine.verify.mapping import Rules, read_rules


def diff_command(
    a: Annotated[str, typer.Argument(help="A dump, or a directory with one dump a step.")],
    b: Annotated[str, typer.Argument(help="Another one, of any of the formats.")],
    max_ulp: Annotated[int | None, typer.Option(help="Pass leaves up to this many ulp apart.", min=0)] = None,
    rtol: Annotated[
        float | None, typer.Option(help="Pass leaves whose largest difference over their largest element is no more.")
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="A TOML file that says which leaf is which.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.", metavar="FILE")] = None,
) -> None:
    """Compares two dumps of gradients, parameters or states, leaf by leaf, to the bit.

    Reads .npz, .safetensors, .h5 and .weights.h5 files, tf.train and Orbax checkpoints; a dump of one framework may be
    compared with one of another. Exit status: 0 if all leaves pass, 1 if not, 2 for what cannot be read.
    """
    console = Console()
    try:
        passes = _run(console, (a, b), Allowed(max_ulp, rtol), read_rules(rules) if rules else Rules(), json, html)
    except GradCombineError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passes else 1)


def _run(
    console: Console, paths: tuple[str, str], allowed: Allowed, rules: Rules, json: Path | None, html: Path | None
) -> bool:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name[-40:], completed=done, total=total)

        report: Any
        if is_steps(paths[0]) and is_steps(paths[1]):
            report = diff_steps(*paths, allowed=allowed, rules=rules, progress=progress)
            content = {"passes": report.passes, "only_a": report.only_a, "only_b": report.only_b}
            content["steps"] = {step: as_json(found) for step, found in report.steps.items()}
        else:
            report = diff(open_dump(paths[0]), open_dump(paths[1]), allowed=allowed, rules=rules, progress=progress)
            content = as_json(report)
    several = "steps" in content
    (show_steps if several else show)(console, report)
    if json is not None:
        json.write_text(json_format.dumps(content, indent=1, allow_nan=False) + "\n")
    if html is not None:
        # Only a page needs matplotlib, which takes a second to import.
        from gradcombine.verify.diff import html as page

        (page.write_steps if several else page.write)(html, paths, report)
    return report.passes
