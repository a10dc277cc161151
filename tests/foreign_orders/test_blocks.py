"""Left chains and AddN's blocks have the bits of TensorFlow's and JAX's sums."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tensorflow as tf
from jax.sharding import PartitionSpec

from gradcombine import foreign_orders
from tests.foreign_orders.data import assert_same_bits, normal
from tests.integrations.jax.replicas import mesh
from tests.integrations.tensorflow.strategies import mirrored, per_replica

FLOATING = ["float32", "bfloat16", "float16", "complex64"]


def tensors(n: int, dtype: str = "float32") -> list[Any]:
    return [tf.constant(x) for x in normal(n, dtype=dtype)]


@pytest.mark.parametrize("n", range(1, 34))
def test_eager_addn(n: int) -> None:
    assert_same_bits(tf.add_n(tensors(n)), foreign_orders.addn_blocks(normal(n)))


@pytest.mark.parametrize(
    "n", [n if n in (1, 2, 9, 12, 33) else pytest.param(n, marks=pytest.mark.full) for n in range(1, 34)]
)
def test_addn_under_jit_compile(n: int) -> None:
    assert_same_bits(tf.function(tf.add_n, jit_compile=True)(tensors(n)), foreign_orders.left_chain(normal(n)))


@pytest.mark.parametrize("dtype", FLOATING)
def test_addn_of_other_dtypes(dtype: str) -> None:
    values = normal(21, dtype=dtype)
    assert_same_bits(tf.add_n(tensors(21, dtype)), foreign_orders.addn_blocks(values))
    assert_same_bits(tf.function(tf.add_n, jit_compile=True)(tensors(21, dtype)), foreign_orders.left_chain(values))


@pytest.mark.parametrize("n", [3, 9, 10, 11, 12, 20, 33])
def test_addn_in_a_graph_is_sorted_by_name(n: int) -> None:
    add = tf.function(tf.add_n)
    names = [tensor.op.name for tensor in add.get_concrete_function(tensors(n)).graph.inputs]
    received = add(tensors(n))
    assert_same_bits(received, foreign_orders.addn_blocks(normal(n), names))
    assert (received.numpy() != foreign_orders.addn_blocks(normal(n))).any() == (n > 10)


@pytest.mark.parametrize("n", [3, 9, 12, 20])
@pytest.mark.parametrize("method", ["ADD_N", "EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N"])
def test_aggregation_methods_become_one_addn(method: str, n: int) -> None:
    @tf.function
    def gradient(x: Any, terms: Any) -> Any:
        uses = [tf.identity(x) for _ in terms]
        return tf.gradients(uses, x, terms, aggregation_method=getattr(tf.AggregationMethod, method))[0]

    x, terms = tf.zeros(513), tensors(n)
    names = [tensor.op.name for tensor in gradient.get_concrete_function(x, terms).graph.inputs][1:]
    assert_same_bits(gradient(x, terms), foreign_orders.addn_blocks(normal(n), names))


@pytest.mark.parametrize("method", ["EXPERIMENTAL_TREE", "EXPERIMENTAL_ACCUMULATE_N"])
def test_without_grappler_they_are_left_chains(method: str) -> None:
    with tf.Graph().as_default():
        config = tf.compat.v1.ConfigProto()
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        x = tf.zeros(513)
        uses = [tf.identity(x) for _ in range(20)]
        terms = [tf.compat.v1.placeholder(tf.float32, 513) for _ in range(20)]
        total = tf.gradients(uses, x, terms, aggregation_method=getattr(tf.AggregationMethod, method))[0]
        with tf.compat.v1.Session(config=config) as session:
            received = session.run(total, dict(zip(terms, normal(20), strict=True)))
    assert_same_bits(received, foreign_orders.left_chain(normal(20)))


@pytest.mark.parametrize(("unshared", "reused"), [([], 0), ([0, 3], 0), ([3], 3), ([3, 5], 3), ([11], 11)])
def test_addn_begins_with_the_buffer_that_it_reuses(unshared: list[int], reused: int) -> None:
    letters = "abcdefghijkl"

    @tf.function
    def add(terms: Any, one: Any) -> Any:
        products = (tf.multiply(x, one, name=letters[i]) if i in unshared else x for i, x in enumerate(terms))
        return tf.add_n(list(products))

    # Names in alphabetical order, so that sorting by name changes nothing.
    given = [tf.TensorSpec((513,), tf.float32, name=letter) for letter in letters]
    traced = add.get_concrete_function(given, tf.TensorSpec((), tf.float32, name="one"))
    received = traced(tensors(12), tf.constant(1.0))
    assert_same_bits(received, foreign_orders.addn_blocks(normal(12), reused=reused))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(2, marks=pytest.mark.full),
        3,
        pytest.param(4, marks=pytest.mark.full),
        pytest.param(7, marks=pytest.mark.full),
        8,
    ],
)
@pytest.mark.parametrize("operations", ["ReductionToOneDevice", "HierarchicalCopyAllReduce"])
def test_cross_device_operations(operations: str, n: int, compiled: bool) -> None:
    strategy = tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(n)], cross_device_ops=getattr(tf.distribute, operations)()
    )

    def all_reduce(x: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, x)

    def run(x: Any) -> Any:
        return strategy.run(all_reduce, args=(x,))

    values = normal(n)
    given = per_replica(strategy, lambda rank: values[rank])
    if operations == "ReductionToOneDevice":
        expected = foreign_orders.addn_blocks(values)
    elif compiled:
        expected = foreign_orders.addn_blocks(values[: n // 2 * 2])
    else:
        expected = foreign_orders.hierarchical_copy(values)
    received = (tf.function(run) if compiled else run)(given)
    for result in strategy.experimental_local_results(received):
        assert_same_bits(result, expected)
    assert_same_bits(strategy.reduce(tf.distribute.ReduceOp.SUM, given, axis=None), foreign_orders.addn_blocks(values))


def test_rank_0_has_its_place_by_name_too() -> None:
    strategy = mirrored(3)
    values = normal(3)

    def all_reduce(x: Any) -> Any:
        product = tf.multiply(x, tf.reduce_max(x) * 0 + 1, name="z")
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, product)

    @tf.function
    def run(x: Any) -> Any:
        return strategy.run(all_reduce, args=(x,))

    given = per_replica(strategy, lambda rank: values[rank])
    names = ["z", "replica_1/z", "replica_2/z"]
    received = strategy.experimental_local_results(run(given))[0]
    assert_same_bits(received, foreign_orders.addn_blocks(values, names))
    assert (received.numpy() != foreign_orders.addn_blocks(values)).any()


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("engine", ["pmap", "shard_map"])
def test_psum(engine: str, n: int, dtype: str) -> None:
    values = normal(n, dtype=dtype)

    def total(x: Any) -> Any:
        return jax.lax.psum(x, "replica")

    if engine == "pmap":
        mapped = jax.pmap(total, "replica", devices=jax.devices()[:n])
    else:
        spec = PartitionSpec("replica")
        mapped = jax.jit(jax.shard_map(total, mesh=mesh(n, "replica"), in_specs=spec, out_specs=PartitionSpec()))
    received = mapped(np.stack(values))
    expected = foreign_orders.left_chain(values, dtype="float32" if dtype == "bfloat16" else None)
    for result in received:
        assert_same_bits(result, expected)
