"""What it costs to compile exact sums and means: processor time over that of precision "fast", in one process.

    python benchmarks/compile_time.py [--leaves 100]

Leaves are vectors and matrices of ten shapes. Times are the processor's, of all threads, and not shown: the table has
ratios, each of a program to the fast one that was compiled right before it.

Leaves of one shape share one function until XLA inlines its calls. Calls that are kept (the attribute inlineable of the
frontend, on the outer call alone) do not help on CPU: XLA copies a function for each call of it. An update of 40 leaves
took 2.5 s of processor time to compile in place of 2.1, its value 1.4 in place of 1.7, a list of eight 9.9 in place of
9.4; with the attribute on inner functions as well, five times as much.

One flat array of all leaves is what NumPy and TensorFlow have of small ones. In JAX it was tried on 200 leaves:
joined in the open a list of eight takes as long, since XLA writes the program once for each slice; in a loop 6.0 s in
place of 38.3, but an update 6.2 in place of 6.1 and a value 4.3 in place of 5.6. It would exchange what jit has
sharded, of which a traced array tells nothing; so each leaf stays a program of its own there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine import reductions

LISTED = 8
STEPS = ("trace", "lower", "compile", "all")


def programs(reduction: gc.Reduction, leaves: int) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The calls that are compiled, and the shapes of their arguments."""
    shapes = [(64 + 8 * (i % 5), 64) if i % 2 else (64 + i % 5,) for i in range(leaves)]
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    acc = gc.accumulate(reduction, every=4)
    state = jax.eval_shape(lambda: acc.init(like))
    return {
        "update": (lambda state, grads: acc.update(grads, state), (state, like)),
        "value": (acc.value, (state,)),
        f"combine, {LISTED} trees": (lambda *trees: gc.combine(reduction, trees), (like,) * LISTED),
    }


def seconds(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[float]:
    """Of each step, and of all of them."""
    begun = [time.process_time()]
    traced = jax.jit(function).trace(*arguments)
    begun.append(time.process_time())
    lowered = traced.lower()
    begun.append(time.process_time())
    lowered.compile()
    begun.append(time.process_time())
    return [*(b - a for a, b in pairwise(begun)), begun[-1] - begun[0]]


def main(leaves: Annotated[int, typer.Option(help="Leaves of a tree.", min=1)] = 100) -> None:
    """Prints the processor time that compiling exact sums takes, over that of fast ones."""
    table = Table("reduction", "program", *STEPS, title=f"Processor time over precision 'fast', {leaves} leaves, JAX")
    for make in (reductions.sum, reductions.mean):
        fast, exact = programs(make(), leaves), programs(make("exact"), leaves)
        seconds(*programs(make(), 1)["update"])  # what is done once a process
        for name in fast:
            ratios = [b / a for a, b in zip(seconds(*fast[name]), seconds(*exact[name]), strict=True)]
            table.add_row(make.__name__, name, *(f"{ratio:.1f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
