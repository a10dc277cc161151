"""Cost of steps, sums and digests in JAX on one GPU, relative to optax, hand-written steps and plain additions.

    python benchmarks/gpu.py [--quick] [--rounds 15] [--json FILE]

Measured as in `jax_steps`, with arrays so large that the GPU, not the host, is the limit. docs/performance.md has the
results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import typer

import gradcombine as gc
from benchmarks.jax_steps import (
    COMPOSABLE,
    FUSED,
    LIMIT,
    MULTI,
    OPTIMIZER,
    Case,
    K,
    Variant,
    accumulating,
    own,
    report,
    scanned,
    tree_of,
)
from gradcombine.integrations.optax import accumulate_and_apply

STATIC = "accumulate_and_apply, static flush"
PLAIN, NORM = "a chain of +, divided", "norm"


def windows(leaves: int, elements: int) -> dict[str, Variant]:
    """One microbatch per call, and Adam at the end of a window of K."""
    params, grads = tree_of(leaves, elements), tree_of(leaves, elements)
    two_programs = accumulate_and_apply(OPTIMIZER, every=gc.UNTIL_FLUSH)

    @partial(jax.jit, donate_argnums=(0, 1), static_argnames="flush")
    def step(params: Any, state: Any, grads: Any, flush: bool) -> Any:
        return two_programs.apply(grads, state, params, flush=flush)

    def run(state: Any) -> Any:
        for i in range(K):
            state = step(*state, grads, flush=i == K - 1)
        return jax.block_until_ready(state)

    static = Variant(own((params, two_programs.init(params))), run)
    return {**accumulating(leaves, elements, (FUSED, COMPOSABLE, MULTI, LIMIT)), STATIC: static}


def combined(elements: int) -> dict[str, Variant]:
    """The mean of K arrays."""
    keys = jax.random.split(jax.random.key(0), K)
    arrays = [jax.random.normal(key, (elements,)) for key in keys]
    functions: dict[str, Callable[[Any], Any]] = {
        PLAIN: lambda arrays: sum(arrays[1:], arrays[0]) / K,
        "gc.mean": gc.mean,
        "gc.mean, order='tree'": partial(gc.combine, gc.reductions.mean(), order="tree"),
        "compensated": partial(gc.combine, gc.reductions.mean("compensated")),
        "exact": partial(gc.combine, gc.reductions.mean("exact")),
    }
    return {name: called(function, arrays) for name, function in functions.items()}


def divided(elements: int) -> dict[str, Variant]:
    """One array, divided by a scalar."""
    array = jax.random.normal(jax.random.key(0), (elements,))
    return {
        "a division": called(lambda x: x[0] / x[1], (array, jnp.float32(7))),
        "finalize of a mean": called(lambda x: gc.combine(gc.reductions.mean(), [x[0]], [x[1]]), (array, 7)),
    }


def digested(elements: int) -> dict[str, Variant]:
    """Digests of four leaves."""
    leaves = [jax.random.normal(key, (elements // 1024, 1024)) for key in jax.random.split(jax.random.key(0), 4)]

    def norm(leaves: Any) -> Any:
        return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in leaves))

    return {NORM: called(norm, leaves), "digest": called(gc.digest, leaves)}


def called(function: Callable[[Any], Any], given: Any) -> Variant:
    compiled = jax.jit(function).lower(given).compile()

    def run(state: None) -> None:
        jax.block_until_ready(compiled(given))

    return Variant(None, run, compiled.memory_analysis().temp_size_in_bytes)


def cases(quick: bool) -> Iterator[Case]:
    leaves, elements = (4, 2**14) if quick else (16, 2**24)
    adam = f"{leaves} leaves of {elements:,}, Adam, every {K}"
    yield Case(f"microbatch by microbatch: {adam}", K, lambda: windows(leaves, elements), {})
    width, batch = (128, 256) if quick else (4096, 8192)
    title = f"a scan over {K} microbatches: two layers of {width}, {batch} examples"
    yield Case(title, 1, lambda: scanned(width, batch), {})
    size = 2**16 if quick else 2**28
    yield Case(f"the mean of {K} arrays of {size:,}", 1, lambda: combined(size), {})
    yield Case(f"{size:,} elements over a scalar", 1, lambda: divided(size), {})
    yield Case(f"four leaves of {size:,}", 1, lambda: digested(size), {})


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes and few rounds, as a smoke test.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds per case. Default: 15, or 3 if quick.", min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Prints times on the default device, and their ratios to the first row of each table."""
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, NumPy {np.__version__}")
    report(cases(quick), rounds or (3 if quick else 15), json_file)


if __name__ == "__main__":
    typer.run(main)
