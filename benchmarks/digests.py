"""Cost of a digest of every leaf, relative to the norm of the same leaves.

    python benchmarks/digests.py [--megabytes 64] [--turns 15] [--json FILE]

In each turn, all variants run one after another in random order. The table has the medians of the ratios of CPU time
and of time to the norm in the same turn.
"""

from __future__ import annotations

import json as json_format
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorflow as tf
import typer
from rich.console import Console
from rich.table import Table

import gradcombine as gc

LEAVES = 4
LIMIT = 1.1
"""Maximum cost of a digest, relative to the norm."""


def jax_norm(leaves: list[Any]) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves))


def tf_norm(leaves: list[Any]) -> Any:
    return tf.linalg.global_norm([tf.cast(x, tf.float32) for x in leaves])


Pair = tuple[Callable[[], Any], Callable[[], Any]]


def pairs(arrays: list[np.ndarray]) -> dict[str, Pair]:
    """By mode: calls that compute and wait for the norm and for the digests."""
    found: dict[str, Pair] = {}
    given = [jnp.asarray(x) for x in arrays]
    norm, digest = jax.jit(jax_norm), jax.jit(gc.digest)
    found["JAX jit"] = (lambda: norm(given).block_until_ready(), lambda: digest(given).block_until_ready())
    tensors = [tf.constant(x) for x in arrays]
    for name, xla in (("tf.function", None), ("tf.function, XLA", True)):
        of_norm = tf.function(tf_norm, jit_compile=xla, autograph=False)
        of_digest = tf.function(gc.digest, jit_compile=xla, autograph=False)
        found[name] = (lambda f=of_norm: f(tensors).numpy(), lambda f=of_digest: f(tensors).numpy())
    return found


def leaves(megabytes: int, dtype: Any = np.float32) -> list[np.ndarray]:
    """Leaves of this total size."""
    rng, size = np.random.default_rng(0), megabytes * 2**20 // LEAVES // np.dtype(dtype).itemsize
    return [rng.standard_normal((size // 1024, 1024), np.float32).astype(dtype) for _ in range(LEAVES)]


def measured(pair: Pair, turns: int) -> tuple[float, float]:
    """The median ratios of CPU time and of time."""
    ratios: list[tuple[float, float]] = []
    for run in pair:
        run()
    for _ in range(turns):
        spent = [0.0, 0.0], [0.0, 0.0]
        for i in random.sample((0, 1), 2):
            processor, clock = time.process_time(), time.perf_counter()
            pair[i]()
            spent[i][:] = time.process_time() - processor, time.perf_counter() - clock
        ratios.append((spent[1][0] / spent[0][0], spent[1][1] / spent[0][1]))
    processor, clock = (statistics.median(column) for column in zip(*ratios, strict=True))
    return processor, clock


def main(
    megabytes: Annotated[int, typer.Option(help="Total size of the leaves.", min=1)] = 64,
    turns: Annotated[int, typer.Option(min=1)] = 15,
    json: Annotated[Path | None, typer.Option(help="Write the ratios to this file.")] = None,
) -> None:
    rows: list[dict[str, Any]] = []
    table = Table("mode", "dtype", "CPU time / norm's", "time / norm's")
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        for name, pair in pairs(leaves(megabytes, dtype)).items():
            processor, clock = measured(pair, turns)
            rows.append({"way": name, "dtype": str(dtype), "processor": processor, "clock": clock})
            table.add_row(name, str(dtype), f"{processor:.2f}", f"{clock:.2f}")
    Console().print(table)
    if json is not None:
        json.write_text(json_format.dumps(rows, indent=1) + "\n")
    if max(row["processor"] for row in rows) > LIMIT:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
