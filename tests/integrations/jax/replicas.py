"""Programs on replicas with different data, under each of JAX's mapping transformations."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import gradcombine as gc

N = 4
AXIS = gc.jax_axis("d")

GRADS = np.float32([[1, 5, 9, -4], [3, -7, 2, 8], [6, 4, 4, 2], [-1, 3, 8, 16]])
TOKENS = np.float32([[1, 3, 2, 2], [4, 0, 1, 3], [2, 1, 4, 1], [2, 3, 1, 2]])
"""Rows are replicas, columns microbatches. Each window of two columns holds 16 tokens, so its mean is exact."""


def token_mean(columns: slice = slice(None), values: Any = GRADS, tokens: Any = TOKENS) -> float:
    """The exact mean over the tokens of the selected microbatches on all replicas."""
    pairs = zip(values[:, columns].flat, tokens[:, columns].flat, strict=True)
    return float(Fraction(sum(Fraction(float(x)) * int(n) for x, n in pairs), int(tokens[:, columns].sum())))


def mesh(replicas: int = N, axis: str = "d", kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((replicas,), (axis,), axis_types=(kind,), devices=jax.devices()[:replicas])


def grid(kind: AxisType = AxisType.Auto, data: int = 4, model: int = 2) -> Mesh:
    """A mesh of data and model axes."""
    devices = jax.devices()[: data * model]
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind,) * 2, devices=devices)


def levels(state: Any, function: Callable[[Any], Any]) -> Any:
    """The state of a step with the function applied to the arrays of its window's levels."""
    return state._replace(window=state.window._replace(levels=jax.tree.map(function, state.window.levels)))


def by_pmap(program: Callable[..., Any], *data: Any) -> Any:
    return jax.pmap(program, axis_name="d", devices=jax.devices()[:N])(*data)


def by_vmap(program: Callable[..., Any], *data: Any) -> Any:
    return jax.jit(jax.vmap(program, axis_name="d"))(*data)


def by_shard_map(check_vma: bool) -> Callable[..., Any]:
    def mapped(program: Callable[..., Any], *data: Any) -> Any:
        out = jax.jit(on_mesh(program, check_vma))(*data)
        return jax.tree.map(lambda x: jnp.stack([x] * N), out) if check_vma else out

    return mapped


def on_mesh(program: Callable[..., Any], check_vma: bool = True) -> Callable[..., Any]:
    """Maps a program by shard_map; with check_vma, out_specs P() proves that the results are equal on all replicas."""

    def one(*blocks: Any) -> Any:
        out = program(*jax.tree.map(lambda x: x[0], blocks))
        return out if check_vma else jax.tree.map(lambda x: x[None], out)

    specs = {"in_specs": P("d"), "out_specs": P() if check_vma else P("d")}
    return jax.shard_map(one, mesh=mesh(), check_vma=check_vma, **specs)


MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(by_pmap, id="pmap", marks=pytest.mark.full),
        pytest.param(by_vmap, id="vmap", marks=pytest.mark.full),
        pytest.param(by_shard_map(True), id="shard_map-check_vma"),
        pytest.param(by_shard_map(False), id="shard_map", marks=pytest.mark.full),
    ],
)
"""Each mode runs ``mode(program, *data)``: the program with one row of the data per replica; results are stacked."""

ORDERS = pytest.mark.parametrize("order", [pytest.param("sequential", marks=pytest.mark.full), "tree"])


def collectives(compiled: Any, *, looped: bool = False) -> list[str]:
    """Sorted names of the collectives of a compiled program; with ``looped``, of those in a loop or conditional."""
    text = compiled.as_text()
    kinds = "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter"
    return sorted(re.findall(rf" ({kinds})(?:-start)?\(", text[: text.index("ENTRY")] if looped else text))
