"""Random histories of requests: ``python -m tests.integrations.jax.request_histories --histories 1000 --seed 1``.

Several clients send microbatches of three slots: again, in another order, several at once, late, and to slots that are
discarded, saved and loaded in between. Each slot must end with the bits of one that got every microbatch once, in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import reductions
from gradcombine.integrations.jax import LossOutput, RequestStep, request_step
from gradcombine.types import Order

SLOTS, WINDOWS, MOST, ROWS = ("a", "b", "c"), 2, 6, 4
PRECISION: dict[Order, Any] = {"sequential": "exact", "tree": "fast"}


def loss(params: Any, x: jax.Array) -> LossOutput:
    return LossOutput(jnp.mean(jnp.square(x @ params["w"] - 1)), weight=jnp.sum(x > 0))


def engine(order: Order) -> RequestStep:
    mean = reductions.mean(PRECISION[order])
    return request_step(loss, optax.adam(0.1), microbatches=MOST, reduction=mean, order=order)


def microbatch(slot: str, window: int, number: int) -> np.ndarray:
    """Always the same, wherever it comes from."""
    rng = np.random.default_rng([SLOTS.index(slot), window, number])
    return rng.normal(size=(ROWS, 3)).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 4))


def began(step: RequestStep) -> Any:
    return step.init({slot: {"w": np.full(3, i, np.float32)} for i, slot in enumerate(SLOTS)})


def in_turn(step: RequestStep, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after every microbatch once, in turn."""
    state = began(step)
    for slot in SLOTS:
        for window in range(WINDOWS):
            for n in range(sizes[slot, window]):
                state = step.forward_backward(state, microbatch(slot, window, n), slot=slot, number=n)
            state, _ = step.optim_step(state, slot)
    return state


def history(step: RequestStep, r: Random, sizes: dict[tuple[str, int], int]) -> Any:
    """The state after requests as clients, the network and restarts make them."""
    state = began(step)
    while any(state[slot].window < WINDOWS for slot in SLOTS):
        slot = r.choice([s for s in SLOTS if state[s].window < WINDOWS])
        window, action = state[slot].window, r.random()
        size = sizes[slot, window]
        if action < 0.05:  # cancelled: all of it is sent again
            state = step.discard(state, slot)
        elif action < 0.1 and state[slot].held:  # the service restarts
            with tempfile.TemporaryDirectory() as folder:
                step.save(path := Path(folder, "window.npz"), state, slot)
                state = step.load(path, step.discard(state, slot), slot)
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


def differences(step: RequestStep, seed: str) -> list[str]:
    """The slots that end with other bits than those of every microbatch once, in turn."""
    r = Random(seed)
    sizes = {(slot, window): r.randint(1, MOST) for slot in SLOTS for window in range(WINDOWS)}
    expected, received = in_turn(step, sizes), history(step, r, sizes)
    same = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), expected, received)
    return [slot for slot in SLOTS if not all(jax.tree.leaves([same[slot].params, same[slot].opt_state]))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for order in PRECISION:
        step = engine(order)
        for i in range(options.histories):
            if wrong := differences(step, f"{options.seed}:{i}"):
                failed += 1
                print(f"order {order}, history {i}: other bits in {', '.join(wrong)}")
        print(f"order {order}, precision {PRECISION[order]}: {options.histories:,} histories", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
