# pyright: standard
"""Local SGD with an outer optimizer: islands on a mesh, simulated islands and the written rule agree bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import GradCombineError
from gradcombine.integrations.jax import outer
from tests.integrations.islands import EVERY, FRAGMENTS, SHAPES, STEPS, moves, ruled, seen_by, start
from tests.integrations.jax.replicas import mesh

AXIS = "island"
OVER = gc.jax_axis(AXIS)


def train(islands: Any, params: Any, added: Any, weights: Any) -> Any:
    """The parameters and outer parameters of one island after each step."""
    state, seen = islands.init(params), []
    for i in range(STEPS):
        params = {name: x + added[name][i] for name, x in params.items()}
        params, state = islands.update(params, state, weight=weights[i])
        seen.append({"params": params, "outer": state.params})
    return seen


def simulated(islands: Any, added: Any, weights: Any) -> Any:
    """Runs all islands on one device by vmap."""
    run = jax.vmap(lambda added, weights: train(islands, start(), added, weights), axis_name=AXIS)
    return jax.jit(run)(added, weights)


def sharded(islands: Any, added: Any, weights: Any, kind: AxisType, check_vma: bool) -> Any:
    n = len(weights)
    on = mesh(n, AXIS, kind)

    def island(added: Any, weights: Any) -> Any:
        own, given = jax.tree.map(lambda x: x[0], (added, weights))
        return jax.tree.map(lambda x: x[None], train(islands, start(), own, given))

    mapped = jax.shard_map(island, mesh=on, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma)
    return jax.jit(mapped)(*jax.device_put((added, weights), NamedSharding(on, P(AXIS))))


def nesterov(**settings: Any) -> Any:
    return outer(optax.sgd(1.0, momentum=0.5, nesterov=True), EVERY, OVER, order="tree", **settings)


@pytest.mark.full
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("n", [2, 4])
def test_a_mesh_has_the_bits_of_a_simulation(n: int, fragments: int) -> None:
    added, weights = moves(n), seen_by(n)
    islands = nesterov(fragments=fragments)
    alone = simulated(islands, added, weights)
    for kind, check_vma in [(AxisType.Auto, True), (AxisType.Auto, False), (AxisType.Explicit, True)]:
        jax.tree.map(np.testing.assert_array_equal, alone, sharded(islands, added, weights, kind, check_vma))
    for ours, theirs in zip(alone, ruled(added, weights, FRAGMENTS[fragments]), strict=True):
        for name in SHAPES:
            for island in range(n):
                bound = {"rtol": 0, "atol": 2e-6}  # XLA may fuse the momentum's products
                np.testing.assert_allclose(ours["params"][name][island], theirs["params"][island][name], **bound)
                np.testing.assert_allclose(ours["outer"][name][island], theirs["outer"][name], **bound)


@pytest.mark.full
def test_nothing_moves_between_exchanges() -> None:
    """The outer parameters of each fragment change only at the end of its window."""
    added, weights = moves(2), np.ones((2, STEPS), np.float32)
    seen = simulated(nesterov(fragments=2), added, weights)
    before = [start(), *(jax.tree.map(lambda x: x[0], one["outer"]) for one in seen[:-1])]
    changed = [
        {name for name in SHAPES if (np.asarray(one["outer"][name][0]) != np.asarray(old[name])).any()}
        for one, old in zip(seen, before, strict=True)
    ]
    assert changed == [set(), {"b", "c"}, set(), {"a"}] * 2


@pytest.mark.full
def test_a_lost_island_changes_nothing() -> None:
    """An island with weight 0 and NaN parameters changes no bits and gets the outer parameters at the end."""
    added, weights = moves(2), np.ones((2, STEPS), np.float32)
    lost = {name: np.where(np.arange(2).reshape(2, *[1] * (x.ndim - 1)) == 1, np.nan, x) for name, x in added.items()}
    weights[1, :EVERY] = 0
    seen = simulated(nesterov(), lost, weights)
    alone = simulated(nesterov(), jax.tree.map(lambda x: x[:1], added), weights[:1])
    for name in SHAPES:
        np.testing.assert_array_equal(seen[EVERY - 1]["params"][name][0], alone[EVERY - 1]["params"][name][0])
        np.testing.assert_array_equal(seen[EVERY - 1]["params"][name][1], alone[EVERY - 1]["params"][name][0])


@pytest.mark.full
def test_an_island_that_joins_begins_from_the_outer_parameters() -> None:
    islands = nesterov()

    def run(begins: Any) -> Any:
        state = islands.init(jnp.float32(8))
        params, state = islands.update(jnp.float32(5), state, weight=3)
        params, state = islands.join(params, state, begins)
        return params, state.weight

    params, weight = jax.vmap(run, axis_name=AXIS)(jnp.array([True, False]))
    np.testing.assert_array_equal(params, [8, 5])
    np.testing.assert_array_equal(weight, [[0], [3]])


@pytest.mark.full
def test_through_a_wire() -> None:
    """The islands' changes are sent in eight bits, and all islands end with the same bits."""
    added = {"w": np.random.default_rng(1).normal(size=(2, 64, 64)).astype(np.float32)}
    wire = gc.wires.blocks(8)
    plain, narrow = (outer(optax.sgd(1.0), 1, OVER, reduction=gc.reductions.mean(wire=to)) for to in (None, wire))

    def run(islands: Any) -> Any:
        def island(w: Any) -> Any:
            params = {"w": jnp.zeros((64, 64))}
            return islands.update({"w": params["w"] + w}, islands.init(params))[0]["w"]

        return jax.vmap(island, axis_name=AXIS)(added["w"])

    ours, exact = run(narrow), run(plain)
    np.testing.assert_array_equal(ours[0], ours[1])
    error = np.abs(ours - exact).max()
    assert 0 < error <= np.abs(added["w"]).max() / 64  # half a step of a block of 7 bits, for each of two roundings


