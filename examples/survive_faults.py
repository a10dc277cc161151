"""Trains in two processes, of which one is killed within a window, to the same bits as one undisturbed process."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from multiprocessing.connection import wait

import numpy as np

import gradcombine as gc
from gradcombine import statefile
from gradcombine.reductions import Numbered
from gradcombine.resilience import ledger

WINDOWS, MICROBATCHES, WIDTH = 3, 8, 32


# quickstart: begin
def supervise(start, patience, limit=float("inf")):
    """Runs processes until all succeed. If one fails, or none makes progress, kills and restarts all of them.

    Args:
      start: ``start(attempt) -> (processes, progress)``: started multiprocessing processes, and a function whose result
        changes whenever they make progress.
      patience: seconds without progress after which the processes are considered to hang.
      limit: total time limit in seconds.

    Returns:
      The number of restarts.
    """
    deadline, attempt = time.monotonic() + limit, 0
    while not _succeed(*start(attempt), patience, deadline):
        attempt += 1
        if time.monotonic() > deadline:
            raise TimeoutError(f"{limit} seconds were not enough: {attempt} attempts")
    return attempt


def _succeed(processes, progress, patience, deadline):
    last, until = progress(), time.monotonic() + patience
    try:
        while time.monotonic() < min(until, deadline):
            wait([process.sentinel for process in processes if process.exitcode is None], timeout=0.1)
            codes = [process.exitcode for process in processes]
            if not any(code is None for code in codes) or any(codes):
                return not any(codes)
            if (now := progress()) != last:
                last, until = now, time.monotonic() + patience
        return False
    finally:
        for process in processes:
            process.kill()
            process.join()


def ledgered_mean():
    """A mean whose states record which microbatches they contain."""
    return gc.reductions.numbered(gc.reductions.mean("exact"), MICROBATCHES)


def make_merge(devices):
    """Returns the jitted merge of the processes' states, on one device of each, and its arguments."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mean, mesh = ledgered_mean(), Mesh(np.array(devices), ("process",))

    def merge(states):
        state = jax.tree.map(lambda x: x[0], states)
        return gc.merge_replicas(mean, state, over=gc.jax_axis("process"))

    def spec(x):
        return jax.ShapeDtypeStruct((mesh.size, *x.shape), x.dtype, sharding=NamedSharding(mesh, P("process")))

    states = jax.tree.map(spec, mean.init(np.zeros(WIDTH, np.float32)))
    mapped = jax.shard_map(merge, mesh=mesh, in_specs=P("process"), out_specs=P(), check_vma=False)
    return jax.jit(mapped), (states,)


def train(folder, size, rank, reached, killed_after=None):
    """Runs one process: recovers the run, computes its share of the missing microbatches, then trains on."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    mean, start = ledgered_mean(), np.zeros(WIDTH, np.float32)
    merge, (specs,) = make_merge(jax.devices()[:size])
    gradient = jax.jit(jax.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
    descend = jax.jit(lambda w, g: w - 0.25 * g)
    window, w, parts, _ = statefile.recover(folder, mean, like=start, start=start)
    multihost_utils.sync_global_devices("all have read")
    # A process continues the part whose file it will replace, so that no part is ever missing from the disk.
    held = [[parts[holder] for holder in parts if holder % size == i] for i in range(size)]
    while window < WINDOWS:
        statefile.begin_window(folder, window, w)
        states = [statefile.resize(mean, group, 1)[0] if group else mean.init(start) for group in held]
        missing = set(range(MICROBATCHES)).difference(*(ledger.read(state).held for state in states))
        shares = ledger.deal(missing, size, [ledger.read(state).held for state in states])
        state = states[rank]
        for number in shares[rank]:
            x, y = microbatch(window, number)
            state = mean.update(state, Numbered(np.asarray(gradient(w, x, y)), number), len(x))
            statefile.save_part(folder, window, rank, mean, state)
            reached[rank] += 1
            if reached[rank] == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        stacked = jax.tree.map(
            lambda x, spec: jax.make_array_from_process_local_data(spec.sharding, np.asarray(x)[None]), state, specs
        )
        merged = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), merge(stacked))
        ledger.require_once(merged)
        w = np.asarray(descend(w, mean.finalize(merged)))
        window, held = window + 1, [[]] * size
    statefile.begin_window(folder, window, w)
    multihost_utils.sync_global_devices("all have ended")


# quickstart: end
def microbatch(window, number):
    rng = np.random.default_rng([window, number])
    x = rng.normal(size=(8 + number, WIDTH)).astype(np.float32)  # of different sizes
    return x, x @ np.linspace(-1, 1, WIDTH, dtype=np.float32)


def work(address, folder, size, rank, reached, killed_after):
    import jax

    jax.distributed.initialize(address, num_processes=size, process_id=rank)
    train(folder, size, rank, reached, killed_after)
    os._exit(0)


def run(folder, size, killed_after=None):
    """Trains to the end; returns the parameters and the number of restarts."""
    context = multiprocessing.get_context("spawn")

    def start(attempt):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        reached, processes = context.RawArray("q", size), []
        for rank in range(size):
            fault = killed_after if (attempt, rank) == (0, size - 1) else None
            processes.append(context.Process(target=work, args=(address, folder, size, rank, reached, fault)))
            processes[-1].start()
        return processes, lambda: list(reached)

    restarts = supervise(start, patience=30, limit=100)
    zeros = np.zeros(WIDTH, np.float32)
    return statefile.recover(folder, ledgered_mean(), like=zeros, start=zeros).begun, restarts


def main():
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="")
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as faulty:
        (expected, _), (params, restarts) = run(undisturbed, 1), run(faulty, 2, killed_after=6)
    x, y = microbatch(WINDOWS, 0)
    loss = np.mean((x @ params - y) ** 2)
    print(f"killed after its 6th microbatch: restarted {restarts} time, loss {loss:.4f}")
    print(f"same bits: {expected.tobytes() == params.tobytes()}")


if __name__ == "__main__":
    main()
