"""JAX and optax windows over a wire format: each replica's sum is rounded once, its contributions never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import accumulate, all_reduce, map_replicas
from tests.integrations.jax.replicas import mesh

OVER, N, SHAPE = gc.jax_axis("data"), 2, (40, 50)
THROUGH = gc.reductions.mean(wire=gc.wires.cast("bfloat16"))
ROUNDED, EXACT = (256 + 1) / 2, (257 + 1) / 2
"""257 needs nine bits; bfloat16 has eight."""


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(x) * jnp.sum(w)


Step = tuple[Callable[..., Any], Callable[..., Any], int]
"""``init(w)``, ``step(w, state, x) -> w, state``, and the number of calls per window."""


def trained(reduction: gc.Reduction, calls: int, **length: int) -> Step:
    step = train_step(loss, optax.sgd(1.0), over=OVER, reduction=reduction, **length)
    return step.init, lambda w, state, x: step(w, state, x)[:2], calls


def of_optax(tx: Any, calls: int) -> Step:
    def one(w: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    return map_replicas(tx.init, OVER), map_replicas(one, OVER, batch_argnums=2), calls


WINDOWS: dict[str, Callable[[gc.Reduction], Step]] = {
    "train_step, microbatches": lambda reduction: trained(reduction, 1, microbatches=2),
    "train_step, every": lambda reduction: trained(reduction, 2, every=2),
    "accumulate": lambda reduction: of_optax(accumulate(optax.sgd(1.0), 2, over=OVER, reduction=reduction), 2),
    "all_reduce": lambda reduction: of_optax(optax.chain(all_reduce(reduction, over=OVER), optax.sgd(1.0)), 1),
}


@pytest.mark.full
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_rounded_once(name: str) -> None:
    on = mesh(N, "data")
    x = jax.device_put(np.repeat(np.float32([257, 1]), 4), NamedSharding(on, P("data")))
    for reduction, expected in ((THROUGH, ROUNDED), (gc.reductions.mean(), EXACT)):
        with jax.set_mesh(on):
            w = jax.device_put(jnp.zeros(SHAPE), NamedSharding(on, P()))
            init, step, calls = WINDOWS[name](reduction)
            state = init(w)
            for _ in range(calls):
                w, state = step(w, state, x)
        for replica in w.addressable_shards:
            np.testing.assert_array_equal(np.asarray(replica.data), np.full(SHAPE, -expected, np.float32))
