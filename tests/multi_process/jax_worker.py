"""One process of a JAX cluster: trains with windows of microbatches that are spread over the processes.

Arguments: coordinator, number of processes, rank, and what to do: ``train``; ``save FOLDER`` (stop in the middle of the
second window and save its parts); ``resume FOLDER`` (and train to the end); ``die`` (the last process ends in the
second window).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.integrations.jax.arrays import detect_lost_peers
from gradcombine.places.time import whole_window
from tests.faults.jax_engine import descend, gradient
from tests.faults.training import bits

WINDOWS, MICROBATCHES, WIDTH = 3, 8, 33
MEAN = reductions.mean()


def microbatch(window: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """A microbatch of 1 to 5 examples."""
    rng = np.random.default_rng([window, number])
    x = rng.normal(size=(1 + number % 5, WIDTH)).astype(np.float32)
    return x, np.sin(x).sum(1)


def start() -> Any:
    return {"w": jnp.zeros(WIDTH), "b": jnp.zeros(())}


def merger(size: int) -> Any:
    """Returns a function that merges the processes' windows to the mean over all of them."""
    mesh = jax.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))
    own = NamedSharding(mesh, P("data"))

    def merge(stacked: Any) -> Any:
        state = jax.tree.map(lambda x: x[0], stacked)
        return MEAN.finalize(gc.merge_replicas(MEAN, state, over=gc.jax_axis("data"), order="tree"))

    merged = jax.jit(jax.shard_map(merge, mesh=mesh, in_specs=P("data"), out_specs=P()))

    def call(state: Any) -> Any:
        stacked = jax.tree.map(lambda x: jax.make_array_from_process_local_data(own, np.asarray(x)[None]), state)
        with detect_lost_peers("merge_replicas"):
            result = jax.block_until_ready(merged(stacked))
        return jax.tree.map(lambda x: x.addressable_data(0), result)

    return call


def main(coordinator: str, size: int, rank: int, task: str, folder: Path) -> Any:
    jax.distributed.initialize(coordinator, num_processes=size, process_id=rank, heartbeat_timeout_seconds=10)
    merge = merger(size)
    block = MICROBATCHES // size
    acc = gc.accumulate(MEAN, every=block, order="tree")
    update = jax.jit(acc.update)
    params, state, done = start(), acc.init(start()), 0
    params_file, state_file = folder / "params.npz", folder / f"window{rank}.npz"
    if task == "resume":
        saved = np.load(params_file)
        params = {name: jnp.asarray(saved[name]) for name in params}
        state = jax.tree.map(jnp.asarray, statefile.load(state_file, MEAN, like=start()))
        done = block + block // 2
    for step in range(done, WINDOWS * block):
        window, number = step // block, rank * block + step % block
        if step == block + block // 2:
            if task == "save":
                statefile.save(state_file, MEAN, state)
                if rank == 0:
                    np.savez(params_file, **params)
                return "saved"
            if task == "die" and rank == size - 1:
                os._exit(9)
        x, y = microbatch(window, number)
        state = update(gradient(params, x, y), state, len(x))
        if acc.ready(state):
            params = descend(params, merge(whole_window(MEAN, state)))
    return bits(params)


def leave(size: int, rank: int, folder: Path) -> None:
    """Ends a process that outlives the last one: a regular exit would wait for that."""
    (folder / f"left{rank}").touch()
    others, end = [folder / f"left{other}" for other in range(1, size - 1)], time.monotonic() + 20
    # The first process runs the coordinator, without which JAX aborts the others.
    while rank == 0 and time.monotonic() < end and not all(each.exists() for each in others):
        time.sleep(0.1)
    time.sleep(1 if rank == 0 else 0)
    os._exit(3)


if __name__ == "__main__":
    try:
        result = main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    except gc.GradCombineError as error:
        print("\n" + json.dumps({"error": str(error)}), flush=True)
        leave(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[5]))
    print("\n" + json.dumps({"result": result}), flush=True)
