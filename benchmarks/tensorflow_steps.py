"""Cost of accumulating training steps in TensorFlow, and time and memory of adding a list of trees.

    python benchmarks/tensorflow_steps.py [--quick] [--json FILE]

A step is compared with its lower bound: one assign_add per gradient, and one step of Adam per window. The variants of a
mode alternate, call by call, in one process. Ratios to the bound are shown for elapsed time and for CPU time of all
threads, which other programs on the machine hardly affect. A variant's time is the sum of the medians of the calls in a
window. Peak memory is measured in separate processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import keras
import numpy as np
import tensorflow as tf
import typer
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine.integrations.tensorflow import AccumulatedStep

EVERY = 8
LISTED = 8
Call = Callable[[], Any]


class Times(NamedTuple):
    """Seconds of one window (or of one sum)."""

    wall: float
    process: float


def window_times(variants: Mapping[str, Call], calls: int, rounds: int) -> dict[str, Times]:
    """Times the variants alternately, call by call. The first round compiles and is not counted."""
    clocks = (time.perf_counter, time.process_time)
    seen: dict[str, list[list[tuple[float, ...]]]] = {name: [[] for _ in range(calls)] for name in variants}
    for turn in range(rounds + 1):
        for i in range(calls):
            # Alternate the order, so that no variant is always first or always after the slowest.
            for name, call in sorted(variants.items(), reverse=turn % 2 == 1):
                begun = [clock() for clock in clocks]
                call()
                if turn:
                    seen[name][i].append(tuple(clock() - b for clock, b in zip(clocks, begun, strict=True)))
    medians = {
        name: [[statistics.median(column) for column in zip(*each, strict=True)] for each in by_call]
        for name, by_call in seen.items()
    }
    return {name: Times(*map(sum, zip(*by_call, strict=True))) for name, by_call in medians.items()}


def steps(elements: int, leaves: int, xla: bool) -> dict[str, Call]:
    """The variants: calls of compiled functions with the same gradients."""
    rng = np.random.default_rng(0)
    # XLA on CPU takes twice as long for odd lengths.
    size = elements // leaves // 1024 * 1024
    given = [tf.constant(rng.standard_normal(size, np.float32)) for _ in range(leaves)]

    def compiled(function: Callable[..., Any]) -> Call:
        graph = tf.function(function, jit_compile=xla, autograph=False)
        return lambda: graph(given)

    def variables() -> list[tf.Variable]:
        return [tf.Variable(tf.zeros_like(g)) for g in given]

    def add(gradients: list[tf.Tensor], sums: list[tf.Variable]) -> None:
        for gradient, total in zip(gradients, sums, strict=True):
            total.assign_add(gradient)

    def apply(optimizer: Any, targets: list[tf.Variable]) -> Call:
        optimizer.build(targets)

        def body(gradients: list[tf.Tensor]) -> None:
            optimizer.apply(gradients, targets)

        return compiled(body)

    sums = variables()
    mean = AccumulatedStep(lambda g: (g, 1), variables(), keras.optimizers.Adam(), every=EVERY)
    weighted = AccumulatedStep(
        lambda g: (g, tf.cast(tf.shape(g[0])[0], tf.float32)), variables(), keras.optimizers.Adam(), every=EVERY
    )
    return {
        "assign_add": compiled(lambda gradients: add(gradients, sums)),
        "adam": apply(keras.optimizers.Adam(), variables()),
        "keras": apply(keras.optimizers.Adam(gradient_accumulation_steps=EVERY), variables()),
        "step": compiled(mean),
        "step, traced weights": compiled(weighted),
    }


def step_ratios(elements: int, leaves: int, xla: bool, rounds: int) -> dict[str, Times]:
    """Ratios of each variant to the bound, in elapsed and CPU time."""
    times = window_times(steps(elements, leaves, xla), EVERY, rounds)
    limit = [a + b / EVERY for a, b in zip(times.pop("assign_add"), times.pop("adam"), strict=True)]
    return {name: Times(*(t / at for t, at in zip(own, limit, strict=True))) for name, own in times.items()}


def sums(framework: str, elements: int) -> tuple[str, dict[str, Call]]:
    """Variants of the sum of a list of trees, and the name of the baseline."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(elements, np.float32) for _ in range(LISTED)]
    if framework == "tensorflow":
        values = [tf.constant(a) for a in arrays]

        def graph(total: Callable[[list[Any]], Any]) -> Call:
            compiled = tf.function(total, autograph=False)
            return lambda: compiled(values)

        return "tf.add_n", {
            "tf.add_n": graph(tf.add_n),
            "gc.add_n": graph(gc.add_n),
            "gc.tree_sum": graph(gc.tree_sum),
        }
    given = [jnp.asarray(a) for a in arrays]

    def jitted(total: Callable[[list[Any]], Any]) -> Call:
        compiled = jax.jit(total)
        return lambda: compiled(given).block_until_ready()

    def pairs(values: list[Any]) -> Any:
        while len(values) > 1:
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    return "best of jnp", {
        "jnp.sum of a stack": jitted(lambda values: jnp.sum(jnp.stack(values), axis=0)),
        "a chain of +": jitted(lambda values: reduce(lambda a, b: a + b, values)),
        "a tree of +": jitted(pairs),
        "gc.add_n": jitted(gc.add_n),
        "gc.tree_sum": jitted(gc.tree_sum),
    }


