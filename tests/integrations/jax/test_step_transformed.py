"""A step that is called inside of another transformation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradcombine.integrations.jax import train_step

pytestmark = pytest.mark.needs("jax")


def loss(params: Any, x: Any) -> Any:
    """The gradient is the mean of x over examples."""
    return params["w"] * jnp.mean(x)


MESH = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
mapped = partial(jax.shard_map, mesh=MESH, in_specs=P(), out_specs=P())

INSIDE = {
    "jit": lambda call, *args: jax.jit(call)(*args),
    "jit of nothing": lambda call, *args: jax.jit(lambda: call(*args))(),
    "scan": lambda call, *args: jax.lax.scan(lambda _, x: (_, call(*args[:2], x)), None, args[2][None])[1],
    "vmap": lambda call, *args: jax.vmap(call, in_axes=(None, None, 0))(*args[:2], args[2][None]),
    "vmap of nothing": lambda call, *args: jax.vmap(lambda _: call(*args))(jnp.zeros(1)),
    "grad": lambda call, *args: jax.grad(lambda x: (call(*args[:2], x),) * 2, has_aux=True)(args[2])[1],
    "grad of jit": lambda call, *args: jax.grad(lambda x: (jax.jit(call)(*args[:2], x),) * 2, has_aux=True)(args[2])[1],
    "cond": lambda call, *args: jax.lax.cond(True, call, lambda *_: jnp.float32(0), *args),
    "checkpoint": lambda call, *args: jax.checkpoint(call)(*args),
    "pmap": lambda call, *args: jax.pmap(call, in_axes=(None, None, 0))(*args[:2], args[2][None]),
    "jit of shard_map": lambda call, *args: jax.jit(mapped(call))(*args),
}


@pytest.mark.parametrize(("name", "form"), [*((name, "every") for name in INSIDE), ("jit", "microbatches")])
def test_it_runs_and_takes_no_buffers_over(name: str, form: str) -> None:
    step = train_step(loss, optax.sgd(1.0), **{form: 1})
    params = {"w": jnp.float32(8)}
    state = step.init(params)
    batch = jnp.float32([1, 5])
    inside: Callable[..., Any] = INSIDE[name]
    w = inside(lambda params, state, x: step(params, state, x)[0]["w"], params, state, batch)
    assert np.ravel(w).tolist() == [8 - 3]
    # Donated at the outermost level alone.
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state, batch)))
    step(params, state, batch)
    assert params["w"].is_deleted()


def test_a_step_differentiates() -> None:
    """By what it is given, and by what its loss closes over."""

    def after(rate: Any, w: Any) -> Any:
        step = train_step(lambda w, x: rate * jnp.mean(w * w * x), optax.sgd(1.0), every=1)
        return step(w, step.init(w), jnp.float32([1, 3]))[0]

    # after = w - 2 * rate * w * mean(x), with mean(x) = 2
    assert [x.item() for x in jax.grad(after, argnums=(0, 1))(jnp.float32(0.5), jnp.float32(8))] == [-32, -1]


def test_a_flush_inside_of_a_scan() -> None:
    step = train_step(loss, optax.sgd(1.0), every=4)

    def epoch(carry: Any, rows: Any) -> Any:
        params, state = carry
        for x in rows:
            params, state, _ = step(params, state, x)
        params, state, metrics = step.flush(params, state)
        return (params, state), (params["w"], metrics.applied)

    params = {"w": jnp.float32(8)}
    x = jnp.float32([[[1], [5]], [[2], [6]]])
    _, (history, applied) = jax.lax.scan(epoch, (params, step.init(params)), x)
    assert history.tolist() == [8 - 3, 8 - 3 - 4]
    assert applied.tolist() == [True, True]
