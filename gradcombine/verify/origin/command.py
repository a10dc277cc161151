"""`gradcombine explain` on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from gradcombine.errors import GradCombineError
from gradcombine.verify.dumps import Dump, open_dump
from gradcombine.verify.origin.explain import explain

Number = TypeVar("Number", int, float)

NEAREST = 8
"""How many candidates are shown where none gives the result."""


def explain_command(
    contributions: Annotated[list[str], typer.Argument(help="The dumps that were combined, in their order.")],
    result: Annotated[str, typer.Option(help="The dump that was made of them.")],
    weights: Annotated[str | None, typer.Option(help="One weight a contribution, with commas between.")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            help="Numbers of replicas to try, with commas between; by default all that divide the contributions."
        ),
    ] = None,
) -> None:
    """Finds the order of additions, the precision and the scaling that made a result of its contributions, to the bit.

    Names of leaves that the result lacks are left out. Exit status: 0 if a known order gives the result, 1 if none
    does, or all do, so that nothing is explained, 2 for what cannot be read.
    """
    console = Console()
    try:
        dumps, wanted = [open_dump(path) for path in contributions], open_dump(result)
        trees = [_loaded(dump, path, wanted) for dump, path in zip(dumps, contributions, strict=True)]
        scales = None if weights is None else _numbers("weights", weights, float)
        counts = None if ranks is None else _numbers("ranks", ranks, int)
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True) as bar:
            task = bar.add_task("", total=None)
            whole = {name: entry.whole() for name, entry in wanted.items()}
            found = explain(
                trees, whole, scales, ranks=counts, progress=lambda tried, name: bar.update(task, description=name)
            )
    except (GradCombineError, OSError, MemoryError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    console.print(Text(str(found), "green" if found.matches else "red"), soft_wrap=True)
    if not found.matches and found.elements:
        for verdict in found.verdicts[:NEAREST]:
            line = f"  {verdict.share:8.2%} equal, up to {verdict.max_ulp:,} ulp: {verdict.candidate}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(0 if found.matches else 1)


def _loaded(dump: Dump, path: str, wanted: Dump) -> dict[str, np.ndarray]:
    missing = [name for name in wanted if name not in dump]
    if missing:
        raise GradCombineError("explain", f"the result's leaf {missing[0]} in {Path(path).name}", "none")
    return {name: dump[name].whole() for name in wanted}


def _numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    try:
        numbers = [kind(x) for x in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or (kind is float and not all(map(math.isfinite, numbers))):
        expected = f"--{option} as {'whole' if kind is int else 'finite'} numbers with commas between"
        raise GradCombineError("explain", expected, repr(text))
    return numbers
