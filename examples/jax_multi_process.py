"""Trains with windows over time and two processes, to the same bits as in one process."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc

PROCESSES = 2
WINDOWS, MICROBATCHES, WIDTH = 5, 16, 32
MEAN = gc.reductions.mean()


# quickstart: begin
def accumulation(size: int) -> Any:
    """The accumulation of one process's block of each window. Order "tree" fixes the order of all additions."""
    return gc.accumulate(MEAN, every=MICROBATCHES // size, order="tree")


def make_merge(devices: Sequence[Any]) -> tuple[Any, tuple[Any]]:
    """Returns the jitted mean over the processes' windows, on one device of each, and its arguments.

    To see what it does on other hardware, run ``gradcombine audit jax_multi_process:make_merge --target h100:8``.
    """
    mesh = Mesh(np.array(devices), ("process",))
    acc = accumulation(mesh.size)

    def merge(states):
        state = jax.tree.map(lambda x: x[0], states)
        state = gc.merge_replicas(MEAN, state, over=gc.jax_axis("process"), order="tree")
        return acc.value(state)

    def spec(x):
        return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=NamedSharding(mesh, P("process")))

    states = jax.tree.map(spec, jax.eval_shape(acc.init, jax.ShapeDtypeStruct((WIDTH,), jnp.float32)))
    return jax.jit(jax.shard_map(merge, mesh=mesh, in_specs=P("process"), out_specs=P())), (states,)


# quickstart: end


def train(size: int, rank: int) -> str:
    """Trains as one of the processes; returns the loss on new data and the bits of the parameters."""

    def microbatch(window, number):
        rng = np.random.default_rng([window, number])
        x = rng.normal(size=(8 + number, WIDTH)).astype(np.float32)  # of different sizes
        return x, x @ np.linspace(-1, 1, WIDTH, dtype=np.float32)

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    acc = accumulation(size)
    merge, (specs,) = make_merge(jax.devices()[:size])
    gradient, update = jax.jit(jax.grad(loss)), jax.jit(acc.update)
    descend = jax.jit(lambda w, g: w - 0.25 * g)
    w = jnp.zeros(WIDTH)
    state = acc.init(w)
    for window in range(WINDOWS):
        for number in range(rank * MICROBATCHES // size, (rank + 1) * MICROBATCHES // size):
            x, y = microbatch(window, number)
            state = update(gradient(w, x, y), state, len(x))
        states = jax.tree.map(
            lambda x, spec: jax.make_array_from_process_local_data(spec.sharding, np.asarray(x)[None]), state, specs
        )
        w = descend(w, merge(states).addressable_data(0))
    value = loss(w, *microbatch(WINDOWS, 0))
    return f"loss {value:.4f} after {WINDOWS} windows {np.asarray(w).tobytes().hex()}"


def run(size: int) -> list[str]:
    """Trains in ``size`` processes; returns the last line printed by each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    commands = [[sys.executable, __file__, address, str(size), str(rank)] for rank in range(size)]
    started = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [line for output in outputs for line in output.splitlines() if line.startswith("loss")]


def main() -> None:
    several, (single,) = run(PROCESSES), run(1)
    for rank, line in enumerate(several):
        print(f"process {rank} of {PROCESSES}: {line.rpartition(' ')[0]}")
    print(f"one process:    {single.rpartition(' ')[0]}")
    print(f"same bits: {several == [single] * PROCESSES}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        address, size, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        jax.distributed.initialize(address, num_processes=size, process_id=rank)
        print(train(size, rank))
    else:
        main()
