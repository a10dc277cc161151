"""Microbatched gradients on replicas with different data, under each of JAX's mapping transformations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from tests.integrations.jax.replicas import (
    AXIS,
    MODES,
    ORDERS,
    N,
    collectives,
    mesh,
    on_mesh,
    token_mean,
)
from tests.spec.selection import cases

X = np.float32([[1, 5, 9, -4, 2], [3, -7, 2, 8, 0], [6, 4, 4, 2, 1], [-1, 3, 8, 16, 5]])
TOKENS = np.float32([[1, 3, 2, 2, 1], [4, 0, 1, 3, 0], [2, 1, 4, 1, 1], [2, 3, 0, 0, 1]])
"""One row of five examples per replica: microbatches of two, two and one. 32 tokens make the mean exact."""

MEAN = token_mean(values=X, tokens=TOKENS)


def loss(w: Any, x: Any, tokens: Any) -> Any:
    """The mean over tokens of w times each token's x; examples of a microbatch without tokens are masked."""
    count = jnp.sum(tokens)
    aux = {"mean": jnp.sum(x * tokens) / count, "tokens": count.astype(jnp.int32), "largest": jnp.max(x)}
    return LossOutput(jnp.sum(w["w"] * x * tokens) / count, count, aux)


AUX = {"mean": reductions.mean(), "tokens": reductions.sum(), "largest": reductions.max()}


W = {"w": jnp.float32(2), "frozen": None}


@pytest.mark.full
@MODES
@ORDERS
def test_the_mean_is_over_all_tokens_of_all_replicas(mode: Callable[..., Any], order: Any) -> None:
    gradient = value_and_grad(Loss(loss, aux_reduction=AUX), 3, over=AXIS, order=order)
    output, grads = mode(partial(gradient, W), X, TOKENS)
    np.testing.assert_array_equal(grads["w"], [MEAN] * N)
    np.testing.assert_array_equal(output.value, [2 * MEAN] * N)
    np.testing.assert_array_equal(output.weight, [32] * N)
    np.testing.assert_array_equal(output.aux["mean"], [MEAN] * N)
    np.testing.assert_array_equal(output.aux["tokens"], [32] * N)
    # The 16 is in a microbatch without tokens.
    np.testing.assert_array_equal(output.aux["largest"], [9] * N)


def plain(w: Any, x: Any, tokens: Any) -> Any:
    return jnp.mean(w["w"] * x)


@pytest.mark.parametrize(
    ("check_vma", "given", "microbatches"),
    cases([(True, loss, 5), (False, loss, 1), (True, plain, 1)], (True, False), (plain, loss), (1, 5)),
)
def test_a_window_is_one_all_reduce(check_vma: bool, given: Callable[..., Any], microbatches: int) -> None:
    additive = AUX | {"largest": reductions.sum()}
    program = value_and_grad(Loss(given, aux_reduction=additive), microbatches, over=AXIS)
    compiled = jax.jit(on_mesh(partial(program, W), check_vma)).lower(X, TOKENS).compile()
    assert (collectives(compiled), collectives(compiled, looped=True)) == (["all-reduce"], [])


@MODES
def test_the_keys_are_those_of_one_replica_with_all_microbatches(mode: Callable[..., Any]) -> None:
    key = jax.random.key(7)

    def drawing(w: Any, key: Any, x: Any) -> Any:
        noise = jax.random.bits(key, (), np.uint32) % 1024
        return w["w"] * noise.astype(jnp.float32) + 0 * x[0]

    def program(w: Any, x: Any, _: Any) -> Any:
        return value_and_grad(Loss(drawing, rng_argnum=1), 4, over=AXIS)(w, key, x[:4])[1]["w"]

    drawn = [int(jax.random.bits(jax.random.fold_in(key, i), (), np.uint32)) % 1024 for i in range(4 * N)]
    assert len(set(drawn)) > N
    np.testing.assert_array_equal(mode(partial(program, W), X, TOKENS), [sum(drawn) / 16] * N)


@MODES
def test_the_carry_is_each_replicas_own(mode: Callable[..., Any]) -> None:
    def counting(w: Any, seen: Any, x: Any) -> Any:
        return LossOutput(jnp.mean(w["w"] * x), carry=seen + jnp.sum(x))

    def program(w: Any, x: Any, _: Any) -> Any:
        output, _ = value_and_grad(Loss(counting, carry_argnum=1), 3, over=AXIS)(w, jnp.float32(0), x)
        return gc.all_reduce(reductions.max(), output.carry, over=AXIS)

    np.testing.assert_array_equal(mode(partial(program, W), X, TOKENS), [X.sum(axis=1).max()] * N)


def test_on_a_mesh_a_carry_without_replicas_is_refused_by_name() -> None:
    def loss(w: Any, seen: Any, x: Any) -> LossOutput:
        return LossOutput(jnp.mean(w * x), carry={"sum": seen["sum"] + jnp.sum(x)})

    function = value_and_grad(Loss(loss, carry_argnum=1), 1, over=AXIS)
    with (
        jax.set_mesh(mesh()),
        pytest.raises(gc.GradCombineError, match=r"leaf \.carry\['sum'\]: expected a leading axis of \d replicas"),
    ):
        function(jnp.float32(1), {"sum": jnp.float32(0)}, jnp.ones(24))


def test_other_mesh_axes_are_left_alone() -> None:
    devices = jax.make_mesh((2, 2), ("d", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def program(w: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w, x: jnp.mean(w[0] * x) + w[0] * 0, 2, over=AXIS)(w, x)
        return jax.lax.pmax(value, "model"), grads

    mapped = jax.shard_map(program, mesh=devices, in_specs=(P("model"), P("d")), out_specs=(P(), P("model")))
    value, grads = jax.jit(mapped)(jnp.float32([1, 3]), X[0, :4])
    assert (float(value), grads.tolist()) == (3 * 2.75, [2.75, 2.75])


def test_a_batch_that_jit_has_sharded_stays_where_it_is() -> None:
    sharding = NamedSharding(mesh(), P("d"))
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(16, 1), sharding)
    f = value_and_grad(lambda w, x: jnp.mean(w["w"] * x), 4, interleaved=True)
    compiled = jax.jit(f).lower(W, x).compile()
    assert set(collectives(compiled)) <= {"all-reduce", "reduce-scatter"}
    assert float(compiled(W, x)[1]["w"]) == 7.5


def test_an_unbound_axis_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="an axis that the surrounding pmap, vmap or shard_map binds"):
        value_and_grad(plain, 2, over=AXIS)(W, X[0], TOKENS[0])
