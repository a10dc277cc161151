"""Cost of tracing and compiling a training step, and of calls with little to compute, relative to optax.MultiSteps.

    python benchmarks/jax_tracing.py [--leaves 300] [--rounds 3]

Trace, lower and compile are CPU times of all threads; a call is the time of one microbatch with tiny leaves, which is
mostly dispatch. Each ratio is to the optax step made right before; the table has medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from rich.console import Console
from rich.table import Table

from gradcombine.integrations.jax import Loss, train_step
from gradcombine.integrations.optax import MultiSteps, accumulate, accumulate_and_apply

K = 8
CALLS = 10 * K
ADAM = optax.adam(1e-3)
COLUMNS = ("trace", "lower", "compile", "all", "call")


def transformed(tx: Any) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init


def applied() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    tx = accumulate_and_apply(ADAM, K)
    return lambda params, state, grads: tx.apply(grads, state, params), tx.init


def stepped() -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    made = train_step(
        Loss(lambda params, grads: (0.0, grads), differentiate=False), ADAM, every=K, weight=lambda grads: 1
    )
    return lambda params, state, grads: made.function(params, state, grads)[:2], made.init


FORMS: dict[str, Callable[[], tuple[Callable[..., Any], Callable[[Any], Any]]]] = {
    "train_step(every=8)": stepped,
    "accumulate_and_apply": applied,
    "accumulate, then apply_updates": lambda: transformed(accumulate(ADAM, K)),
    "MultiSteps, then apply_updates": lambda: transformed(MultiSteps(ADAM, K)),
}


def costs(form: tuple[Callable[..., Any], Callable[[Any], Any]], leaves: int) -> list[float]:
    """Seconds in the order of the columns."""
    step, init = form
    params = [jnp.ones((3, 5) if i % 2 else (4,)) for i in range(leaves)]
    state, grads = jax.block_until_ready((init(params), [0.5 * x for x in params]))
    begun = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, grads)
    begun.append(time.process_time())
    lowered = traced.lower()
    begun.append(time.process_time())
    compiled = lowered.compile()
    begun.append(time.process_time())
    params, state = jax.block_until_ready(compiled(params, state, grads))
    start = time.perf_counter()
    for _ in range(CALLS):
        params, state = compiled(params, state, grads)
    jax.block_until_ready((params, state))
    return [*(b - a for a, b in pairwise(begun)), begun[-1] - begun[0], time.perf_counter() - start]


def main(
    leaves: Annotated[int, typer.Option(help="Leaves of the parameters.", min=1)] = 300,
    rounds: Annotated[int, typer.Option(help="Measurements per step.", min=1)] = 3,
) -> None:
    """Prints the cost of steps relative to optax.MultiSteps followed by apply_updates."""
    table = Table("step", *COLUMNS, title=f"Over optax.MultiSteps, {leaves} tiny leaves, window of {K}, CPU")
    costs(transformed(optax.MultiSteps(ADAM, K)), 1)  # one-time work
    for name, form in FORMS.items():
        pairs = [(costs(transformed(optax.MultiSteps(ADAM, K)), leaves), costs(form(), leaves)) for _ in range(rounds)]
        ratios = [[b / a for a, b in zip(*pair, strict=True)] for pair in pairs]
        table.add_row(name, *(f"{statistics.median(column):.2f}" for column in zip(*ratios, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
