"""JAX replicas along nested axes, next to axes that shard the parameters, and the number of exchanges."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions

GRADS = np.arange(16, dtype=np.float32).reshape(2, 4, 2) ** 2
"""Microbatches on ('replica', 'data') = (2, 4), one per column."""
TOKENS = np.int32([[[1, 3], [2, 2], [4, 0], [1, 1]], [[3, 3], [0, 5], [2, 1], [4, 0]]])
"""32 tokens in total, so that their mean is exact."""

ORDERS = pytest.mark.parametrize("order", [pytest.param("sequential", marks=pytest.mark.full), "tree"])


def window(names: Any, order: Any, grads: Any, tokens: Any) -> Any:
    """The token mean over a replica's microbatches and over the replicas along the named axes."""
    reduction = reductions.mean()
    acc = gc.accumulate(reduction, every=2, order=order)
    state = acc.init({"w": grads[0]})
    for i in range(2):
        state = acc.update({"w": grads[i]}, state, weight=tokens[i])
    return acc.value(gc.merge_replicas(reduction, state, over=gc.jax_axis(names), order=order))["w"]


def token_mean(axis: int | tuple[int, ...]) -> np.ndarray:
    return ((GRADS * TOKENS).sum(axis) / TOKENS.sum(axis)).astype(np.float32)


def by_pmap_of_vmap(function: Callable[..., Any]) -> Any:
    return jax.pmap(jax.vmap(function, axis_name="data"), axis_name="replica")(GRADS, TOKENS)


def by_vmap_of_pmap_axes_swapped(function: Callable[..., Any]) -> Any:
    inner = jax.vmap(function, axis_name="replica")
    swapped = jax.pmap(inner, axis_name="data")(GRADS.swapaxes(0, 1), TOKENS.swapaxes(0, 1))
    return np.asarray(swapped).swapaxes(0, 1)


def by_vmap(function: Callable[..., Any]) -> Any:
    return jax.jit(jax.vmap(jax.vmap(function, axis_name="data"), axis_name="replica"))(GRADS, TOKENS)


def by_shard_map(function: Callable[..., Any], check_vma: bool) -> Any:
    def one(grads: Any, tokens: Any) -> Any:
        return function(grads[0, 0], tokens[0, 0])[None, None]

    specs = P("replica", "data")
    mesh = made_mesh(2, 4, ("replica", "data"))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=check_vma))(GRADS, TOKENS)


def made_mesh(rows: int, columns: int, names: tuple[str, str]) -> Any:
    return jax.make_mesh((rows, columns), names, axis_types=(AxisType.Auto,) * 2)


WAYS = pytest.mark.parametrize(
    "way",
    [
        pytest.param(by_pmap_of_vmap, id="pmap-vmap", marks=pytest.mark.full),
        pytest.param(by_vmap_of_pmap_axes_swapped, id="vmap-pmap"),
        pytest.param(by_vmap, id="vmap"),
        pytest.param(partial(by_shard_map, check_vma=True), id="shard_map"),
        pytest.param(partial(by_shard_map, check_vma=False), id="shard_map_unchecked", marks=pytest.mark.full),
    ],
)


@WAYS
@ORDERS
def test_nested_axes_together_and_one_of_them(way: Callable[..., Any], order: Any) -> None:
    """Over one axis, each row of replicas has a separate mean."""

    def program(grads: Any, tokens: Any) -> Any:
        return jnp.stack([window(names, order, grads, tokens) for names in (("replica", "data"), "data")])

    together, rows = np.moveaxis(np.asarray(way(program)), -1, 0)
    np.testing.assert_array_equal(together, np.full((2, 4), token_mean((0, 1, 2))))
    np.testing.assert_array_equal(rows, np.stack([token_mean((1, 2))] * 4, axis=1))


def loss(params: Any, x: Any) -> Any:
    return ((x @ params["w"]) * params["scale"]).sum()


