"""Compile time of exact sums and means, relative to precision "fast", in one process.

    python benchmarks/compile_time.py [--leaves 100]

Leaves are vectors and matrices of ten shapes. The table has ratios of CPU times of all threads, each of a program to
the fast program that was compiled right before it.

Leaves of one shape share one function until XLA inlines its calls. Preventing that (the frontend attribute inlineable,
on the outer call only) does not help on CPU, since XLA copies a function for each call: compiling an update of 40
leaves took 2.5 s of CPU time instead of 2.1, its value 1.4 instead of 1.7, a list of eight 9.9 instead of 9.4; with
the attribute on inner functions as well, five times as long.

In NumPy and TensorFlow, small leaves are concatenated into one flat array. In JAX, this was tried with 200 leaves:
concatenated directly, a list of eight takes as long, since XLA emits the program once per slice; in a loop, it takes
6.0 s instead of 38.3, but an update 6.2 instead of 6.1 and a value 4.3 instead of 5.6. It would also exchange arrays
that jit has sharded, which a traced array does not show. So each leaf is a separate program in JAX.
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
    """The compiled calls, and the shapes of their arguments."""
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
    """CPU seconds of each step, and their sum."""
    begun = [time.process_time()]
    traced = jax.jit(function).trace(*arguments)
    begun.append(time.process_time())
    lowered = traced.lower()
    begun.append(time.process_time())
    lowered.compile()
    begun.append(time.process_time())
    return [*(b - a for a, b in pairwise(begun)), begun[-1] - begun[0]]


def main(leaves: Annotated[int, typer.Option(help="Leaves of a tree.", min=1)] = 100) -> None:
    """Prints the CPU time to compile exact sums, relative to fast ones."""
    table = Table("reduction", "program", *STEPS, title=f"Processor time over precision 'fast', {leaves} leaves, JAX")
    for make in (reductions.sum, reductions.mean):
        fast, exact = programs(make(), leaves), programs(make("exact"), leaves)
        seconds(*programs(make(), 1)["update"])  # one-time work
        for name in fast:
            ratios = [b / a for a, b in zip(seconds(*fast[name]), seconds(*exact[name]), strict=True)]
            table.add_row(make.__name__, name, *(f"{ratio:.1f}" for ratio in ratios))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
