"""Overhead of `accumulate`: median ratios of times, measured alternately in one process.

    python benchmarks/accumulation.py

- An eager update of 30 leaves relative to adding 30 leaves, in JAX.
- Order "tree" relative to "sequential", donated, under jit: time per microbatch, and compile time for 100 leaves.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine import reductions

ROUNDS = 15
ELEMENTS = 4_000_000


def medians(calls: list[Callable[[], Any]]) -> list[float]:
    """The median seconds of each call. Calls alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        jax.block_until_ready(call())
    for _ in range(ROUNDS):
        for call, own in zip(calls, times, strict=True):
            begun = time.perf_counter()
            jax.block_until_ready(call())
            own.append(time.perf_counter() - begun)
    return list(map(statistics.median, times))


def eager() -> float:
    """Time of an update of 30 small leaves, relative to adding them."""
    grads = [jnp.ones((10, 10)) for _ in range(30)]
    acc = gc.accumulate(reductions.mean(), every=1000)
    state = acc.update(grads, acc.init(grads))
    added, updated = medians([lambda: [x + x for x in grads], lambda: acc.update(grads, state)])
    return updated / added


def window(every: int, order: Any) -> Callable[[], Any]:
    """A call that accumulates one window of a large leaf, donating the state."""
    acc = gc.accumulate(reductions.mean(), every=every, order=order)
    update = jax.jit(lambda state, grads: acc.update(grads, state), donate_argnums=0)
    grads = jnp.ones(ELEMENTS)
    held = [jax.jit(lambda: acc.init(grads))()]

    def run() -> Any:
        for _ in range(every):
            held[0] = update(held[0], grads)
        return held[0]

    return run


def compiling(every: int, order: Any) -> float:
    """CPU seconds for tracing and compiling an update of 100 leaves."""
    acc = gc.accumulate(reductions.mean(), every=every, order=order)
    like = [jax.ShapeDtypeStruct((1000,), jnp.float32)] * 100
    state = jax.eval_shape(lambda: acc.init(like))
    begun = time.process_time()
    jax.jit(lambda state, grads: acc.update(grads, state), donate_argnums=0).lower(state, like).compile()
    return time.process_time() - begun


def main() -> None:
    table = Table("measurement", "ratio")
    table.add_row("eager update of 30 leaves, over adding them", f"{eager():.1f}")
    for every in (8, 64, 4096):
        if every <= 64:
            sequential, tree = medians([window(every, "sequential"), window(every, "tree")])
            table.add_row(f"order 'tree' over 'sequential', every={every}, time", f"{tree / sequential:.1f}")
        ratio = compiling(every, "tree") / compiling(every, "sequential")
        table.add_row(f"order 'tree' over 'sequential', every={every}, compiling 100 leaves", f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
