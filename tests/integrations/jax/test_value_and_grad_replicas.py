"""Microbatched gradients on replicas with different data, under each of JAX's mapping transformations."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("jax")

R = 4
AXIS = gc.jax_axis("d")
MESH = jax.make_mesh((R,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:R])

X = np.float32([[1, 5, 9, -4, 2], [3, -7, 2, 8, 0], [6, 4, 4, 2, 1], [-1, 3, 8, 16, 5]])
TOKENS = np.float32([[1, 3, 2, 2, 1], [4, 0, 1, 3, 0], [2, 1, 4, 1, 1], [2, 3, 0, 0, 1]])
"""One row of five examples per replica: microbatches of two, two and one. 32 tokens make the mean exact."""

MEAN = float(sum(Fraction(float(x)) * int(n) for x, n in zip(X.flat, TOKENS.flat, strict=True)) / int(TOKENS.sum()))


def loss(w: Any, x: Any, tokens: Any) -> Any:
    """The mean over tokens of w times each token's x; examples of a microbatch without tokens are masked."""
    count = jnp.sum(tokens)
    aux = {"mean": jnp.sum(x * tokens) / count, "tokens": count.astype(jnp.int32), "largest": jnp.max(x)}
    return LossOutput(jnp.sum(w["w"] * x * tokens) / count, count, aux)


AUX = {"mean": reductions.mean(), "tokens": reductions.sum(), "largest": reductions.max()}


def by_pmap(program: Callable[..., Any], *data: Any) -> Any:
    return jax.pmap(program, axis_name="d", in_axes=(None, 0, 0), devices=jax.devices()[:R])(*data)


def by_vmap(program: Callable[..., Any], *data: Any) -> Any:
    return jax.jit(jax.vmap(program, axis_name="d", in_axes=(None, 0, 0)))(*data)


def by_shard_map(check_vma: bool) -> Callable[..., Any]:
    def mapped(program: Callable[..., Any], *data: Any) -> Any:
        out = jax.jit(on_mesh(program, check_vma))(*data)
        return jax.tree.map(lambda x: jnp.stack([x] * R), out) if check_vma else out

    return mapped


def on_mesh(program: Callable[..., Any], check_vma: bool = True) -> Callable[..., Any]:
    def one(w: Any, *blocks: Any) -> Any:
        # With check_vma, out_specs P() proves that the results are equal on all replicas.
        out = program(w, *(block[0] for block in blocks))
        return out if check_vma else jax.tree.map(lambda x: x[None], out)

    specs = (P(), P("d"), P("d"))
    return jax.shard_map(one, mesh=MESH, in_specs=specs, out_specs=P() if check_vma else P("d"), check_vma=check_vma)


MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(by_pmap, id="pmap", marks=pytest.mark.full),
        pytest.param(by_vmap, id="vmap", marks=pytest.mark.full),
        pytest.param(by_shard_map(True), id="shard_map-check_vma"),
        pytest.param(by_shard_map(False), id="shard_map", marks=pytest.mark.full),
    ],
)
W = {"w": jnp.float32(2), "frozen": None}
COLLECTIVE = re.compile(r" (all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter)(?:-start)?\(")


@MODES
@pytest.mark.parametrize("order", [pytest.param("sequential", marks=pytest.mark.full), "tree"])
def test_the_mean_is_over_all_tokens_of_all_replicas(mode: Callable[..., Any], order: Any) -> None:
    output, grads = mode(value_and_grad(Loss(loss, aux_reduction=AUX), 3, over=AXIS, order=order), W, X, TOKENS)
    np.testing.assert_array_equal(grads["w"], [MEAN] * R)
    np.testing.assert_array_equal(output.value, [2 * MEAN] * R)
    np.testing.assert_array_equal(output.weight, [32] * R)
    np.testing.assert_array_equal(output.aux["mean"], [MEAN] * R)
    np.testing.assert_array_equal(output.aux["tokens"], [32] * R)
    # The 16 is in a microbatch without tokens.
    np.testing.assert_array_equal(output.aux["largest"], [9] * R)


