"""JAX replicas exchange small leaves as one flat array, with the bits and types of separate exchanges."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import reductions
from tests.foreign_orders.data import assert_same_bits
from tests.integrations.jax import replicas

N = 4
AXIS = gc.jax_axis("data")

SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), np.float32),
    ((3, 5), np.float32),
    ((0, 2), np.float32),
    ((16384,), np.float32),
    ((2, 16384), np.float32),
    ((7,), ml_dtypes.bfloat16),
    ((3, 1, 2), ml_dtypes.bfloat16),
    ((5,), np.int32),
    ((), np.int32),
    ((4,), np.complex64),
    ((2, 2), np.complex64),
    ((9,), np.float16),
]
"""Leaves of each dtype on both sides of the limit (64 KiB), a single float16 leaf, an empty leaf."""


def data() -> list[np.ndarray]:
    rng = np.random.default_rng(0)

    def made(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        values = rng.normal(size=(N, *shape)) * 10.0 ** rng.integers(-3, 4, (N, *shape))
        return (values * (1 + 1j) if dtype is np.complex64 else values).astype(dtype)

    return [made(*spec) for spec in SHAPES]


def mapped(function: Callable[[list[Any]], list[Any]], way: str) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """Maps ``function`` over the replicas' leaves; returns the results of all replicas, stacked."""
    if way == "pmap":
        return jax.pmap(function, axis_name="data")
    if way == "vmap":
        return jax.jit(jax.vmap(function, axis_name="data"))
    over = replicas.mesh(N, "data")
    if way == "shard_map":
        run = jax.shard_map(lambda xs: function([x[0] for x in xs]), mesh=over, in_specs=P("data"), out_specs=P())
        compiled = jax.jit(run)
        return lambda xs: [np.stack([np.asarray(x)] * N) for x in compiled(xs)]

    def one(xs: list[Any]) -> list[Any]:
        return [x[None] for x in function([x[0] for x in xs])]

    specs = {"in_specs": P("data"), "out_specs": P("data")}
    return jax.jit(jax.shard_map(one, mesh=over, **specs, check_vma=False))


WAYS = pytest.mark.parametrize(
    "way",
    [*(pytest.param(way, marks=pytest.mark.full) for way in ("pmap", "shard_map_unchecked")), "vmap", "shard_map"],
)


@pytest.mark.sampled
@WAYS
def test_sums_and_stacks_have_the_bits_of_leaves_that_go_alone(way: str) -> None:
    def program(xs: list[Any]) -> list[Any]:
        alone = [jax.lax.psum(x, "data") for x in xs]
        return [*AXIS.all_sum(xs), *alone, *AXIS.all_gather(xs)]

    xs = data()
    results = mapped(program, way)(xs)
    count = len(xs)
    for x, total, alone, stack in zip(
        xs, results[:count], results[count : 2 * count], results[2 * count :], strict=True
    ):
        assert_same_bits(total, alone)
        assert_same_bits(stack, np.stack([x] * N))


def collectives(compiled: Any) -> dict[str, list[int]]:
    """Collective operations of a compiled program, by name: the number of arrays in each."""
    operands_by_kind: dict[str, list[int]] = {}
    # An asynchronous collective is a pair of instructions: count its start only.
    pattern = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*?)\)[,\s]"
    for kind, operands in re.findall(pattern, compiled.as_text()):
        operands_by_kind.setdefault(kind, []).append(operands.count("%"))
    return operands_by_kind


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.make_mesh((N, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.full
def test_forty_small_leaves_and_two_large_ones_are_one_exchange(mesh: Any) -> None:
    """The weight is in the gradients' bucket; the count is sent as digits in the same exchange."""

    def step(xs: list[Any]) -> list[Any]:
        return gc.all_reduce(reductions.mean(), xs, over=AXIS, weight=1 + jax.lax.axis_index("data"))

    xs = [np.full((N, 1000), i, np.float32) for i in range(40)] + [np.ones((N, 100_000), np.float32)] * 2
    compiled = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())).lower(xs).compile()
    # The bucket and the two arrays that are too large for it.
    assert collectives(compiled) == {"all-reduce": [3]}
    for i, x in enumerate(compiled(xs)[:40]):
        np.testing.assert_array_equal(x, np.full((1, 1000), i, np.float32))


def test_leaves_of_different_types_keep_their_own(mesh: Any) -> None:
    """A leaf that is invariant over 'model' stays so next to a varying one: check_vma checks the specs."""
    specs = {"same": P(), "own": P("model")}
    for order in ("sequential", "tree"):

        def ordered(same: Any, own: Any, order: Any = order) -> Any:
            return gc.all_reduce(reductions.mean(), {"same": same, "own": own}, over=AXIS, order=order)

        run = jax.shard_map(ordered, mesh=mesh, in_specs=(P("data"), P(("model", "data"))), out_specs=specs)
        result = jax.jit(run)(np.arange(4, dtype=np.float32), np.arange(8, dtype=np.float32))
        np.testing.assert_array_equal(result["same"], [1.5])
        np.testing.assert_array_equal(result["own"], [1.5, 5.5])


def test_a_leaf_that_the_compiler_shards_is_not_copied_together(mesh: Any) -> None:
    """With an axis that shard_map leaves to the compiler, a flat array would gather the shards of every leaf."""

    def step(xs: list[Any]) -> list[Any]:
        return [x[0] for x in AXIS.all_sum(xs)]

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"}))
    xs = [np.arange(N * 8, dtype=np.float32).reshape(N, 8) + i for i in range(3)]
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "model"))) for x in xs]
    compiled = run.lower(placed).compile()
    assert set(collectives(compiled)) == {"all-reduce"}
    for x, total in zip(xs, compiled(placed), strict=True):
        assert_same_bits(total, x.sum(0))
        assert total.sharding.spec == P("model")


COUNTS = np.int32([[1, -1, 2**31 - 1, -(2**31), 2**11, 0], [2, -3, 1, -1, 2**22 - 1, 0]] * 2)
"""One row per replica; the sums of the third and fourth column overflow int32 and wrap around."""


@WAYS
def test_counts_beside_floats_are_exact(way: str) -> None:
    received = mapped(AXIS.all_sum, way)([np.float32([[1], [2], [3], [4]]), *COUNTS.T])
    assert_same_bits(received[0], np.float32([[10]] * N))
    for column, result in zip(COUNTS.T, received[1:], strict=True):
        wrapped = (sum(map(int, column)) + 2**31) % 2**32 - 2**31
        assert_same_bits(result, np.full(N, wrapped, np.int32))


@pytest.mark.parametrize("reduction", [reductions.sum(), reductions.mean()], ids=["sum", "mean"])
def test_accumulators_weight_and_count_are_one_exchange(reduction: Any, mesh: Any) -> None:
    def step(x: Any) -> Any:
        return gc.all_reduce(reduction, x, over=AXIS, weight=1 + jax.lax.axis_index("data"))

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P()))
    exchanges = collectives(run.lower(np.ones((N, 100_000), np.float32)).compile())
    assert {kind: len(calls) for kind, calls in exchanges.items()} == {"all-reduce": 1}
