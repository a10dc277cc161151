"""Cost of an audit: its time relative to compiling with XLA, its memory relative to the size of the HLO.

    python benchmarks/audit.py [--layers 20] [--target h100:8]

The step is Adam on a transformer with 50 million parameters per layer, unrolled, so that the HLO grows with the number
of layers; the batch is sharded over eight devices. Times are CPU times of all threads; memory is Python's peak during
the audit, including the text of the HLO.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from typing import Annotated, Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from gradcombine.audit import audit, find_target

ADAM = optax.adam(1e-3)
WIDTH, HEADS, ROWS, LENGTH = 2048, 16, 16, 128
SHAPES = {
    "scale": (WIDTH,),
    "queries": (WIDTH, HEADS, WIDTH // HEADS),
    "keys": (WIDTH, HEADS, WIDTH // HEADS),
    "values": (WIDTH, HEADS, WIDTH // HEADS),
    "out": (HEADS, WIDTH // HEADS, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def layer(w: dict[str, Any], x: Any) -> Any:
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", normal, w[name]) for name in ("queries", "keys", "values"))
    attention = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    x = x + jnp.einsum("bhts,bshk,hkd->btd", attention, v, w["out"])
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def step(params: Any, state: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        out = x
        for w in params:
            out = layer(w, out)
        return jnp.mean(out**2)

    updates, state = ADAM.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def main(
    layers: Annotated[int, typer.Option(help="Layers of the transformer.", min=1)] = 20,
    target: Annotated[str | None, typer.Option(help="Eight devices to compile for. Default: CPUs.")] = None,
) -> None:
    """Prints the cost of an audit relative to compiling the same step."""
    found = find_target(target)
    mesh = Mesh(np.array(found.devices), ("data",))

    def spec(where: P, x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, where))

    like = [{name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()} for _ in range(layers)]
    params, state = (jax.tree.map(lambda x: spec(P(), x), tree) for tree in (like, jax.eval_shape(ADAM.init, like)))
    batch = spec(P("data"), jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32))
    audit(jax.jit(lambda x: x + 1), jnp.ones(8))  # one-time work
    begun = time.process_time()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, batch).compile()
    built = time.process_time() - begun
    begun = time.process_time()
    report = audit(compiled, target=found)
    took = time.process_time() - begun
    size = len(compiled.as_text())
    del report
    tracemalloc.start()
    report = audit(compiled, target=found)
    peak = tracemalloc.get_traced_memory()[1]
    count = sum(x.size for x in jax.tree.leaves(like))
    table = Table("target", "parameters", "HLO", "time over compiling", "memory over HLO", "findings")
    cells = report.target.name, f"{count / 1e9:.2f}e9", f"{size / 1e6:.1f} MB", f"{took / built:.2f}"
    table.add_row(*cells, f"{peak / size:.1f}", str(len(report.findings)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
