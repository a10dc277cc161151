"""Random histories of requests: ``python -m tests.integrations.jax.request_histories --histories 1000 --seed 1``.

Several clients send the microbatches of three slots repeatedly, out of order, batched or split differently, late, and
to slots that are discarded, saved and loaded in between; with precision "exact" also loaded by a service with another
number of replicas. Each slot must end with the bits that it has if every microbatch arrives once and in order.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import losses, reductions
from gradcombine.integrations.jax import Loss, LossOutput, RequestStep, Slot, request_step
from gradcombine.types import Order

SLOTS, WINDOWS, MOST, ROWS = ("a", "b", "c"), 2, 6, 4
PRECISION: dict[Order, Any] = {"sequential": "exact", "tree": "fast"}


def loss(params: Any, x: jax.Array) -> LossOutput:
    """A loss whose gradient is an exact sum over rows, however they are divided."""
    return LossOutput({"fit": losses.token_mean(x @ params["w"], x[:, 0] > 0)})


class Service(NamedTuple):
    """A process that serves requests.

    Attributes:
      step: the request step.
      place: puts arrays on the devices of the process.
    """

    step: RequestStep
    place: Callable[[Any], Any]


def service(order: Order, replicas: int = 1) -> Service:
    mean = reductions.mean(PRECISION[order])
    settings: dict[str, Any] = {"microbatches": MOST, "reduction": mean, "order": order}
    terms = Loss(loss, terms={"fit": "rows"})
    if replicas == 1:
        return Service(request_step(terms, optax.adam(0.1), **settings), lambda arrays: arrays)
    mesh = jax.make_mesh((replicas,), ("data",), (AxisType.Auto,), devices=jax.devices()[:replicas])
    step = request_step(terms, optax.adam(0.1), over=gc.jax_axis("data"), **settings)
    return Service(step, lambda arrays: jax.device_put(arrays, NamedSharding(mesh, P())))


def services(order: Order) -> list[Service]:
    """Services that can take over from each other: only with exact sums may the number of replicas differ."""
    return [service(order), service(order, 2)] if order == "sequential" else [service(order)]


def microbatch(slot: str, window: int, number: int) -> np.ndarray:
    """The rows of a microbatch, determined by the arguments."""
    rng = np.random.default_rng([SLOTS.index(slot), window, number])
    return rng.integers(-8, 9, (ROWS, 3)).astype(np.float32) * np.float32(2.0 ** rng.integers(-12, 13))


def initial_state(at: Service) -> Any:
    return at.step.init({slot: at.place({"w": np.full(3, i, np.float32)}) for i, slot in enumerate(SLOTS)})


def migrated(state: Any, old: Service, new: Service, slots: Iterable[str]) -> Any:
    """Moves slots to another service: parameters and optimizer state as from a checkpoint, windows by state files."""
    with tempfile.TemporaryDirectory() as folder:
        for slot in slots:
            params, opt_state = new.place(jax.tree.map(np.asarray, state[slot][:2]))
            restored = {slot: Slot(params, opt_state, state[slot].window)}
            if state[slot].held:
                old.step.save(path := Path(folder, f"{slot}.npz"), state, slot)
                restored = new.step.load(path, restored, slot, microbatch(slot, 0, 0))
            state = {**state, **restored}
    return state


def in_order(at: Service, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after every microbatch once, in order."""
    state, step = initial_state(at), at.step
    for slot in SLOTS:
        for window in range(WINDOWS):
            for n in range(sizes[slot, window]):
                state = step.forward_backward(state, microbatch(slot, window, n), slot=slot, number=n)
            state, _ = step.optim_step(state, slot)
    return state


def history(among: Sequence[Service], r: Random, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after a random history of requests, retries and restarts."""
    at, state = among[0], initial_state(among[0])
    while any(state[slot].window < WINDOWS for slot in SLOTS):
        slot = r.choice([s for s in SLOTS if state[s].window < WINDOWS])
        step, window, action = at.step, state[slot].window, r.random()
        size = sizes[slot, window]
        if action < 0.05:  # the window is cancelled and sent again
            state = step.discard(state, slot, window=window)
            state = step.discard(state, slot, window=window - 1) if window else state  # late: no effect
        elif action < 0.1 and state[slot].held:  # the service restarts
            state = migrated(state, at, at, [slot])
        elif action < 0.11:  # another service takes over, maybe with another number of replicas
            other = r.choice(among)
            at, state = other, migrated(state, at, other, SLOTS)
        elif action < 0.2 and window > 0:  # a late microbatch of a window that has ended
            n = r.randrange(sizes[slot, window - 1])
            late = microbatch(slot, window - 1, n)
            state = step.forward_backward(state, late, slot=slot, number=n, window=window - 1)
        elif action < 0.25:  # a repeated request to end a window that has ended
            state, metrics = step.optim_step(state, slot, window=window - 1) if window else (state, None)
            assert metrics is None or not metrics.applied
        elif len(state[slot].held) == size and r.random() < 0.5:
            state, _ = step.optim_step(state, slot, window=window)
        else:  # one or several microbatches, some of them repeated
            numbers = r.sample(range(size), r.randint(1, min(3, size)))
            batch = np.concatenate([microbatch(slot, window, n) for n in numbers])
            state = step.forward_backward(state, batch, slot=slot, number=numbers, window=window)
    return state


def differences(among: Sequence[Service], seed: str) -> list[str]:
    """The slots whose final bits differ from those of every microbatch once, in order."""
    r = Random(seed)
    sizes = {(slot, window): r.randint(1, MOST) for slot in SLOTS for window in range(WINDOWS)}
    expected, received = in_order(among[0], sizes), history(among, r, sizes)
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), expected, received)
    return [slot for slot in SLOTS if not all(jax.tree.leaves([same[slot].params, same[slot].opt_state]))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for order in PRECISION:
        among = services(order)
        for i in range(options.histories):
            if wrong := differences(among, f"{options.seed}:{i}"):
                failed += 1
                print(f"order {order}, history {i}: different bits in {', '.join(wrong)}")
        print(f"order {order}, precision {PRECISION[order]}: {options.histories:,} histories", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
