"""Horovod's all-reduce over replicas in both frameworks, against plain arithmetic on small integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.horovod import AllReduce, LocalGradientAggregation
from tests.integrations.tensorflow.strategies import mirrored
from tests.spec.selection import cases

RANKS = 4
OPS: dict[str, Callable[[list[float]], float]] = {
    "average": lambda xs: sum(xs) / len(xs),
    "sum": sum,
    "min": min,
    "max": max,
    "product": math.prod,
}


strategy = partial(mirrored, RANKS)


def on_tensorflow(function: Callable[[Any, Any], Any], ranks: Any, compiled: bool = True) -> list[Any]:
    """Runs ``function(collective, arrays of this rank)`` on each replica."""
    given = strategy().experimental_distribute_values_from_function(
        lambda context: tf.nest.map_structure(tf.constant, ranks[context.replica_id_in_sync_group])
    )
    call: Any = lambda x: strategy().run(partial(function, gc.tf_replicas()), (x,))  # noqa: E731
    received = (tf.function(call) if compiled else call)(given)
    local = strategy().experimental_local_results
    return [tf.nest.map_structure(lambda x, rank=rank: local(x)[rank], received) for rank in range(RANKS)]


def on_jax(function: Callable[[Any, Any], Any], ranks: Any) -> list[Any]:
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *ranks)
    mapped = jax.pmap(lambda x: function(gc.jax_axis("rank"), x), "rank", devices=jax.devices()[:RANKS])
    received = mapped(stacked)
    return [jax.tree.map(lambda x, rank=rank: np.asarray(x)[rank], received) for rank in range(RANKS)]


FRAMEWORKS = {"tensorflow": on_tensorflow, "jax": on_jax}
GRADIENTS = [[np.float32([2 * r - 2, r + 1]), np.float32(r - 4)] for r in range(RANKS)]
SETS = {"all": None, "some": [3, 0, 2]}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("framework", "ranks"),
    [
        ("jax", "some"),
        ("tensorflow", "some"),
        ("jax", "all"),
        ("tensorflow", "all"),
    ],
)
def test_each_op(framework: str, ranks: str) -> None:
    """Ranks outside the process set get their inputs back; None keeps its position on every rank."""
    members = SETS[ranks] or range(RANKS)

    def function(over: Any, gradients: Any) -> Any:
        made = {op: AllReduce(over, op, process_set=SETS[ranks]) for op in OPS}  # pyright: ignore[reportArgumentType]
        results = {op: reduce([gradients[0], None, gradients[1]]) for op, reduce in made.items()}
        assert all(result[1] is None and made[op].size() == len(members) for op, result in results.items())
        return {op: [result[0], result[2]] for op, result in results.items()}

    for rank, result in enumerate(FRAMEWORKS[framework](function, GRADIENTS)):
        for op, rule in OPS.items():
            for i, received in enumerate(result[op]):
                elements = np.stack([GRADIENTS[m][i] for m in members]).reshape(len(members), -1).T
                combined = np.float32([rule([float(x) for x in xs]) for xs in elements]).reshape(received.shape)
                expected = combined if rank in members else GRADIENTS[rank][i]
                np.testing.assert_array_equal(np.asarray(received), expected, err_msg=op, strict=True)


@pytest.mark.full
@pytest.mark.parametrize("framework", ["jax", pytest.param("tensorflow", marks=pytest.mark.full)])
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel(framework: str) -> None:
    rows = np.float32([[2, 0, 0], [6, 0, 0], [0, 3, 0], [0, 0, 5]])

    def function(over: Any, gradients: Any) -> Any:
        return AllReduce(over, "adasum")(gradients), AllReduce(over, "adasum", process_set=[0, 3])(gradients)

    for rank, (whole, part) in enumerate(FRAMEWORKS[framework](function, [[row] for row in rows])):
        np.testing.assert_array_equal(whole[0], np.float32([4, 3, 5]))
        np.testing.assert_array_equal(part[0], np.float32([2, 0, 5]) if rank in (0, 3) else rows[rank])


FACTORS = {
    "prescale": ("sum", {"prescale_factor": 0.5}, 0.5),
    "postscale": ("max", {"postscale_factor": 4.0}, 4),
    "negative prescale turns the order": ("max", {"prescale_factor": -1.0}, None),
    "predivide": ("average", {"gradient_predivide_factor": 8.0}, 1),
    "all": ("average", {"gradient_predivide_factor": 2.0, "prescale_factor": 0.5, "postscale_factor": 8.0}, 4),
}


@pytest.mark.parametrize("framework", ["jax", pytest.param("tensorflow", marks=pytest.mark.full)])
def test_factors(framework: str) -> None:
    def function(over: Any, gradients: Any) -> Any:
        return {case: AllReduce(over, op, **kw)(gradients)[0] for case, (op, kw, _) in FACTORS.items()}  # pyright: ignore[reportArgumentType]

    columns = np.stack([g[0] for g in GRADIENTS]).T
    for result in FRAMEWORKS[framework](function, [[g[0]] for g in GRADIENTS]):
        for case, (op, _, factor) in FACTORS.items():
            rule, scale = (min, -1) if factor is None else (OPS[op], factor)
            expected = np.float32([rule([float(x) for x in xs]) * scale for xs in columns])
            np.testing.assert_array_equal(np.asarray(result[case]), expected, err_msg=case)


@pytest.mark.full
@pytest.mark.parametrize("op", ["average", "sum", "product", "adasum"])
def test_compressed_gradients(op: Any) -> None:
    """2049 needs twelve bits; float16 has eleven. Integers are not compressed."""
    integers = [] if op in ("average", "adasum") else [np.int32([2049])]

    def rank(number: Any) -> Any:
        given = [jnp.full(256, 2049.0), *map(jnp.asarray, integers), jnp.float32([3])]
        return AllReduce(gc.jax_axis("ranks"), op, compression="float16")(given)

    received = jax.vmap(rank, axis_name="ranks")(jnp.arange(2))
    both = {"average": lambda x: x, "sum": lambda x: 2 * x, "product": lambda x: x * x, "adasum": lambda x: x}[op]
    assert [x.dtype for x in received] == [np.float32, *(x.dtype for x in integers), np.float32]
    assert [x[0, 0].item() for x in received] == [both(2048), *(both(2049) for _ in integers), both(3)]
    np.testing.assert_array_equal(received[0], np.full((2, 256), both(2048)))


def sparse_of(rank: int) -> tf.IndexedSlices:
    """A gradient with rank + 1 rows."""
    values = tf.reshape(tf.range(2.0 * (rank + 1)), (rank + 1, 2)) + float(rank)
    return tf.IndexedSlices(values, tf.range(rank + 1) % 3, tf.constant([3, 2]))


@pytest.mark.parametrize("compiled", [False, True])
def test_no_gradient_stays_none_in_a_process_set(compiled: bool) -> None:
    def function(over: Any, x: Any) -> Any:
        assert AllReduce(over, process_set=[1])([None]) == [None]
        return x

    assert [int(x) for x in on_tensorflow(function, list(range(RANKS)), compiled)] == [*range(RANKS)]


def dense_of(rank: int) -> np.ndarray:
    dense = np.zeros((3, 2), np.float32)
    np.add.at(dense, np.arange(rank + 1) % 3, np.arange(2 * (rank + 1)).reshape(rank + 1, 2) + rank)
    return dense


@pytest.mark.sampled
@pytest.mark.parametrize(("ranks", "compiled"), cases([("all", False), ("some", True)], SETS, (False, True)))
def test_sparse_gradients_are_gathered(ranks: str, compiled: bool) -> None:
    members = sorted(SETS[ranks] or range(RANKS))

    def function(over: Any, arrays: Any) -> Any:
        rows = tf.IndexedSlices(arrays["values"], arrays["indices"], tf.constant([3, 2]))
        made = {op: AllReduce(over, op, process_set=SETS[ranks]) for op in ("sum", "average")}  # pyright: ignore[reportArgumentType]
        results = {op: reduce([arrays["dense"], rows]) for op, reduce in made.items()}
        densely = AllReduce(over, "sum", sparse_as_dense=True, process_set=SETS[ranks])([rows])
        return {
            "indices": results["sum"][1].indices,
            "average": results["average"][1].values,
            "sum": results["sum"][1].values,
            "dense": results["sum"][0],
            "as dense": densely[0],
        }

    slices = [sparse_of(rank) for rank in range(RANKS)]
    given = [{"values": x.values, "indices": x.indices, "dense": np.float32(rank)} for rank, x in enumerate(slices)]
    for rank, result in enumerate(on_tensorflow(function, given, compiled)):
        sources = members if rank in members else [rank]
        values = np.concatenate([slices[r].values for r in sources])
        np.testing.assert_array_equal(result["indices"], np.concatenate([slices[r].indices for r in sources]))
        np.testing.assert_array_equal(result["sum"], values)
        divided = values / np.float32(len(members)) if rank in members else values
        np.testing.assert_array_equal(result["average"], divided)
        assert result["dense"].numpy() == sum(sources)
        np.testing.assert_array_equal(result["as dense"], sum(dense_of(r) for r in sources))


@pytest.mark.parametrize("average", [False, True])
def test_local_aggregation_on_replicas(average: bool) -> None:
    """Replicas accumulate locally; at the boundary all get the total, but local variables only their replica's sum."""
    with strategy().scope():
        shared, local = tf.Variable(tf.zeros(2)), tf.Variable(0.0)
    aggregation = LocalGradientAggregation(
        2, AllReduce(gc.tf_replicas(), "sum"), average_aggregated_gradients=average, mode="eager"
    )
    aggregation.register_local_var(local)
    passes = []
    for n in range(4):
        given = [[g[0] * np.float32(n + 1), g[1]] for g in GRADIENTS]
        passes.append(
            on_tensorflow(lambda _, x: aggregation.compute_gradients(x, [shared, local]), given, compiled=False)
        )
    divisor = 2 if average else 1
    for rank in range(RANKS):
        own, alone = GRADIENTS[rank]
        total = sum(g[0] for g in GRADIENTS)
        expected = [[own, alone], [3 * total / divisor, 2 * alone / RANKS / divisor]]
        expected += [[3 * own, alone], [7 * total / divisor, 2 * alone / RANKS / divisor]]
        for received, wanted in zip(passes, expected, strict=True):
            for x, y in zip(received[rank], wanted, strict=True):
                np.testing.assert_array_equal(x, np.float32(y))


