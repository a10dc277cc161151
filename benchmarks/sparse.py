"""Time and memory of row-sparse accumulation of an embedding's gradients, relative to dense accumulation.

    python benchmarks/sparse.py [--quick] [--rounds 7] [--json FILE]

One window consists of K microbatches, each with a gradient for 1 % of the rows; then their mean is subtracted from the
table. The gradients of the looked-up rows are precomputed; densifying them, if a variant needs it, is timed as in a
training loop. If XLA sees the scatter and the addition in one program, it scatters directly into the accumulator, and
the dense gradient never exists; the last JAX variant shows the cost if it does.

The variants of a framework alternate in one process. A ratio is the time of a variant relative to the first one, rows;
it is formed in each round, and the tables show medians.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
import tensorflow as tf
import typer
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine import reductions, sparse
from gradcombine.integrations.tensorflow.indexed_slices import to_indexed_slices
from gradcombine.reductions.rows import row_mean

K = 8
"""Microbatches per window."""
WIDTH = 64
MEGABYTE = 2**20


class Variant(NamedTuple):
    """``run()`` runs one window. Bytes of state between microbatches, and of temporary memory."""

    run: Callable[[], None]
    state_bytes: int
    temp_bytes: int | None


class Result(NamedTuple):
    framework: str
    variant: str
    milliseconds: float
    ratio: float
    """The variant's time relative to the framework's first variant: the median over rounds."""
    state_bytes: int
    temp_bytes: int | None


def bytes_of(state: Any) -> int:
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))


def data(rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    touched = rows // 100
    values = rng.standard_normal((K, touched, WIDTH), np.float32)
    return rng.integers(0, rows, (K, touched), np.int32), values


def rows_of(indices: Any, values: Any, rows: int) -> sparse.RowSparse:
    return sparse.row_sparse(indices, values, rows)


def in_jax(rows: int) -> dict[str, Variant]:
    ids, values = map(jnp.asarray, data(rows))
    by_rows = gc.accumulate(row_mean(capacity=K * ids.shape[1]), every=K)
    dense = gc.accumulate(reductions.mean(), every=K)
    like = jax.ShapeDtypeStruct((rows, WIDTH), np.float32)

    def made_dense(ids: Any, values: Any) -> Any:
        return jnp.zeros((rows, WIDTH)).at[ids].add(values)

    def update_rows(state: Any, ids: Any, values: Any) -> Any:
        return by_rows.update(rows_of(ids, values, rows), state)

    def update_dense(state: Any, ids: Any, values: Any) -> Any:
        return dense.update(made_dense(ids, values), state)

    def update_by_hand(state: Any, ids: Any, values: Any) -> Any:
        return state + made_dense(ids, values)

    def apply_rows(table: Any, state: Any) -> Any:
        mean = by_rows.value(state)
        return sparse.add_rows(table, mean._replace(values=-mean.values), unique=True)

    def variant(init: Any, update: Any, apply: Any, first: Any = None) -> Variant:
        state = init()
        arguments = jax.eval_shape(first, ids[0], values[0]) if first else (ids[0], values[0])
        step = jax.jit(update, donate_argnums=0).lower(state, *arguments).compile()
        finish, prepare = jax.jit(apply, donate_argnums=0), jax.jit(first) if first else lambda *pair: pair
        held = [state, jnp.zeros((rows, WIDTH))]

        def run() -> None:
            held[0] = init() if held[0] is None else held[0]
            for i in range(K):
                held[0] = step(held[0], *prepare(ids[i], values[i]))
            held[1] = finish(held[1], held[0])
            jax.block_until_ready(held)

        return Variant(run, bytes_of(state), step.memory_analysis().temp_size_in_bytes)

    return {
        "rows": variant(lambda: by_rows.init(like), update_rows, apply_rows),
        "dense": variant(lambda: dense.init(like), update_dense, lambda table, state: table - dense.value(state)),
        "dense by hand": variant(lambda: jnp.zeros(like.shape), update_by_hand, lambda table, s: table - s / K),
        "dense by hand, gradient from another call": variant(
            lambda: jnp.zeros(like.shape),
            lambda state, gradient: state + gradient,
            lambda table, state: table - state / K,
            lambda *pair: (made_dense(*pair),),
        ),
    }


def in_tensorflow(rows: int) -> dict[str, Variant]:
    ids, values = map(tf.constant, data(rows))
    acc = gc.accumulate(row_mean(capacity=K * ids.shape[1]), every=K)
    shape = tf.constant([rows, WIDTH])

    def slices(i: int) -> tf.IndexedSlices:
        return tf.IndexedSlices(values[i], ids[i], shape)

    table, by_hand = (tf.Variable(tf.zeros((rows, WIDTH))) for _ in range(2))
    total = tf.Variable(tf.zeros((rows, WIDTH)))

    @tf.function
    def update(state: Any, i: tf.Tensor) -> Any:
        return acc.update(tf.IndexedSlices(tf.gather(values, i), tf.gather(ids, i), shape), state)

    @tf.function
    def apply_rows(state: Any) -> None:
        table.scatter_sub(to_indexed_slices(acc.value(state)))

    @tf.function
    def add(i: tf.Tensor) -> None:
        dense = tf.IndexedSlices(tf.gather(values, i), tf.gather(ids, i), shape)
        total.assign_add(sparse.to_dense(dense))

    @tf.function
    def add_by_hand(i: tf.Tensor) -> None:
        total.assign_add(tf.math.unsorted_segment_sum(tf.gather(values, i), tf.gather(ids, i), rows))

    @tf.function
    def apply_dense() -> None:
        by_hand.assign_sub(total / K)
        total.assign(tf.zeros_like(total))

    held = [acc.init(slices(0))]

    def run_rows() -> None:
        for i in range(K):
            held[0] = update(held[0], tf.constant(i))
        apply_rows(held[0])
        table[0, 0].numpy()

    def dense(step: Any) -> Callable[[], None]:
        def run() -> None:
            for i in range(K):
                step(tf.constant(i))
            apply_dense()
            by_hand[0, 0].numpy()

        return run

    size = rows * WIDTH * 4
    return {
        "rows": Variant(run_rows, sum(int(np.prod(x.shape)) * x.dtype.size for x in tf.nest.flatten(held)), None),
        "dense, by to_dense": Variant(dense(add), size, None),
        "dense by hand": Variant(dense(add_by_hand), size, None),
    }


def measure(framework: str, variants: dict[str, Variant], rounds: int) -> list[Result]:
    for variant in variants.values():
        variant.run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            start = time.perf_counter()
            variant.run()
            times[name].append(1e3 * (time.perf_counter() - start))
    first = next(iter(times.values()))
    return [
        Result(
            framework,
            name,
            statistics.median(times[name]),
            statistics.median(mine / base for mine, base in zip(times[name], first, strict=True)),
            variant.state_bytes,
            variant.temp_bytes,
        )
        for name, variant in variants.items()
    ]


def main(
    quick: Annotated[bool, typer.Option(help="A table of 20,000 rows, and three rounds.")] = False,
    rounds: Annotated[int, typer.Option(help="Rounds per variant.")] = 7,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Times the variants and prints a table per framework."""
    rows, turns = (20_000, 3) if quick else (1_000_000, rounds)
    results: list[Result] = []
    for framework, variants in (("JAX, jit", in_jax), ("TensorFlow, tf.function", in_tensorflow)):
        found = measure(framework, variants(rows), turns)
        table = Table(
            "variant", "ms a window", "ratio", "state MB", "temporary MB", title=f"{framework}, {rows:,} rows"
        )
        for x in found:
            temp = "" if x.temp_bytes is None else f"{x.temp_bytes / MEGABYTE:.1f}"
            table.add_row(x.variant, f"{x.milliseconds:.1f}", f"{x.ratio:.2f}", f"{x.state_bytes / MEGABYTE:.1f}", temp)
        Console().print(table)
        results += found
    if json_path is not None:
        json_path.write_text(json.dumps([x._asdict() for x in results], indent=1))


if __name__ == "__main__":
    typer.run(main)
