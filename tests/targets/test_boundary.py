"""What a window of 8 with Adam moves on one H100, in bytes a parameter and call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import train_step, value_and_grad
from gradcombine.integrations.optax import MultiSteps, accumulate
from tests.targets.compile_for import compile_for, h100, mesh, spread, tpu

pytestmark = pytest.mark.targets

ADAM = optax.adam(1e-3)
LEAVES, SHAPE = 8, (2048, 512)
N = LEAVES * SHAPE[0] * SHAPE[1]
"""Small enough to compile fast; the bytes a parameter do not depend on it."""

PARAMS = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(LEAVES)}


class Form(NamedTuple):
    function: Callable[..., Any]
    init: Callable[[Any], Any]


def transformed(tx: Any) -> Form:
    def call(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Form(call, tx.init)


def stepped() -> Form:
    def given(params: Any, grads: Any) -> Any:
        return jnp.float32(0), grads

    step = train_step(given, ADAM, every=8, weight=lambda grads: 1, differentiate=False)
    return Form(step.function, step.init)


FORMS: dict[str, tuple[Callable[[], Form], float, float]] = {
    "optax.MultiSteps": (lambda: transformed(optax.MultiSteps(ADAM, 8)), 36, 36),
    "accumulate": (lambda: transformed(accumulate(ADAM, 8)), 36, 36),
    "MultiSteps": (lambda: transformed(MultiSteps(ADAM, 8)), 36, 36),
    "train_step": (stepped, 36, 36),
}
"""With the bytes of a call within a window, and of the one at its end."""


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


def per_parameter(count: int) -> float:
    return round(count / N, 1)


@pytest.mark.parametrize("name", FORMS)
def test_bytes_of_a_call(name: str) -> None:
    make, within, end = FORMS[name]
    form = make()
    compiled = compile_for(h100(), form.function, PARAMS, jax.eval_shape(form.init, PARAMS), PARAMS, donate=(0, 1))
    moved = [per_parameter(compiled.program.bytes_moved(due)) for due in (False, True)]
    assert moved == [within, end]
    assert per_parameter(compiled.temporary) == 0
    assert compiled.program.copies() == 0


def test_the_limit() -> None:
    """One addition in place; at the end Adam in place as well."""

    def add(window: Any, grads: Any) -> Any:
        return jax.tree.map(jnp.add, window, grads)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = ADAM.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    added = compile_for(h100(), add, PARAMS, PARAMS, donate=(0,))
    updated = compile_for(h100(), update, PARAMS, jax.eval_shape(ADAM.init, PARAMS), PARAMS, donate=(0, 1))
    within, end = (per_parameter(x.program.bytes_moved(True)) for x in (added, updated))
    assert [within, within + end] == [12, 40]
    assert [per_parameter(x.temporary) for x in (added, updated)] == [0, 0]


def test_a_boundary_that_is_a_loop_is_at_the_limit() -> None:
    """A loop that turns once or not at all copies nothing, where a conditional becomes selects of both branches."""

    def call(params: Any, state: Any, window: Any, step: Any, grads: Any) -> Any:
        window = jax.tree.map(lambda w, g: jnp.where(step % 8 == 0, 0, w) + g, window, grads)

        def body(carried: Any) -> Any:
            _, params, state = carried
            updates, state = ADAM.update(jax.tree.map(lambda w: w / 8, window), state, params)
            return jnp.asarray(False), optax.apply_updates(params, updates), state

        _, params, state = jax.lax.while_loop(lambda c: c[0], body, (step % 8 == 7, params, state))
        return params, state, window, step + 1

    state = jax.eval_shape(ADAM.init, PARAMS)
    args = (PARAMS, state, PARAMS, jax.ShapeDtypeStruct((), jnp.int32), PARAMS)
    compiled = compile_for(h100(), call, *args, donate=(0, 1, 2, 3))
    assert [per_parameter(compiled.program.bytes_moved(due)) for due in (False, True)] == [12, 40]
    assert (per_parameter(compiled.temporary), compiled.program.copies()) == (0, 0)
    assert per_parameter(compile_for(tpu("v5e:2x2"), call, *args, donate=(0, 1, 2, 3)).temporary) == 0


@pytest.mark.parametrize("kind", ["h100", "tpu"])
def test_replicas_exchange_once_a_window_outside_of_the_loop(kind: str) -> None:
    def loss(params: Any, x: Any) -> Any:
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    devices = mesh(h100(8) if kind == "h100" else tpu("v5e:2x4"))
    params = spread(devices, P(), {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(2)})
    batch = spread(devices, P("data"), jax.ShapeDtypeStruct((512, 256), jnp.float32))
    gradient = value_and_grad(loss, 8, over=gc.jax_axis("data"))
    mapped = jax.shard_map(gradient, mesh=devices, in_specs=(P(), P("data")), out_specs=P())
    inside, outside = compile_for(devices.devices.flat, mapped, params, batch).program.collectives()
    assert (inside, outside) == ({}, {"all-reduce": 1})
