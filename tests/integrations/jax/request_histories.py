"""Random histories of requests: ``python -m tests.integrations.jax.request_histories --histories 1000 --seed 1``.

Several clients send microbatches of three slots: again, in another order, several at once or what was one request in
two, late, and to slots that are discarded, saved and loaded in between, in precision "exact" also by a service of
another number of replicas. Each slot must end with the bits of one that got every microbatch once, in turn.
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
    """Of which a microbatch's gradient is an exact sum over its rows, however they are divided."""
    return LossOutput({"fit": losses.token_mean(x @ params["w"], x[:, 0] > 0)})


class Service(NamedTuple):
    """A process that serves requests.

    Attributes:
      step: its engine.
      place: puts arrays on its devices.
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
    """That take over from each other: the bits of sums that are not exact depend on the number of replicas."""
    return [service(order), service(order, 2)] if order == "sequential" else [service(order)]


def microbatch(slot: str, window: int, number: int) -> np.ndarray:
    """Always the same, wherever it comes from."""
    rng = np.random.default_rng([SLOTS.index(slot), window, number])
    return rng.integers(-8, 9, (ROWS, 3)).astype(np.float32) * np.float32(2.0 ** rng.integers(-12, 13))


def began(at: Service) -> Any:
    return at.step.init({slot: at.place({"w": np.full(3, i, np.float32)}) for i, slot in enumerate(SLOTS)})


def taken_over(state: Any, old: Service, new: Service, slots: Iterable[str]) -> Any:
    """The slots in another service: parameters and optimizer's state from a checkpoint, windows from state files."""
    with tempfile.TemporaryDirectory() as folder:
        for slot in slots:
            params, opt_state = new.place(jax.tree.map(np.asarray, state[slot][:2]))
            restored = {slot: Slot(params, opt_state, state[slot].window)}
            if state[slot].held:
                old.step.save(path := Path(folder, f"{slot}.npz"), state, slot)
                restored = new.step.load(path, restored, slot, microbatch(slot, 0, 0))
            state = {**state, **restored}
    return state


def in_turn(at: Service, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after every microbatch once, in turn."""
    state, step = began(at), at.step
    for slot in SLOTS:
        for window in range(WINDOWS):
            for n in range(sizes[slot, window]):
                state = step.forward_backward(state, microbatch(slot, window, n), slot=slot, number=n)
            state, _ = step.optim_step(state, slot)
    return state


def history(among: Sequence[Service], r: Random, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after requests as clients, the network and restarts make them."""
    at, state = among[0], began(among[0])
    while any(state[slot].window < WINDOWS for slot in SLOTS):
        slot = r.choice([s for s in SLOTS if state[s].window < WINDOWS])
        step, window, action = at.step, state[slot].window, r.random()
        size = sizes[slot, window]
        if action < 0.05:  # cancelled: all of it is sent again
            state = step.discard(state, slot, window=window)
            state = step.discard(state, slot, window=window - 1) if window else state  # late, changes nothing
        elif action < 0.1 and state[slot].held:  # the service restarts
            state = taken_over(state, at, at, [slot])
        elif action < 0.11:  # a service of another number of replicas goes on
            other = r.choice(among)
            at, state = other, taken_over(state, at, other, SLOTS)
        elif action < 0.2 and window > 0:  # late, for a window that has ended
            n = r.randrange(sizes[slot, window - 1])
            late = microbatch(slot, window - 1, n)
            state = step.forward_backward(state, late, slot=slot, number=n, window=window - 1)
        elif action < 0.25:  # a request to end a window that has ended, sent again
            state, metrics = step.optim_step(state, slot, window=window - 1) if window else (state, None)
            assert metrics is None or not metrics.applied
        elif len(state[slot].held) == size and r.random() < 0.5:
            state, _ = step.optim_step(state, slot, window=window)
        else:  # one microbatch or several at once, some of them again
            numbers = r.sample(range(size), r.randint(1, min(3, size)))
            batch = np.concatenate([microbatch(slot, window, n) for n in numbers])
            state = step.forward_backward(state, batch, slot=slot, number=numbers, window=window)
    return state


def differences(among: Sequence[Service], seed: str) -> list[str]:
    """The slots that end with other bits than those of every microbatch once, in turn."""
    r = Random(seed)
    sizes = {(slot, window): r.randint(1, MOST) for slot in SLOTS for window in range(WINDOWS)}
    expected, received = in_turn(among[0], sizes), history(among, r, sizes)
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
                print(f"order {order}, history {i}: other bits in {', '.join(wrong)}")
        print(f"order {order}, precision {PRECISION[order]}: {options.histories:,} histories", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