def test_no_collective_in_a_conditional_of_a_replica() -> None:
    aggregation = LocalGradientAggregation(2, AllReduce(gc.tf_replicas()), mode="eager")
    with strategy().scope():
        variable = tf.Variable(0.0)
    with pytest.raises(gc.GradCombineError, match="on 4 replicas"):
        on_tensorflow(lambda _, x: aggregation.compute_gradients(x, [variable]), [[g[1]] for g in GRADIENTS])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "predivide": (
        {"op": "sum", "gradient_predivide_factor": 2.0},
        "^gradient_predivide_factor not supported with op != Average$",
    ),
    "predivide by 0": ({"gradient_predivide_factor": 0.0}, "finite factors"),
    "factor": ({"prescale_factor": math.nan}, "finite factors"),
    "compressed maxima": ({"op": "max", "compression": "float16"}, "no compression for 'max'"),
    "no ranks": ({"process_set": []}, "different ranks"),
    "a rank twice": ({"process_set": [0, 0]}, "different ranks"),
    "a negative rank": ({"process_set": [-1]}, "different ranks"),
    "a rank too high": ({"process_set": [1]}, "ranks below 1"),
    "scaled integers": ({"op": "sum", "prescale_factor": 2.0}, r"leaf \[1\]: expected no factors"),
    "sparse maxima": ({"op": "max"}, r"leaf \[2\]: expected dense gradients for 'max'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    settings, text = BAD[case]
    gradients = [tf.constant(1.0), tf.constant(1), sparse_of(0)]
    with pytest.raises(gc.GradCombineError, match=text):
        AllReduce(gc.LOCAL, **settings)(gradients)
