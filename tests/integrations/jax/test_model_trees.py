"""Pytrees of real flax and equinox models over lists, time, replicas, and in an optax chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.optax import accumulate
from tests.spec.selection import cases

X = jnp.ones((2, 3))
ACC = gc.accumulate(reductions.mean(), every=2)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.LayerNorm()(nn.Dense(4)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.second = nnx.Linear(4, 2, use_bias=False, rngs=rngs)


def linen() -> Any:
    return Linen().init(jax.random.key(0), X)["params"]


def nnx_state() -> Any:
    """An nnx.State whose leaves are wrapped in nnx.Param."""
    _, params, _ = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)
    return params


def equinox_module() -> Any:
    """A module with static fields (sizes, activations) and None for non-arrays and a missing bias."""
    model = eqx.nn.MLP(3, 2, 4, depth=1, use_final_bias=False, key=jax.random.key(0))
    return eqx.filter({"model": model, "step": jnp.int32(3)}, eqx.is_inexact_array)


def masked() -> Any:
    return {"trained": jnp.ones((2, 3)), "frozen": optax.MaskedNode(), "none": None}


TREES: dict[str, Callable[[], Any]] = {
    "linen": linen,
    "linen_frozen": lambda: freeze(linen()),
    "nnx_state": nnx_state,
    "nnx_pure": lambda: nnx.to_pure_dict(nnx_state()),
    "equinox": equinox_module,
    "masked": masked,
}


def filled(params: Any, value: float) -> Any:
    """Gradients: each leaf is filled with `value` times its one-based position in the tree."""
    leaves, structure = jax.tree.flatten(params)
    made = [jnp.asarray(np.full(x.shape, value * (i + 1), x.dtype)) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, made)


@jax.jit
def by_list(params: Any) -> Any:
    return gc.mean([filled(params, 1), filled(params, 5)], weights=[3, 1])


def by_time(params: Any) -> Any:
    update = jax.jit(ACC.update)
    state = update(filled(params, 1), jax.jit(ACC.init)(params), 3)
    return ACC.value(update(filled(params, 5), state, 1))


def by_time_from_specs(params: Any) -> Any:
    specs = jax.eval_shape(lambda: params)

    @jax.jit
    def run(first: Any, second: Any) -> Any:
        return ACC.value(ACC.update(second, ACC.update(first, ACC.init(specs), 3)))

    return run(filled(params, 1), filled(params, 5))


def by_scan(params: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        return ACC.update(jax.tree.map(lambda g: g * x[0], filled(params, 1)), state, x[1]), None

    return ACC.value(jax.lax.scan(step, ACC.init(params), (jnp.float32([1, 5]), jnp.float32([3, 1])))[0])


def by_replicas(params: Any) -> Any:
    def one(factor: Any, weight: Any) -> Any:
        grads = jax.tree.map(lambda g: g * factor, filled(params, 1))
        return gc.all_reduce(reductions.mean(), grads, over=gc.jax_axis("data"), weight=weight)

    out = jax.jit(jax.vmap(one, axis_name="data"))(jnp.float32([1, 5]), jnp.float32([3, 1]))
    return jax.tree.map(lambda x: x[1], out)


def by_optax(params: Any) -> Any:
    tx = accumulate(optax.sgd(1.0), every=2)
    update = jax.jit(tx.update)
    updates, state = update(filled(params, 1), tx.init(params), params, weight=3)
    assert all(not x.any() for x in jax.tree.leaves(updates))
    updates, _ = update(filled(params, 5), state, params, weight=1)
    moved = optax.apply_updates(jax.tree.map(jnp.zeros_like, params), updates)
    return jax.tree.map(lambda x: -x, moved)


WAYS = (by_list, by_time, by_time_from_specs, by_scan, by_replicas, by_optax)
QUICK_TREES = [
    *((by_list, name) for name in ("linen", "nnx_state", "masked")),
    *((way, "equinox") for way in (by_list, by_time, by_scan, by_replicas, by_optax)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("way", "tree"), cases(QUICK_TREES, WAYS, TREES))
def test_the_mean_has_the_structure_and_the_values(way: Callable[[Any], Any], tree: str) -> None:
    params = TREES[tree]()
    result = way(params)
    assert jax.tree.leaves(result)
    chex.assert_trees_all_equal(result, filled(params, 2), strict=True)


def test_the_gradient_of_an_nnx_model() -> None:
    """All numbers are small integers, so the gradient over all examples is exact."""
    definition, params, others = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)
    params = filled(params, 1)

    def loss(params: Any, x: Any) -> Any:
        model = nnx.merge(definition, params, others)
        return model.second(model.first(x)).sum()

    update = jax.jit(lambda params, state, x: ACC.update(jax.grad(loss)(params, x), state))
    state = update(params, update(params, ACC.init(params), X), 3 * X)
    expected = jax.jit(jax.grad(loss))(params, 2 * X)
    assert jax.tree.leaves(expected)[0].any()
    chex.assert_trees_all_equal(ACC.value(state), expected)


def test_two_states_of_different_variables_do_not_match() -> None:
    """The type of a variable is part of the tree structure."""

    class Frozen(nnx.Param):
        pass

    with pytest.raises(gc.GradCombineError, match=r"add_n: leaf \['w'\]"):
        gc.add_n([nnx.State({"w": nnx.Param(jnp.ones(2))}), nnx.State({"w": Frozen(jnp.ones(2))})])


WITH_KEY = {"w": jnp.ones(3), "key": jax.random.key(0), "keys": jax.random.split(jax.random.key(1), 2)}


def grads_beside_keys() -> Any:
    return jax.grad(lambda p: p["w"].sum() * 2, allow_int=True)(WITH_KEY)


@pytest.mark.parametrize("like", [WITH_KEY, jax.eval_shape(lambda: WITH_KEY)], ids=["arrays", "specs"])
@pytest.mark.parametrize("jit", [False, True])
def test_a_random_key_has_no_gradient(like: Any, jit: bool) -> None:
    """A key counts as float0, which jax.grad returns for it, in ``like`` and in contributions; the value is float0."""
    init = jax.jit(lambda: ACC.init(like)) if jit else lambda: ACC.init(like)
    update = jax.jit(ACC.update) if jit else ACC.update
    for contribution in (grads_beside_keys(), {"w": jnp.full(3, 2.0), "key": None, "keys": None}):
        value = ACC.value(update(contribution, init()))
        np.testing.assert_array_equal(value["w"], np.full(3, 2, np.float32))
        assert [value[name].dtype for name in ("key", "keys")] == [jax.dtypes.float0] * 2
        assert [value[name].shape for name in ("key", "keys")] == [(), (2,)]


@pytest.mark.full
def test_keys_and_float0_stay_in_their_places_over_lists_and_replicas() -> None:
    grads = grads_beside_keys()
    total = gc.add_n([grads, grads])

    def one(factor: Any) -> Any:
        scaled = {**grads, "w": grads["w"] * factor}
        return gc.all_reduce(reductions.sum(), scaled, over=gc.jax_axis("data"))

    def sum_of(factor: Any) -> Any:
        out = one(factor)
        assert out["key"].dtype == out["keys"].dtype == jax.dtypes.float0
        return out["w"]

    assert total["key"].dtype == total["keys"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(total["w"], np.full(3, 4, np.float32))
    np.testing.assert_array_equal(jax.vmap(sum_of, axis_name="data")(jnp.float32([1, 2])), np.full((2, 3), 6))


def test_float0_inside_jit() -> None:
    """float0 is a tracer as an argument of jit, and still has no gradient."""
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)({"w": jnp.ones(2), "steps": jnp.ones(3, jnp.int32)})
    state = jax.jit(lambda g: ACC.update(g, ACC.update(g, ACC.init(g))))(grads)
    value = ACC.value(state)
    np.testing.assert_array_equal(value["w"], np.ones(2, np.float32))
    assert (value["steps"].dtype, value["steps"].shape) == (jax.dtypes.float0, (3,))
