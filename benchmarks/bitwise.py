"""Tests what keeps and what changes the bits of training on CPU, in JAX and TensorFlow.

    python benchmarks/bitwise.py

Trains a small network for five steps in separate processes, with and without each change that may affect bits, and
compares the digests of its parameters. Fails if bits differ that must be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

WIDTH, ROWS, STEPS = 256, 64, 5
ONE_THREAD = "one processor"

QUESTIONS = {
    "the same program in another process": ("step", "again", True),
    "random numbers of one seed, in another process": ("random", "again", True),
    "a scatter of many terms, in another process": ("scatter", "again", True),
    "a parallel input pipeline, in another process": ("pipeline", "again", True),
    "one processor in place of several, and so other threads": ("step", ONE_THREAD, False),
    "eager in place of compiled": ("eager", "step", False),
    "the rows of a batch in another order": ("order", "step", False),
    "a batch that is padded, with weight 0": ("padded", "step", False),
}
"""For each row of the table: the run, the run to compare with, and whether the bits must be equal."""


def data() -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape, np.float32) / 16 for shape in ((WIDTH, WIDTH), (WIDTH, 1))]
    return params, rng.standard_normal((STEPS, ROWS, WIDTH), np.float32), np.ones(ROWS, np.float32)


def batches(rows: np.ndarray, weights: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The original batches, with their rows in another order, and padded."""
    order, more = np.random.default_rng(1).permutation(ROWS), ((0, 0), (0, 16), (0, 0))
    return {
        "step": (rows, weights),
        "order": (rows[:, order], weights),
        "padded": (np.pad(rows, more), np.pad(weights, (0, 16))),
    }


def of_jax() -> dict[str, str]:
    import jax
    import jax.numpy as jnp

    import gradcombine as gc

    def loss(params: Any, x: Any, weight: Any) -> Any:
        return jnp.sum((jnp.tanh(x @ params[0]) @ params[1])[:, 0] ** 2 * weight) / jnp.sum(weight)

    def step(params: Any, x: Any, weight: Any) -> Any:
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params, x, weight), strict=True)]

    def trained(step: Callable[..., Any], given: tuple[np.ndarray, np.ndarray]) -> str:
        trained = list(map(jnp.asarray, params))
        for x in given[0]:
            trained = step(trained, jnp.asarray(x), jnp.asarray(given[1]))
        return hexadecimal(gc.digest(trained))

    params, rows, weights = data()
    found = {name: trained(jax.jit(step), given) for name, given in batches(rows, weights).items()}
    scattered = jax.jit(lambda x: jnp.zeros(7).at[jnp.arange(x.size) % 7].add(x.reshape(-1)))
    return found | {
        "eager": trained(step, (rows, weights)),
        "random": hexadecimal(gc.digest(jax.random.normal(jax.random.key(0), (1000,)))),
        "scatter": hexadecimal(gc.digest(scattered(rows))),
    }


def of_tensorflow() -> dict[str, str]:
    import tensorflow as tf

    import gradcombine as gc

    tf.random.set_seed(0)
    tf.config.experimental.enable_op_determinism()

    def step(params: Any, x: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(params)
            squares = tf.square(tf.tanh(x @ params[0]) @ params[1])[:, 0]
            loss = tf.reduce_sum(squares * weight) / tf.reduce_sum(weight)
        return [p - 0.1 * g for p, g in zip(params, tape.gradient(loss, params), strict=True)]

    def trained(step: Callable[..., Any], given: tuple[np.ndarray, np.ndarray]) -> str:
        trained = list(map(tf.constant, params))
        for x in given[0]:
            trained = step(trained, tf.constant(x), tf.constant(given[1]))
        return hexadecimal(gc.digest(trained))

    params, rows, weights = data()
    compiled = tf.function(step, autograph=False, jit_compile=True)
    found = {name: trained(compiled, given) for name, given in batches(rows, weights).items()}
    pipeline = tf.data.Dataset.from_tensor_slices(rows).map(tf.tanh, num_parallel_calls=tf.data.AUTOTUNE)
    total = sum(float(tf.reduce_sum(x)) * i for i, x in enumerate(pipeline))
    flat = tf.reshape(tf.constant(rows), [-1])
    return found | {
        "eager": trained(step, (rows, weights)),
        "random": hexadecimal(gc.digest(tf.random.normal([1000]))),
        "scatter": hexadecimal(gc.digest(tf.math.unsorted_segment_sum(flat, tf.range(tf.size(flat)) % 7, 7))),
        "pipeline": str(total),
    }


def hexadecimal(digests: Any) -> str:
    return np.asarray(digests).tobytes().hex()


FRAMEWORKS = {"JAX": of_jax, "TensorFlow": of_tensorflow}


def run(framework: str, one_thread: bool = False) -> dict[str, str]:
    """The digests computed by a new process."""
    # The size of thread pools is the number of processors that the process may run on.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)} if one_thread else before)
    try:
        command = [sys.executable, __file__, "--framework", framework]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    finally:
        os.sched_setaffinity(0, before)
    return json.loads(output.splitlines()[-1])


def main(framework: str | None = None) -> None:
    if framework is not None:
        print(json.dumps(FRAMEWORKS[framework]()))
        return
    table, lost = Table("on CPU", *FRAMEWORKS), False
    runs = {name: {"": run(name), "again": run(name), ONE_THREAD: run(name, True)} for name in FRAMEWORKS}
    for question, (what, against, has_to_hold) in QUESTIONS.items():
        cells: list[str] = []
        for found in runs.values():
            if what not in found[""]:
                cells.append("has none")
                continue
            other = found[against][what] if against in found else found[""][against]
            held = found[""][what] == other
            lost |= has_to_hold and not held
            cells.append("the same bits" if held else "other bits")
        table.add_row(question, *cells)
    Console().print(table)
    if lost:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
