"""Cost of accumulation in JAX relative to optax and hand-written steps: ratios of times, and memory.

    python benchmarks/jax_steps.py [--quick] [--rounds 9] [--json FILE]

All variants of a case alternate in one process. A ratio is the time of a variant relative to gradcombine's, the first
row; it is formed in each round from consecutive times, and the tables show medians. In the accumulation cases,
gradients are precomputed and passed in, so that only accumulation is measured.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import gradcombine as gc
from gradcombine.integrations.jax import Loss, train_step, value_and_grad
from gradcombine.integrations.optax import accumulate

K = 8
"""Microbatches per window."""
OPTIMIZER = optax.adam(1e-3)


class Variant(NamedTuple):
    """A timed call: ``run(state)`` returns the next state; ``temp`` and ``kept`` are bytes of memory."""

    state: Any
    run: Callable[[Any], Any]
    temp: int | None = None
    kept: int | None = None


class Case(NamedTuple):
    """Variants of one computation. Times are relative to the first, gradcombine's."""

    title: str
    calls: int
    variants: Callable[[], dict[str, Variant]]
    targets: dict[str, float]
    """The target ratios at full size."""


class Result(NamedTuple):
    case: str
    variant: str
    milliseconds: float
    ratio: float
    """The variant's time relative to the case's first variant: the median over rounds."""
    target: float | None
    """The target ratio at full size."""
    temp_bytes: int | None
    kept_bytes: int | None


def tree_of(leaves: int, elements: int) -> dict[str, jax.Array]:
    return {f"w{i}": jnp.full((elements,), 0.01 * (i + 1), jnp.float32) for i in range(leaves)}


def own(values: Any) -> Any:
    return jax.tree.map(jnp.copy, values)


def compiled_step(function: Callable[..., Any], state: tuple[Any, ...], given: Any, jitted: Any = None) -> Variant:
    """A donated step ``function(*state, given) -> state``, called once per microbatch."""
    jitted = jax.jit(function, donate_argnums=tuple(range(len(state)))) if jitted is None else jitted
    memory = jitted.lower(*state, given).compile().memory_analysis()

    def run(state: Any) -> Any:
        for _ in range(K):
            state = tuple(jitted(*state, given))[: len(state)]
        return jax.block_until_ready(state)

    return Variant(own(state), run, memory.temp_size_in_bytes, memory.alias_size_in_bytes)


FUSED, COMPOSABLE = "train_step(every)", "optax.accumulate of gradcombine"
MULTI, LIMIT = "optax.MultiSteps", "limit: additions in place"
"""The limit adds in place and runs Adam in a separate call."""


def accumulating(leaves: int, elements: int, names: tuple[str, ...]) -> dict[str, Variant]:
    """One microbatch per call, and Adam at the end of a window."""
    params, grads = tree_of(leaves, elements), tree_of(leaves, elements)

    def given(params: Any, grads: Any) -> Any:
        return jnp.float32(0), grads

    fused = train_step(Loss(given, differentiate=False), OPTIMIZER, every=K, weight=lambda grads: 1)
    composable, multi = accumulate(OPTIMIZER, K), optax.MultiSteps(OPTIMIZER, K)

    def apply_each(transformation: Any) -> Variant:
        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return compiled_step(step, (params, transformation.init(params)), grads)

    add = jax.jit(lambda total, grads: jax.tree.map(jnp.add, total, grads), donate_argnums=0)

    def optimize(params: Any, inner: Any, total: Any) -> Any:
        updates, inner = OPTIMIZER.update(jax.tree.map(lambda g: g / K, total), inner, params)
        return optax.apply_updates(params, updates), inner

    optimize = jax.jit(optimize, donate_argnums=(0, 1))

    def limit(state: Any) -> Any:
        params, inner, total = state
        for _ in range(K):
            total = add(total, grads)
        return jax.block_until_ready((*optimize(params, inner, total), total))

    makers = {
        FUSED: lambda: compiled_step(fused.function, (params, fused.init(params)), grads, fused.compiled),
        COMPOSABLE: lambda: apply_each(composable),
        MULTI: lambda: apply_each(multi),
        LIMIT: lambda: Variant(own((params, OPTIMIZER.init(params), params)), limit),
    }
    return {name: makers[name]() for name in names}


