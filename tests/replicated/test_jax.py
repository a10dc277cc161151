"""The model inside JAX transformations."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import gradcombine as gc
from gradcombine import replicated
from tests.foreign_orders.data import assert_same_bits
from tests.integrations.jax.replicas import mesh
from tests.spec.selection import cases

AXIS = gc.jax_axis("data")
REPLICAS = 4
X = np.float32([[1, 2], [3, 5], [4, 7], [8, 6]])


AGGREGATIONS, SYNCHRONIZATIONS = ("sum", "mean", "only_first_replica"), ("on_write", "on_read")
QUICK = [("mean", "on_write"), ("sum", "on_read"), ("only_first_replica", "on_read")]


@pytest.mark.parametrize(("aggregation", "synchronization"), cases(QUICK, AGGREGATIONS, SYNCHRONIZATIONS))
def test_a_loop_under_check_vma(aggregation: str, synchronization: str) -> None:
    """A write keeps the type of the state; with ON_WRITE, the result is one replicated array."""
    variable = replicated.variable(aggregation, synchronization, over=AXIS)

    def block(x: Any) -> Any:
        state = variable.init(jax.numpy.zeros(2))
        state, _ = jax.lax.scan(lambda s, _: (variable.assign_add(s, x[0]), None), state, None, length=3)
        return state.value if synchronization == "on_write" else variable.cross.read(state)

    spec = PartitionSpec("data")
    out = jax.jit(jax.shard_map(block, mesh=mesh(REPLICAS, "data"), in_specs=spec, out_specs=PartitionSpec()))(X)
    expected = {"sum": [48, 60], "mean": [12, 15], "only_first_replica": [3, 6]}
    assert out.tolist() == expected[aggregation]


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_a_loop_of_assignments_under_check_vma(synchronization: str) -> None:
    """The assigned value is equal on all replicas; the state keeps its initial type."""
    variable = replicated.variable("mean", synchronization, over=AXIS)

    def block(x: Any) -> Any:
        state = variable.init(jax.numpy.zeros(()))
        state, _ = jax.lax.scan(lambda s, y: (variable.cross.assign(s, y), None), state, jax.numpy.arange(3.0))
        state, _ = jax.lax.scan(lambda s, _: (variable.assign_add(s, 2.0), None), state, None, length=2)
        return x + variable.cross.read(state)

    spec = PartitionSpec("data")
    out = jax.jit(jax.shard_map(block, mesh=mesh(REPLICAS, "data"), in_specs=spec, out_specs=spec))(X)
    assert out.tolist() == (X + 6).tolist()


def test_made_outside_of_the_axis() -> None:
    variable = replicated.variable("sum", "on_read", over=AXIS)
    state = variable.init({"n": np.float32([10, 20])})

    @partial(jax.pmap, axis_name="data", in_axes=(None, 0), devices=jax.devices()[:REPLICAS])
    def step(state: Any, x: Any) -> Any:
        state = variable.assign_add(state, {"n": x})
        return state, variable.cross.read(state)

    state, read = step(state, X)
    assert state.value["n"].tolist() == (X + np.float32([10, 20])).tolist()
    assert read["n"].tolist() == [[56, 100]] * REPLICAS


def test_stacked_and_sharded() -> None:
    """The components are one array in one program, along an axis that is sharded over devices."""
    variable = replicated.variable("mean", "on_read", over=replicated.stacked(REPLICAS))
    sharding = NamedSharding(mesh(REPLICAS, "data"), PartitionSpec("data"))
    state = jax.device_put(variable.init(jax.numpy.zeros(2)), sharding)
    state = jax.jit(variable.assign_add)(state, jax.device_put(X, sharding))
    assert state.value.sharding.is_equivalent_to(sharding, 2)
    assert jax.jit(variable.cross.read)(state).tolist() == [4, 5]


@pytest.mark.parametrize(("aggregation", "synchronization"), cases(QUICK, AGGREGATIONS, SYNCHRONIZATIONS))
def test_stacked_has_the_bits_of_replicas(aggregation: str, synchronization: str) -> None:
    """NumPy with all components and JAX with one per replica have the same bits, by the canonical order."""
    values = np.random.default_rng(0).standard_normal((3, REPLICAS, 5)).astype(np.float32)

    def program(variable: Any, x: Any, y: Any, z: Any) -> Any:
        state = variable.assign_add(variable.init(np.full(5, 0.1, np.float32)), x)
        state = variable.assign_sub(state, y)
        if (aggregation, synchronization) != ("sum", "on_read"):
            state = variable.cross.assign_add(state, np.float32([0.3] * 5))
        state = variable.assign_add(state, z)
        return variable.read(state), variable.cross.read(state)

    whole = replicated.variable(aggregation, synchronization, over=replicated.stacked(REPLICAS), order="tree")
    one = replicated.variable(aggregation, synchronization, over=AXIS, order="tree")
    components, read = program(whole, *values)
    rows, reads = jax.jit(jax.vmap(partial(program, one), axis_name="data"))(*values)
    assert_same_bits(rows, components)
    assert_same_bits(reads, np.stack([read] * REPLICAS))


def test_outside_of_the_axis_a_write_is_refused() -> None:
    variable = replicated.variable("sum", over=AXIS)
    with pytest.raises(gc.GradCombineError, match=r"jax_axis\('data'\): expected an axis"):
        variable.assign_add(variable.init(np.float32(1)), np.float32(1))


@pytest.mark.full
def test_a_value_that_is_summed_already_is_refused() -> None:
    """With check_vma, a value of invariant type cannot be one replica's contribution."""
    variable = replicated.variable("sum", over=AXIS)

    def block(x: Any) -> Any:
        return variable.assign_add(variable.init({"w": x[0] * 0}), {"w": jax.lax.psum(x[0], "data")}).value

    spec = PartitionSpec("data")
    with pytest.raises(gc.GradCombineError, match=r"leaf \['w'\]: expected a value that varies"):
        jax.shard_map(block, mesh=mesh(REPLICAS, "data"), in_specs=spec, out_specs=spec)(X)


@pytest.mark.parametrize("kind", ["key", "float0"])
def test_what_holds_no_numbers_is_refused(kind: str) -> None:
    """Instead of dropping the write."""
    value = jax.random.key(1) if kind == "key" else np.zeros((), jax.dtypes.float0)
    variable = replicated.variable("none", "on_read", over=gc.LOCAL)
    with pytest.raises(gc.GradCombineError, match=r"^replicated\.init: "):
        variable.init({"x": value})
    with pytest.raises(gc.GradCombineError, match=r"^replicated\.assign: "):
        variable.assign(variable.init({"x": np.float32(3)}), {"x": value})