def without_bias(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: "bias" not in jax.tree_util.keystr(path), params)


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("mask", [without_bias, {"kernel": True, "bias": False}], ids=["by path", "as a tree"])
def test_the_optimizer_selects_leaves(mask: Any, fragments: int) -> None:
    """The outer optimizer and its masks get trees with the paths of the parameters: only the kernel decays."""
    decay = optax.add_decayed_weights(0.5, mask=mask)
    islands = outer(optax.chain(decay, optax.sgd(1.0)), fragments, OVER, fragments=fragments)

    def island(speed: Any) -> Any:
        params = {"kernel": jnp.float32(8), "bias": jnp.float32(8)}
        state = islands.init(params)
        for _ in range(fragments):
            params, state = islands.update(jax.tree.map(lambda x: x - speed / fragments, params), state)
        return state.params

    moved = jax.vmap(island, axis_name=AXIS)(jnp.float32([2, 4]))
    # The mean progress is 3; of two fragments, the kernel's is exchanged after one of two steps.
    assert moved["kernel"].tolist() == [8 - 3 / fragments - 4] * 2
    assert moved["bias"].tolist() == [8 - 3] * 2


def test_a_wire_selects_leaves_by_path() -> None:
    """The kernel of a router stays wide under the default of 8-bit wires, as its path names it."""
    islands = outer(optax.sgd(1.0), 1, OVER, reduction=gc.reductions.mean(wire=gc.wires.blocks(8)))
    steps = np.random.default_rng(1).integers(-(2**12), 2**12, (2, 32, 32)).astype(np.float32)

    def island(step: Any) -> Any:
        params = {"router": jnp.zeros((32, 32)), "kernel": jnp.zeros((32, 32))}
        return islands.update(jax.tree.map(lambda x: x + step, params), islands.init(params))[0]

    moved, mean = jax.vmap(island, axis_name=AXIS)(steps), steps.mean(0)
    np.testing.assert_array_equal(moved["router"][0], mean)  # integers: exact
    assert (moved["kernel"][0] != mean).any()


@pytest.mark.full
@pytest.mark.usefixtures("standard_promotion")
def test_small_steps_in_float64_are_not_lost() -> None:
    islands = outer(optax.sgd(1.0), 1, OVER)

    def island(_: Any) -> Any:
        params = jnp.ones(2, jnp.float64)
        return islands.update(params - 2.0**-40, islands.init(params))[0]

    with jax.enable_x64(True):
        np.testing.assert_array_equal(jax.vmap(island, axis_name=AXIS)(jnp.arange(2)), 1 - np.full((2, 2), 2.0**-40))


def called(name: str, *arguments: Any, params: Any = None, state: Any = None, reduction: Any = None) -> None:
    """Calls a method on two islands; without ``params`` and ``state``, nothing but the other arguments is wrong."""
    islands = outer(optax.sgd(1.0), 2, OVER, reduction=reduction)
    made = islands.init({"w": jnp.zeros(3)})
    given = {"w": jnp.zeros(3)} if params is None else params, made if state is None else state
    jax.vmap(lambda _: getattr(islands, name)(*given, *arguments), axis_name=AXIS)(jnp.arange(2))


TWO = {"w": jnp.zeros(3), "v": jnp.zeros(3)}


def of_two_fragments() -> Any:
    return outer(optax.sgd(1.0), 2, OVER, fragments=2).init(TWO)


BAD = {
    "no transformation": lambda: outer(lambda x: x, 2, OVER),
    "no steps": lambda: outer(optax.sgd(1.0), 0, OVER),
    "a schedule": lambda: outer(optax.sgd(1.0), lambda i: 2, OVER),
    "no collective": lambda: outer(optax.sgd(1.0), 2, "island"),
    "more fragments than steps": lambda: outer(optax.sgd(1.0), 2, OVER, fragments=3),
    "a reduction that was not called": lambda: outer(optax.sgd(1.0), 2, OVER, reduction=gc.reductions.mean),
    "a reduction to more than gradients": lambda: called("update", reduction=gc.reductions.moments()),
    "integers": lambda: outer(optax.sgd(1.0), 2, OVER).init({"n": np.arange(3)}),
    "floats of 8 bits": lambda: outer(optax.sgd(1.0), 2, OVER).init({"n": jnp.zeros(3, jnp.float8_e4m3fn)}),
    "another state": lambda: called("update", state={}),
    "another state, join": lambda: called("join", True, state={}),
    "a weight that is no number": lambda: called("update", "a"),
    "no weight": lambda: called("update", None),
    "weights": lambda: called("update", jnp.ones(3)),
    "a negative weight": lambda: called("update", -1),
    "a shape": lambda: called("update", params={"w": jnp.zeros(4)}),
    "a shape, join": lambda: called("join", True, params={"w": jnp.zeros(4)}),
    "a dtype": lambda: called("update", params={"w": jnp.zeros(3, jnp.bfloat16)}),
    "a structure": lambda: called("update", params={"v": jnp.zeros(3)}),
    "a structure, join": lambda: called("join", True, params={"v": jnp.zeros(3)}),
    "more fragments": lambda: called("update", state=of_two_fragments(), params=TWO),
    "more fragments, join": lambda: called("join", True, state=of_two_fragments(), params=TWO),
    "no leaf": lambda: called("update", params={"w": None}),
    "no flag": lambda: called("join", "a"),
    "flags": lambda: called("join", jnp.array([True, False, True])),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    with pytest.raises(GradCombineError, match=r"^outer: "):
        BAD[name]()
