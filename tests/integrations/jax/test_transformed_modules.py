"""Losses of flax.nnx modules whose layers run within transformations, which return all variables of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gradcombine as gc
from gradcombine.integrations.jax import request_step, train_step, value_and_grad

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.scale = nnx.Variable(jnp.float32(0.5))  # a constant

    def __call__(self, x: Any) -> Any:
        return jnp.tanh(self.linear(x) * self.scale)


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.dropout = nnx.BatchNorm(3, momentum=0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.linear(self.dropout(self.norm(x)))


class Model(nnx.Module):
    """A layer, and how to call it."""

    def __init__(self, layer: Any, call: Callable[[Any, Any], Any]) -> None:
        self.layer, self.call = layer, call

    def __call__(self, x: Any) -> Any:
        return self.call(self.layer, x)


def plain(layer: Any, x: Any) -> Any:
    return layer(x)


def over_layers(layer: Any, x: Any) -> Any:
    """A scan over three layers, each rematerialized."""
    return nnx.scan(lambda x, one: nnx.remat(plain)(one, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layer)


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=(0,), out_axes=0)
def three(rngs: nnx.Rngs) -> Layer:
    return Layer(rngs)


def loss(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


MODELS: dict[str, Callable[[], Model]] = {
    "remat": lambda: Model(Layer(nnx.Rngs(0)), nnx.remat(plain)),
    "jit": lambda: Model(Layer(nnx.Rngs(0)), nnx.jit(plain)),
    "jit in remat": lambda: Model(Layer(nnx.Rngs(0)), nnx.remat(lambda layer, x: nnx.jit(plain)(layer, x))),
    "scan of remat": lambda: Model(three(nnx.Rngs(0)), over_layers),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_batch(name: str) -> None:
    model = MODELS[name]()
    expected = nnx.value_and_grad(loss)(model, X)
    for function in (value_and_grad(loss, 4), nnx.jit(value_and_grad(loss, 4))):
        value, grads = function(model, X)
        np.testing.assert_allclose(value, expected[0], rtol=1e-6)
        chex.assert_trees_all_close(grads, expected[1], rtol=2e-6, atol=1e-7)
    tx = optax.sgd(0.5)
    step = train_step(loss, tx, microbatches=4)
    new, *_ = step.function(model, step.init(model), X)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(model, nnx.Param), expected[1])
    chex.assert_trees_all_close(nnx.state(new, nnx.Param), moved, rtol=2e-6, atol=1e-7)


def test_requests_of_a_rematerialized_layer() -> None:
    model, engine = MODELS["remat"](), request_step(loss, optax.sgd(0.5), microbatches=2)
    grads = nnx.grad(loss)(model, X)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(model, nnx.Param), grads)
    state = engine.init({"a": model})
    for n in range(2):
        state = engine.forward_backward(state, X[4 * n : 4 * n + 4], slot="a", number=n)
    state, _ = engine.optim_step(state, slot="a")
    chex.assert_trees_all_close(nnx.state(state["a"].params, nnx.Param), moved, rtol=2e-6, atol=1e-7)


def test_state_is_combined_and_streams_advance() -> None:
    plain_model, remat_model = (Model(Normed(nnx.Rngs(0)), call) for call in (plain, nnx.remat(plain)))
    for model in (plain_model, remat_model):
        value_and_grad(loss, 4)(model, X)
    a, b = (nnx.state(model.layer) for model in (plain_model, remat_model))
    chex.assert_trees_all_close(jax.tree.leaves(a["norm"]), jax.tree.leaves(b["norm"]), rtol=1e-6)
    assert plain_model.layer.dropout.rngs.count[...] == remat_model.layer.dropout.rngs.count[...] == 1


class Pair(nnx.Module):
    """Two factors; whether a call exchanges them."""

    def __init__(self, exchanges: bool) -> None:
        self.first, self.second, self.exchanges = nnx.Param(jnp.ones((3, 3))), nnx.Param(jnp.zeros((3, 3))), exchanges

    def __call__(self, x: Any) -> Any:
        if self.exchanges:
            self.first[...], self.second[...] = self.second[...], self.first[...]
        return x @ self.first[...]


def in_a_carry(layer: Any, x: Any) -> Any:
    """A scan that carries the layer's variables, and rematerializes its iterations."""
    axes = nnx.StateAxes({...: nnx.Carry}), nnx.Carry
    return nnx.scan(nnx.remat(plain), in_axes=axes, out_axes=nnx.Carry, length=2)(layer, x)


@pytest.mark.parametrize("call", [nnx.remat(plain), nnx.jit(plain), in_a_carry], ids=["remat", "jit", "scan"])
def test_parameters_that_are_exchanged(call: Any) -> None:
    value, grads = value_and_grad(loss, 2)(Model(Pair(exchanges=False), call), X)
    expected = nnx.value_and_grad(loss)(Model(Pair(exchanges=False), call), X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    chex.assert_trees_all_close(grads, expected[1], rtol=2e-6)
    with pytest.raises(gc.GradCombineError, match=r"leaf \.layer\.first: expected parameters that only the optimizer"):
        value_and_grad(loss, 2)(Model(Pair(exchanges=True), call), X)


def written(layer: Any, x: Any) -> Any:
    layer.linear.bias[...] = layer.linear.bias[...] * 2
    return layer(x)


def counted(layer: Any, x: Any) -> Any:
    layer.scale[...] = layer.scale[...] + 1
    return layer(x)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (written, r"leaf \.layer\.linear\.bias: expected parameters that only the optimizer changes"),
        (counted, r"leaf \.layer\.scale: expected a reduction as the class attribute combined_by"),
    ],
)
def test_a_variable_that_a_layer_changes(call: Any, message: str, transform: Any) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        value_and_grad(loss, 2)(Model(Layer(nnx.Rngs(0)), transform(call)), X)