def scanned(width: int, batch: int) -> dict[str, Variant]:
    """The gradient of a batch in a scan over K microbatches."""
    params = {"a": jnp.ones((width, width)) / width, "b": jnp.ones((width, width)) / width}
    x = jnp.asarray(np.random.default_rng(0).standard_normal((batch, width)), jnp.float32)

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2)

    def by_hand(params: Any, x: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, x)), None

        zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        totals, _ = jax.lax.scan(body, zeros, x.reshape(K, -1, width))
        return jax.tree.map(lambda total: total / K, totals)

    kind = optax.microbatching.AccumulationType.MEAN
    peer = optax.microbatching.microbatch(jax.value_and_grad(loss), 1, batch // K, kind)

    def variant(function: Callable[..., Any]) -> Variant:
        compiled = jax.jit(function).lower(params, x).compile()
        return Variant(
            None,
            lambda _: jax.block_until_ready(compiled(params, x)) and None,
            compiled.memory_analysis().temp_size_in_bytes,
        )

    return {
        "value_and_grad": variant(value_and_grad(loss, K)),
        "a hand-written scan": variant(by_hand),
        "optax.microbatch": variant(peer),
    }


def exchanged(replicas: int, leaves: int, elements: int) -> dict[str, Variant]:
    """The mean over virtual devices."""
    mesh = jax.make_mesh((replicas,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:replicas])
    sharding = jax.sharding.NamedSharding(mesh, P("d"))
    values = {k: jax.device_put(jnp.ones((replicas, elements)), sharding) for k in tree_of(leaves, 1)}

    def variant(function: Callable[..., Any]) -> Variant:
        def one(values: Any) -> Any:
            return function(jax.tree.map(lambda x: x[0], values))

        mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("d"), out_specs=P()))
        compiled = mapped.lower(values).compile()
        return Variant(None, lambda _: jax.block_until_ready(compiled(values)) and None)

    def one_tuple(values: Any) -> Any:
        return jax.tree.map(lambda x: x / replicas, jax.lax.psum(values, "d"))

    def leaf_by_leaf(values: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.psum(x, "d") / replicas, values)

    return {
        "gc.all_reduce": variant(lambda values: gc.all_reduce(gc.reductions.mean(), values, gc.jax_axis("d"))),
        "psum of each leaf": variant(leaf_by_leaf),
        "psum of one tuple": variant(one_tuple),
    }


def cases(quick: bool) -> Iterator[Case]:
    # A power of two: XLA on CPU is slow on odd lengths (a plain addition of 133,333 elements takes twice as long).
    leaves, elements = (24, 20_480) if quick else (120, 2**17)
    title = f"{leaves} leaves of {elements:,}, Adam, every {K}"
    yield Case(
        f"microbatch by microbatch: {title}",
        K,
        lambda: accumulating(leaves, elements, (FUSED, MULTI, LIMIT)),
        {MULTI: 12, LIMIT: 1 / 1.3},
    )
    yield Case(
        f"as an optax transformation: {title}",
        K,
        lambda: accumulating(leaves, elements, (COMPOSABLE, MULTI)),
        {MULTI: 4},
    )
    width, batch = (128, 256) if quick else (768, 1024)
    yield Case(
        f"a scan over {K} microbatches: two layers of {width}, {batch} examples",
        1,
        lambda: scanned(width, batch),
        {"a hand-written scan": 1 / 1.05, "optax.microbatch": 1},
    )
    sizes = [(40, 1000)] if quick else [(200, 1000), (100, 10_000), (50, 100_000), (20, 1_000_000)]
    for replicas in (4,) if quick else (4, 8):
        for count, size in sizes:
            yield Case(
                f"over {replicas} devices: {count} leaves of {size:,}",
                1,
                lambda replicas=replicas, count=count, size=size: exchanged(replicas, count, size),
                {},
            )


def measure(case: Case, rounds: int) -> list[Result]:
    """Times the variants alternately. The order alternates, too, so that none is always first or after the slowest."""
    variants = case.variants()
    names = list(variants)
    states = {name: variant.run(variant.run(variant.state)) for name, variant in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 else reversed(names):
            begun = time.perf_counter()
            states[name] = variants[name].run(states[name])
            times[name].append((time.perf_counter() - begun) * 1000 / case.calls)
    first = times[names[0]]
    results = []
    for name in names:
        ratio = statistics.median(t / own for t, own in zip(times[name], first, strict=True))
        temp, kept = variants[name].temp, variants[name].kept
        results.append(
            Result(case.title, name, statistics.median(times[name]), ratio, case.targets.get(name), temp, kept)
        )
    return results


def shown(case: Case, results: list[Result]) -> Table:
    """One case as a table."""
    table = Table("", "ms", "ratio", "target", "temporary MB", "in place MB", title=case.title, title_justify="left")
    for result in results:
        sizes = ("" if size is None else f"{size / 1e6:.1f}" for size in (result.temp_bytes, result.kept_bytes))
        target = "" if result.target is None else f">= {result.target:.2f}"
        table.add_row(result.variant, f"{result.milliseconds:.2f}", f"{result.ratio:.2f}", target, *sizes)
    return table


def report(cases: Iterable[Case], rounds: int, json_file: Path | None) -> None:
    """Measures the cases, prints a table of each, and writes the results to a file, if any."""
    console, results = Console(), []
    for case in cases:
        measured = measure(case, rounds)
        console.print(shown(case, measured))
        results.extend(measured)
    if json_file is not None:
        json_file.write_text(json.dumps([result._asdict() for result in results], indent=1))


def main(
    quick: Annotated[bool, typer.Option(help="Small sizes and few rounds, as a smoke test.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds per case. Default: 9, or 3 if quick.", min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results to this file.")] = None,
) -> None:
    """Prints the cost of accumulation in JAX relative to optax and hand-written steps."""
    report(cases(quick), rounds or (3 if quick else 9), json_file)


if __name__ == "__main__":
    typer.run(main)
