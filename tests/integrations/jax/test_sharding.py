"""The global view: jit over NamedShardings without an axis name. Windows are sharded like the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from tests.integrations.jax.replicas import collectives, grid
from tests.spec.selection import cases

SPECS = {"rows": P("data"), "columns": P(None, "model"), "both": P("data", "model"), "whole": P()}
REDUCTIONS = {
    "mean": reductions.mean(),
    "compensated": reductions.mean("compensated"),
    "exact": reductions.sum("exact"),
    "max": reductions.max(),
    "moments": reductions.moments(),
}
QUICK = [("mean", "sequential"), ("moments", "sequential"), ("exact", "tree"), ("compensated", "tree")]


def params(over: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Parameters of one shape, so that shardings cannot be matched by shape."""
    return {name: jax.device_put(jnp.full((8, 8), 0.5), NamedSharding(over, spec)) for name, spec in SPECS.items()}


def specs_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def placed(state: Any, like: dict[str, jax.Array]) -> None:
    """Asserts that the state has an array, or a stack of arrays, for each parameter, sharded like that parameter."""
    seen = set()
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.shape[-2:] == (8, 8):
            (name,) = [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]
            over, spec = like[name].sharding.mesh, like[name].sharding.spec
            expected = NamedSharding(over, P(*[None] * (x.ndim - 2), *spec))
            assert x.sharding.is_equivalent_to(expected, x.ndim), (path, x.sharding)
            seen.add(name)
    assert seen == set(like)


@pytest.mark.parametrize(("name", "order"), cases(QUICK, REDUCTIONS, ("sequential", "tree")))
def test_a_state_lies_where_the_parameters_lie(name: str, order: Any) -> None:
    like = params(grid())
    acc = gc.accumulate(REDUCTIONS[name], every=3, order=order)
    specs = specs_of(like)
    for made in (acc.init(like), acc.init(specs), jax.jit(lambda: acc.init(specs))()):
        placed(made, like)


def test_explicit_axes_carry_the_sharding_through_jit() -> None:
    over = grid(AxisType.Explicit)
    with jax.set_mesh(over):
        like = params(over)
        acc = gc.accumulate(REDUCTIONS["mean"], every=3)
        state = jax.jit(acc.init)(like)
        placed(state, like)
        placed(jax.jit(acc.update)(like, state), like)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "order"),
    cases([("mean", "tree"), ("compensated", "sequential")], ("mean", "compensated", "max"), ("sequential", "tree")),
)
def test_updates_and_values_stay_there_and_move_nothing(name: str, order: Any) -> None:
    like = params(grid())
    acc = gc.accumulate(REDUCTIONS[name], every=2, order=order)
    state = acc.init(like)
    update = jax.jit(acc.update, donate_argnums=1).lower(like, state).compile()
    assert collectives(update) == []
    for i in range(3):
        state = update(jax.tree.map(lambda x, i=i: x + i, like), state)
        placed(state, like)
    value = jax.jit(acc.value).lower(state).compile()
    assert collectives(value) == []
    placed(value(state), like)


def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = x
    for name in sorted(weights):
        hidden = hidden @ weights[name]
    return hidden.sum()


def windows(combine: Callable[[Any], Any]) -> Any:
    """A program that combines the gradients of a window of microbatches."""

    def step(weights: Any, xs: Any) -> Any:
        return combine(lambda x: jax.grad(loss)(weights, x))(weights, xs)

    return step


def ours(grads_of: Any) -> Any:
    acc = gc.accumulate(reductions.sum(), every=4)

    def run(weights: Any, xs: Any) -> Any:
        state, _ = jax.lax.scan(lambda state, x: (acc.update(grads_of(x), state), None), acc.init(weights), xs)
        return acc.value(state)

    return run


def by_hand(grads_of: Any) -> Any:
    def run(weights: Any, xs: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, weights)
        return jax.lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, grads_of(x)), None), zeros, xs)[0]

    return run


@pytest.mark.full
def test_a_window_inside_one_program_adds_no_collective_to_those_of_the_gradient() -> None:
    over = grid()
    weights = params(over)
    xs = np.random.default_rng(0).integers(-4, 5, (4, 16, 8)).astype(np.float32)
    xs = jax.device_put(xs, NamedSharding(over, P(None, "data")))
    programs = [jax.jit(windows(combine)).lower(weights, xs).compile() for combine in (ours, by_hand)]
    received, expected = (collectives(program) for program in programs)
    assert received == expected
    assert received != []
    mine, theirs = (program(weights, xs) for program in programs)
    for name, value in mine.items():
        np.testing.assert_array_equal(value, theirs[name])
        # Powers of two and small integers: sums are exact in any order.
        expected = jax.grad(lambda w: sum(loss(w, np.asarray(x)) for x in xs))(jax.device_get(weights))[name]
        np.testing.assert_array_equal(value, expected)