def sum_ratios(framework: str, elements: int, rounds: int) -> dict[str, Times]:
    """Ratios of the library's sums to the baseline, in elapsed and CPU time."""
    _, variants = sums(framework, elements)
    times = window_times(variants, 1, rounds)
    own = {name: times.pop(name) for name in ("gc.add_n", "gc.tree_sum")}
    peers = [min(column) for column in zip(*times.values(), strict=True)]
    return {name: Times(*(t / at for t, at in zip(each, peers, strict=True))) for name, each in own.items()}


def peak(framework: str, elements: int) -> float:
    """Peak memory of ``add_n(values, "accumulate_n")`` beyond its list, in units of one tree of the list."""

    def total(trees: list[Any]) -> Any:
        return gc.add_n(trees, "accumulate_n")

    if framework == "jax":
        spec = jax.ShapeDtypeStruct((elements,), jnp.float32)
        found = jax.jit(total).lower([spec] * LISTED).compile().memory_analysis()
        return (found.temp_size_in_bytes + found.output_size_in_bytes) / (4 * elements)
    values = [tf.fill([elements], tf.constant(i, tf.float32)) for i in range(LISTED)]
    compiled = tf.function(total, autograph=False)
    # Keep the first result, so that its buffer cannot be reused for the second one.
    first = compiled(values).numpy()
    seen, done = [_resident()], threading.Event()

    def sample() -> None:
        while not done.is_set():
            seen.append(_resident())

    sampler = threading.Thread(target=sample)
    sampler.start()
    second = compiled(values).numpy()
    done.set()
    sampler.join()
    seen.append(_resident())
    assert np.array_equal(first, second)
    return (max(seen) - seen[0]) / (4 * elements)


def _resident() -> int:
    """Bytes of memory used by this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_apart(framework: str, elements: int) -> float:
    command = [sys.executable, __file__, "--peak", framework, "--elements", str(elements)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.strip().splitlines()[-1])


def measure(elements: int, listed: int, rounds: int, many: int) -> Iterator[tuple[str, str, Times | float]]:
    """Yields (measurement, variant, ratio)."""
    for leaves in (1, many):
        for xla in (False, True):
            mode = "XLA" if xla else "tf.function"
            for name, ratio in step_ratios(elements, leaves, xla, rounds).items():
                yield f"{mode}, {leaves} leaves: over the limit", name, ratio
    for framework, peer in (("tensorflow", "tf.add_n"), ("jax", "the best of jnp")):
        for name, ratio in sum_ratios(framework, listed, rounds).items():
            yield f"sum of {LISTED} trees in {framework}: over {peer}", name, ratio
    for framework in ("tensorflow", "jax"):
        yield f"peak of accumulate_n in {framework}", "extra trees", _peak_apart(framework, listed)


def main(
    elements: Annotated[int, typer.Option(help="Number of parameters of a step.")] = 16_000_000,
    listed: Annotated[int, typer.Option(help="Elements of each tree in a list.")] = 25_000_000,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    quick: Annotated[bool, typer.Option(help="Small sizes and few rounds, as a smoke test.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the ratios to this file.")] = None,
    peak_of: Annotated[str, typer.Option("--peak", hidden=True)] = "",
) -> None:
    """Prints ratios of times, and memory in units of one tree."""
    if peak_of:
        print(peak(peak_of, elements))
        return
    if quick:
        elements, listed, rounds = 240_000, 4_000_000, 2
    table = Table("what", "variant", "wall", "processor time")
    rows = []
    for what, variant, ratio in measure(elements, listed, rounds, many=4 if quick else 120):
        wall, process = ratio if isinstance(ratio, Times) else (ratio, None)
        table.add_row(what, variant, f"{wall:.2f}", "" if process is None else f"{process:.2f}")
        rows.append({"what": what, "variant": variant, "wall": wall, "process": process})
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    typer.run(main)