def plain(w: Any, x: Any, tokens: Any) -> Any:
    return jnp.mean(w["w"] * x)


def collectives(program: Callable[..., Any], check_vma: bool) -> list[str]:
    text = jax.jit(on_mesh(program, check_vma)).lower(W, X, TOKENS).compile().as_text()
    # In the entry computation; in a loop body it would run for each microbatch.
    assert len(COLLECTIVE.findall(text)) == len(COLLECTIVE.findall(text[text.index("ENTRY") :]))
    return COLLECTIVE.findall(text)


@pytest.mark.parametrize(
    ("check_vma", "given", "microbatches"),
    cases([(True, loss, 5), (False, loss, 1), (True, plain, 1)], (True, False), (plain, loss), (1, 5)),
)
def test_a_window_is_one_all_reduce(check_vma: bool, given: Callable[..., Any], microbatches: int) -> None:
    additive = AUX | {"largest": reductions.sum()}
    program = value_and_grad(Loss(given, aux_reduction=additive), microbatches, over=AXIS)
    assert collectives(program, check_vma) == ["all-reduce"]


@MODES
def test_the_keys_are_those_of_one_replica_with_all_microbatches(mode: Callable[..., Any]) -> None:
    key = jax.random.key(7)

    def drawing(w: Any, key: Any, x: Any) -> Any:
        noise = jax.random.bits(key, (), np.uint32) % 1024
        return w["w"] * noise.astype(jnp.float32) + 0 * x[0]

    def program(w: Any, x: Any, _: Any) -> Any:
        return value_and_grad(Loss(drawing, rng_argnum=1), 4, over=AXIS)(w, key, x[:4])[1]["w"]

    drawn = [int(jax.random.bits(jax.random.fold_in(key, i), (), np.uint32)) % 1024 for i in range(4 * R)]
    assert len(set(drawn)) > R
    np.testing.assert_array_equal(mode(program, W, X, TOKENS), [sum(drawn) / 16] * R)


@MODES
def test_the_carry_is_each_replicas_own(mode: Callable[..., Any]) -> None:
    def counting(w: Any, seen: Any, x: Any) -> Any:
        return LossOutput(jnp.mean(w["w"] * x), carry=seen + jnp.sum(x))

    def program(w: Any, x: Any, _: Any) -> Any:
        output, _ = value_and_grad(Loss(counting, carry_argnum=1), 3, over=AXIS)(w, jnp.float32(0), x)
        return gc.all_reduce(reductions.max(), output.carry, over=AXIS)

    np.testing.assert_array_equal(mode(program, W, X, TOKENS), [X.sum(axis=1).max()] * R)


def test_other_mesh_axes_are_left_alone() -> None:
    mesh = jax.make_mesh((2, 2), ("d", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def program(w: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w, x: jnp.mean(w[0] * x) + w[0] * 0, 2, over=AXIS)(w, x)
        return jax.lax.pmax(value, "model"), grads

    mapped = jax.shard_map(program, mesh=mesh, in_specs=(P("model"), P("d")), out_specs=(P(), P("model")))
    value, grads = jax.jit(mapped)(jnp.float32([1, 3]), X[0, :4])
    assert (float(value), grads.tolist()) == (3 * 2.75, [2.75, 2.75])


def test_a_batch_that_jit_has_sharded_stays_where_it_is() -> None:
    sharding = jax.sharding.NamedSharding(MESH, P("d"))
    x = jax.device_put(np.arange(16, dtype=np.float32).reshape(16, 1), sharding)
    f = value_and_grad(lambda w, x: jnp.mean(w["w"] * x), 4, interleaved=True)
    compiled = jax.jit(f).lower(W, x).compile()
    assert not re.search(r"all-to-all|collective-permute|all-gather", compiled.as_text())
    assert float(compiled(W, x)[1]["w"]) == 7.5


def test_an_unbound_axis_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="an axis that the surrounding pmap, vmap or shard_map binds"):
        value_and_grad(plain, 2, over=AXIS)(W, X[0], TOKENS[0])
