"""Steps with `accumulate` under plain jit on a mesh: replicas communicate only at the end of a window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.optax import accumulate, map_replicas, skip_not_finite
from tests.integrations.jax.replicas import collectives, grid, mesh

OVER = gc.jax_axis("data")
TX = accumulate(optax.sgd(1.0), every=2, over=OVER, skip=skip_not_finite())


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(x @ w)


def step(w: Any, state: Any, x: Any) -> Any:
    updates, state = TX.update(jax.grad(loss)(w, x), state, w, weight=x.shape[0])
    return optax.apply_updates(w, updates), state


@pytest.mark.full
@pytest.mark.parametrize("kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.full)])
def test_a_step_on_a_mesh(kind: AxisType) -> None:
    """Integer data makes all sums exact; a microbatch with an infinity is skipped on all replicas."""
    devices = grid(kind)

    def put(spec: P, value: Any) -> Any:
        return jax.device_put(value, NamedSharding(devices, spec))

    xs = np.random.default_rng(0).integers(-8, 9, (4, 16, 8)).astype(np.float32)
    xs[3, 5, 1] = np.inf
    w = put(P(None, "model"), np.zeros((8, 8), np.float32))
    state = map_replicas(TX.init, OVER)(w)
    mapped = jax.jit(map_replicas(step, OVER, batch_argnums=2), donate_argnums=(0, 1))
    for x in xs:
        w, state = mapped(w, state, put(P("data"), x))
    means = [xs[:2].mean((0, 1)), xs[2].mean(0)]
    np.testing.assert_array_equal(w, np.broadcast_to(-(means[0] + means[1])[:, None] / 8, (8, 8)))
    assert w.sharding.is_equivalent_to(NamedSharding(devices, P(None, "model")), 2)
    assert np.asarray(state.skip.detail["num_not_finite"]).tolist() == [0, 8, 0, 0]
    assert int(state.skip.skipped) == 1


def test_nothing_is_exchanged_within_a_window() -> None:
    devices = mesh(8, "data")
    tx = accumulate(optax.sgd(1.0), every=2, over=OVER)

    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    w = jax.device_put(np.zeros((8, 8), np.float32), NamedSharding(devices, P()))
    x = jax.device_put(np.zeros((16, 8), np.float32), NamedSharding(devices, P("data")))
    args = w, map_replicas(tx.init, OVER)(w), x
    compiled = jax.jit(map_replicas(step, OVER, batch_argnums=2)).lower(*args).compile()
    assert collectives(compiled) == collectives(compiled, looped=True) == ["all-reduce"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: map_replicas(3, OVER), "expected a function, received 3"),
        (lambda: map_replicas(step, "data"), "expected a collective"),
        (
            lambda: map_replicas(step, OVER, batch_argnums=3)(1, 2),
            r"expected positional arguments at \[3\], received 2",
        ),
        (lambda: map_replicas(jnp.sin, OVER)(jnp.float32(1)), "expected an axis that .* and no mesh"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=f"map_replicas: {message}"):
        call()