def sharded_step(check_vma: bool, every: int, differentiate_own: bool = True) -> Any:
    """A window of gradients: 'model' shards the columns of ``w``, 'data' the batch; ``scale`` is replicated."""
    reduction = reductions.mean()
    acc = gc.accumulate(reduction, every=every)

    def step(params: Any, xs: Any) -> Any:
        own = params
        if check_vma and differentiate_own:
            own = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)

        def microbatch(state: Any, x: Any) -> Any:
            grads = jax.grad(loss)(own, x)
            return acc.update(grads, state, weight=x.shape[0]), None

        state, _ = jax.lax.scan(microbatch, acc.init(own), xs)
        means = acc.value(gc.merge_replicas(reduction, state, over=gc.jax_axis("data")))
        if not check_vma:  # with check_vma, shard_map sums the gradient of parameters that are replicated over 'model'
            means["scale"] = jax.lax.psum(means["scale"], "model")
        return means

    mesh = made_mesh(4, 2, ("data", "model"))
    specs = {"w": P(None, "model"), "scale": P()}
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(specs, P(None, "data")), out_specs=specs, check_vma=check_vma)
    )


PARAMS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "scale": np.float32(2)}


def batch(microbatches: int) -> np.ndarray:
    return np.random.default_rng(microbatches).integers(-8, 9, (microbatches, 8, 3)).astype(np.float32)


def all_reduces(compiled: Any) -> tuple[int, int]:
    """Numbers of all-reduces in a compiled program: in its entry, where they run once, and in its loops."""
    once, repeated, entry = 0, 0, False
    for line in compiled.as_text().splitlines():
        if line.endswith("{") and not line.startswith(" "):
            entry = line.startswith("ENTRY")
        count = len(re.findall(r" all-reduce(?:-start)?\(", line))
        once, repeated = once + count * entry, repeated + count * (not entry)
    return once, repeated


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.full), 8])
@pytest.mark.parametrize("check_vma", [True, False])
def test_parameters_that_are_sharded_over_another_axis(check_vma: bool, every: int) -> None:
    """The mean over data replicas and microbatches of the sum over each replica's two examples.

    A window is one exchange of gradients, weights and digits of counts over the data axis, and one over the model axis;
    with check_vma, shard_map makes the latter, in each microbatch.
    """
    xs = batch(every)
    compiled = sharded_step(check_vma, every).lower(PARAMS, xs).compile()
    assert all_reduces(compiled) == ((1, 1) if check_vma else (2, 0))
    means, column = compiled(PARAMS, xs), xs.sum((0, 1)) / (4 * every)
    np.testing.assert_array_equal(means["w"], np.stack([2 * column] * 4, axis=1))
    assert means["scale"] == (column @ PARAMS["w"]).sum()


def test_a_window_on_pmap_is_one_exchange() -> None:
    def step(grads: Any, tokens: Any) -> Any:
        acc = gc.accumulate(reductions.mean(), every=6)
        state, _ = jax.lax.scan(
            lambda state, x: (acc.update(x[0], state, x[1]), None), acc.init(grads[0]), (grads, tokens)
        )
        return acc.value(gc.merge_replicas(reductions.mean(), state, over=gc.jax_axis("data")))

    program = jax.pmap(step, axis_name="data")
    grads, tokens = np.ones((8, 6, 3), np.float32), np.ones((8, 6), np.float32)
    assert all_reduces(program.lower(grads, tokens).compile()) == (1, 0)


def test_a_gradient_that_is_summed_in_the_loop_is_refused() -> None:
    """Without pcast, shard_map would sum each microbatch over the replicas: one exchange each, and wrong weights."""
    with pytest.raises(gc.GradCombineError, match=r"leaf \['scale'\]: expected a value that varies"):
        sharded_step(True, every=2, differentiate_own=False)(PARAMS, batch(2))


def test_numpy_values_are_exchanged_too() -> None:
    """Accepts NumPy values and states, e.g. ones that have just been loaded."""
    total = gc.reductions.sum()
    state = total.update(total.init(np.zeros(2, np.float32)), np.float32([1, 2]))

    def own(rank: Any) -> Any:
        merged = total.finalize(gc.merge_replicas(total, state, gc.jax_axis("d")))
        return rank, gc.all_reduce(total, np.float32([3]), gc.jax_axis("d")), merged

    for mapped in (jax.pmap, lambda f, axis_name: jax.jit(jax.vmap(f, axis_name=axis_name))):
        _, reduced, merged = mapped(own, axis_name="d")(np.arange(4))
        assert reduced.tolist() == [[12.0]] * 4
        assert merged.tolist() == [[4.0, 8.0]] * 4
