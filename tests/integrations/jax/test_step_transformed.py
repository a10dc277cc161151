"""Training steps called inside other JAX transformations."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradcombine.integrations.jax import train_step
from tests.spec.selection import cases


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


QUICK = [("every", name) for name in ("vmap", "grad", "scan", "jit of shard_map")]


@pytest.mark.sampled
@pytest.mark.parametrize(("form", "name"), [*cases(QUICK, ("every",), INSIDE), ("microbatches", "jit")])
def test_it_runs_and_takes_no_buffers_over(form: str, name: str) -> None:
    step = train_step(loss, optax.sgd(1.0), **{form: 1})
    params = {"w": jnp.float32(8)}
    state = step.init(params)
    batch = jnp.float32([1, 5])
    inside: Callable[..., Any] = INSIDE[name]
    w = inside(lambda params, state, x: step(params, state, x)[0]["w"], params, state, batch)
    assert np.ravel(w).tolist() == [8 - 3]
    # Buffers are donated at the outermost level only.
    assert not any(x.is_deleted() for x in jax.tree.leaves((params, state, batch)))
    step(params, state, batch)
    assert params["w"].is_deleted()


@pytest.mark.full
def test_a_step_differentiates() -> None:
    """With respect to its arguments and to values that its loss closes over."""

    def after(rate: Any, w: Any) -> Any:
        step = train_step(lambda w, x: rate * jnp.mean(w * w * x), optax.sgd(1.0), every=1)
        return step(w, step.init(w), jnp.float32([1, 3]))[0]

    # after = w - 2 * rate * w * mean(x), with mean(x) = 2
    assert [x.item() for x in jax.grad(after, argnums=(0, 1))(jnp.float32(0.5), jnp.float32(8))] == [-32, -1]


@pytest.mark.full
def test_derivatives_by_what_the_optimizer_closes_over() -> None:
    """In forward and reverse mode, to second order, and through a partial window."""

    def after(rate: Any, w: Any) -> Any:
        step = train_step(lambda w, x: jnp.mean(w * w * x), optax.sgd(rate), every=2)
        state = step.init(w)
        for x in (1, 3, 5):
            w, state, _ = step(w, state, jnp.float32([x]))
        return w

    # after = w - 2 * rate * w * 2
    at = (jnp.float32(0.5), jnp.float32(8))
    assert [x.item() for x in jax.grad(after, argnums=(0, 1))(*at)] == [-32, -1]
    assert [x.item() for x in jax.jacfwd(after, argnums=(0, 1))(*at)] == [-32, -1]
    assert jax.jit(jax.grad(jax.grad(after), argnums=1))(*at).item() == -4


class Odd(NamedTuple):
    key: Any
    count: Any
    flag: Any


@pytest.mark.full
def test_any_state_of_an_optimizer_and_windows_that_end_apart_in_one_vmap() -> None:
    def update(updates: Any, state: Odd, params: Any = None) -> Any:
        return updates, Odd(jax.random.split(state.key)[0], state.count + 1, ~state.flag)

    optimizer = optax.GradientTransformation(lambda _: Odd(jax.random.key(0), jnp.int32(0), jnp.asarray(False)), update)
    step = train_step(loss, optimizer, every=2)

    def after(number: Any, x: Any) -> Any:
        params = {"w": jnp.float32(8)}
        state = step.init(params)
        state = state._replace(window=state.window._replace(step=number))
        params, state, metrics = step(params, state, x)
        key = jax.random.key_data(state.opt_state.key)
        return params["w"], state.opt_state.count, state.opt_state.flag, key, metrics.applied

    w, count, flag, key, applied = jax.vmap(after, in_axes=(0, None))(jnp.int32([0, 1]), jnp.float32([3]))
    before = jax.random.key_data(jax.random.key(0))
    assert (w.tolist(), count.tolist()) == ([8, 8 + 3], [0, 1])
    assert flag.tolist() == applied.tolist() == [False, True]
    assert [(row == before).all().item() for row in key] == [True, False]


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
