"""Three adapters of one frozen model, trained by requests that are lost, resent and reordered.

A service receives gradients and updates as separate requests. Its client numbers the microbatches of each window, and
resends requests that were not confirmed in time, even if they had arrived. Every adapter ends with the same bits as in
a loop over the microbatches in order.
"""

from __future__ import annotations

from collections import deque
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import reductions
from gradcombine.integrations.jax import LossOutput, request_step

ADAPTERS = ["french", "code", "poems"]
WINDOWS, MICROBATCHES, WIDTH, RANK = 3, 8, 16, 2


def loss(adapter, tokens, base):
    """The mean over unpadded tokens. The trained adapter is a matrix of rank 2."""
    x = jax.nn.one_hot(tokens, WIDTH, dtype=jnp.float32)
    logits = x[:, :-1] @ (base + adapter["a"] @ adapter["b"])
    mask = tokens[:, 1:] > 0
    values = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return LossOutput(jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(mask), weight=jnp.sum(mask))


def microbatch(adapter, window, number):
    """Four rows of different lengths, padded with 0."""
    rng = np.random.default_rng([ADAPTERS.index(adapter), window, number])
    rows = rng.integers(1, WIDTH, (4, 12))
    return np.where(np.arange(12) < rng.integers(3, 12, (4, 1)), rows, 0)


def client(adapter, window, r):
    """The requests of one window in the order in which they reach the service."""
    numbers = [*range(MICROBATCHES), *r.sample(range(MICROBATCHES), 3)]  # three are resent
    r.shuffle(numbers)
    return deque([*(("forward_backward", n) for n in numbers), ("optim_step", None), ("optim_step", None)])


def main():
    # quickstart: begin
    step = request_step(
        loss,
        optax.adam(0.05),
        microbatches=MICROBATCHES,
        reduction=reductions.mean("exact"),  # the same bits in any order
    )
    rng = np.random.default_rng(0)
    base = jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32)
    initial = {"a": rng.normal(size=(WIDTH, RANK)).astype(np.float32), "b": np.zeros((RANK, WIDTH), np.float32)}
    state = step.init(dict.fromkeys(ADAPTERS, initial))

    def serve(state, adapter, window, kind, number):
        if kind == "optim_step":
            return step.optim_step(state, slot=adapter, window=window)[0]
        tokens = microbatch(adapter, window, number)
        return step.forward_backward(state, tokens, slot=adapter, number=number, window=window, base=base)

    # quickstart: end
    r, served = Random(0), 0
    for window in range(WINDOWS):
        queues = {adapter: client(adapter, window, r) for adapter in ADAPTERS}
        while waiting := [adapter for adapter, queue in queues.items() if queue]:
            adapter = r.choice(waiting)
            state = serve(state, adapter, window, *queues[adapter].popleft())
            served += 1

    expected = step.init(dict.fromkeys(ADAPTERS, initial))
    for adapter in ADAPTERS:
        for window in range(WINDOWS):
            for number in range(MICROBATCHES):
                expected = serve(expected, adapter, window, "forward_backward", number)
            expected = serve(expected, adapter, window, "optim_step", None)

    needed = len(ADAPTERS) * WINDOWS * (MICROBATCHES + 1)
    print(f"{served} requests, of which {needed} were needed")
    for adapter in ADAPTERS:
        params = state[adapter].params
        same = all(np.array_equal(params[name], expected[adapter].params[name]) for name in initial)
        print(f"{adapter}: {state[adapter].window} updates, {'same' if same else 'OTHER'} bits as in order")


if __name__ == "__main__":
    main()
