"""Memory traffic and exchanges of requests on H100s and TPUs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, request_step
from tests.targets.compile_for import compile_for, h100, mesh, spread, tpu

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]

LEAVES, SHAPE = 3, (8192, 1024)
N = LEAVES * SHAPE[0] * SHAPE[1]
PARAMS = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(LEAVES)}
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def given(params: Any, grads: Any) -> Any:
    return jnp.float32(0), grads


def test_a_microbatch_is_one_addition_in_place() -> None:
    adam = optax.adam(1e-3)
    step = request_step(Loss(given, differentiate=False), adam, microbatches=64, weight=lambda grads: 1).programs
    node = jax.eval_shape(step.begin.__wrapped__, PARAMS, INDEX, INDEX, [PARAMS], {})
    args = node, PARAMS, INDEX, INDEX, [PARAMS], {}
    more = compile_for(h100(), step.more.__wrapped__, *args, donate=(0,))
    end = compile_for(
        h100(), step.end.__wrapped__, PARAMS, jax.eval_shape(adam.init, PARAMS), node, INDEX, donate=(0, 1, 2)
    )
    assert [round(x.program.bytes_moved(True) / N, 1) for x in (more, end)] == [12, 28]
    assert [round(x.temporary / N, 1) for x in (more, end)] == [0, 0]
    assert [x.program.copies() for x in (more, end)] == [0, 0]


def loss(params: Any, x: Any) -> Any:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("machine", ["h100", "tpu"])
def test_replicas_exchange_in_optim_step_alone(machine: str, kind: AxisType) -> None:
    on = mesh(h100(8) if machine == "h100" else tpu("v5e:2x4"), kind=kind)
    step = request_step(loss, optax.sgd(0.1), microbatches=64, over=gc.jax_axis("data")).programs
    params = spread(on, P(), {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(2)})
    batch, index = spread(on, P("data"), jax.ShapeDtypeStruct((512, 256), jnp.float32)), spread(on, P(), INDEX)
    with jax.set_mesh(on):
        begun = jax.jit(step.begin.__wrapped__).lower(params, index, index, [batch], {})
    node = spread(on, P("data"), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), begun.out_info))
    args = node, params, index, index, [batch], {}
    devices = on.devices.flat
    more = compile_for(devices, step.more.__wrapped__, *args, donate=(0,)).program.collectives()
    opt_state = jax.eval_shape(optax.sgd(0.1).init, params)
    end = compile_for(
        devices, step.end.__wrapped__, params, opt_state, node, index, donate=(0, 1, 2)
    ).program.collectives()
    assert more == ({}, {})
    assert end[0] == {} and set(end[1]) == {"all-reduce"}
    np.testing.assert_equal(sum(end[1].values()), 1)
