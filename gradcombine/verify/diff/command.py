"""`gradcombine diff` on the command line."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from gradcombine.errors import GradCombineError
from gradcombine.verify import screen
from gradcombine.verify.diff import rows
from gradcombine.verify.diff.measure import Allowed, diff
from gradcombine.verify.diff.steps import StepReport, diff_steps, is_steps
from gradcombine.verify.dumps import open_dump
from gradcombine.verify.mapping import Rules, read_rules


def diff_command(
    a: Annotated[str, typer.Argument(help="A dump, or a directory with one dump a step.")],
    b: Annotated[str, typer.Argument(help="Another one, of any of the formats.")],
    max_ulp: Annotated[int | None, typer.Option(help="Pass leaves up to this many ulp apart.", min=0)] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="Pass leaves whose largest difference over their largest element is no more.", min=0),
    ] = None,
    rules: Annotated[Path | None, typer.Option(help="A TOML file that says which leaf is which.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.", metavar="FILE")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots.", metavar="FILE")] = None,
) -> None:
    """Compares two dumps of gradients, parameters or states, leaf by leaf, to the bit.

    Reads .npz, .safetensors, .h5 and .weights.h5 files, tf.train and Orbax checkpoints; a dump of one framework may be
    compared with one of another. Exit status: 0 if all leaves were compared and pass, 1 if not, 2 for what cannot be
    read.
    """
    try:
        for option, path in (("--json", json), ("--html", html)):
            if path is not None and not path.resolve().parent.is_dir():
                raise GradCombineError("diff", f"a path in an existing folder for {option}", str(path))
        passes = _run((a, b), Allowed(max_ulp, rtol), read_rules(rules) if rules else Rules(), json, html)
    except (GradCombineError, OSError, MemoryError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passes else 1)


def _run(paths: tuple[str, str], allowed: Allowed, rules: Rules, json: Path | None, html: Path | None) -> bool:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    several = is_steps(paths[0]) and is_steps(paths[1])
    errors = Console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("opening", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name[-40:], completed=done, total=total)

        if several:
            report = diff_steps(*paths, allowed=allowed, rules=rules, progress=progress)
        else:
            report = diff(open_dump(paths[0]), open_dump(paths[1]), allowed=allowed, rules=rules, progress=progress)
    if isinstance(report, StepReport):
        verdict, sections = rows.step_verdict(report), rows.step_sections(report)
        content = rows.steps_as_json(report)
    else:
        verdict, sections, content = rows.verdict(report), rows.sections(report), rows.as_json(report)
    screen.show(Console(), verdict, report.passes, sections)
    if json is not None:
        json.write_text(json_format.dumps(content, indent=1, allow_nan=False) + "\n")
    if html is not None:
        # Only a page needs matplotlib, which takes a second to import.
        from gradcombine.verify.diff import html as page

        if isinstance(report, StepReport):
            page.write_steps(html, paths, report)
        else:
            page.write(html, paths, report)
    return report.passes
