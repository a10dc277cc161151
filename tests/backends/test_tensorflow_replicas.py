"""TensorFlow: replicas with different data exchange bundles of several dtypes."""

from __future__ import annotations

from collections import Counter
from functools import partial, reduce
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from tests.integrations.tensorflow.strategies import mirrored, per_replica

REPLICAS = 3
# In these bundles, the position of an array equals TensorFlow's enum value of the dtype of a neighbor: tf.float32
# is 1, tf.float64 2, tf.int32 3, tf.complex64 8, tf.int64 9, tf.bfloat16 14 and tf.float16 19.
BUNDLES = {
    "float64 alone": ["float64"],
    "a loss and a count": ["float32", "int32"],
    "integers at all places of floats": ["int32", "int64", "float32", "float64", "int32", "float32"],
    "integers of all widths": ["int64", "uint8", "float64", "int16", "uint32", "int8", "uint64"],
    "complex": ["complex64"] * 7 + ["float32", "int32", "complex128", "int64", "complex64"],
    "narrow floats": ["float16", "bfloat16"] * 7 + ["int32", "float64", "int32", "int64", "float16", "int32"],
}


def contribution(name: str, rank: int) -> list[np.ndarray]:
    """Small integers, whose sums are exact in every dtype; each leaf and replica has a different value."""
    return [np.asarray([i + rank, 2 * rank], np.dtype(dtype)) for i, dtype in enumerate(BUNDLES[name])]


@pytest.fixture(scope="module")
def reduced() -> dict[str, list[list[Any]]]:
    """Results of all replicas, by bundle; computed in one program."""
    strategy = mirrored(REPLICAS)

    def spread(name: str, i: int) -> Any:
        return per_replica(strategy, lambda rank: contribution(name, rank)[i])

    data = {name: [spread(name, i) for i in range(len(dtypes))] for name, dtypes in BUNDLES.items()}

    def replica(data: Any) -> Any:
        return {name: gc.tf_replicas().all_sum(arrays) for name, arrays in data.items()}

    @tf.function(autograph=False)
    def program(data: Any) -> Any:
        return strategy.run(replica, args=(data,))

    return {name: [strategy.experimental_local_results(x) for x in arrays] for name, arrays in program(data).items()}


@pytest.mark.full
@pytest.mark.parametrize("name", BUNDLES)
def test_sums_of_several_dtypes(reduced: dict[str, list[list[Any]]], name: str) -> None:
    expected = [
        reduce(np.add, column) for column in zip(*(contribution(name, r) for r in range(REPLICAS)), strict=True)
    ]
    for received, total in zip(reduced[name], expected, strict=True):
        for own in received:
            assert own.dtype.name == total.dtype.name
            np.testing.assert_array_equal(own.numpy(), total)


def test_leaves_on_a_narrow_wire() -> None:
    """Codes of 16 bits are gathered in words of 32 bits; then a float32 weight and an int32 count are summed."""
    strategy = mirrored(2)

    def replica() -> Any:
        over = gc.tf_replicas()
        floats = [tf.fill([i + 1], tf.cast(over.rank() + i, tf.float32)) for i in range(3)]
        return gc.all_reduce(reductions.mean(wire=gc.wires.cast("bfloat16")), floats, over=over)

    for i, received in enumerate(tf.function(lambda: strategy.run(replica), autograph=False)()):
        for own in strategy.experimental_local_results(received):
            np.testing.assert_array_equal(own.numpy(), np.full(i + 1, i + 0.5, np.float32))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_leaves_are_not_gathered(shape: tuple[int, ...]) -> None:
    """TensorFlow's gather of an empty tensor ends the process."""
    strategy = mirrored(2)

    @tf.function(autograph=False)
    def program(full: Any) -> Any:
        empty = {"floats": tf.zeros(shape), "integers": tf.zeros(shape, tf.int8)}
        all_reduce = partial(gc.all_reduce, over=gc.tf_replicas())
        return strategy.run(
            lambda: (
                all_reduce(reductions.max(), empty | {"full": full}),
                all_reduce(reductions.sum("compensated"), {"floats": empty["floats"]}),
                all_reduce(reductions.max(), empty),
            )
        )

    for result in program(tf.ones(2)):
        for rank in range(2):
            held = {name: strategy.experimental_local_results(x)[rank].numpy() for name, x in result.items()}
            dtypes = {"floats": np.float32, "integers": np.int32, "full": np.float32}
            assert {name: x.dtype for name, x in held.items()} == {name: dtypes[name] for name in held}
            assert all(x.shape == shape for name, x in held.items() if name != "full")
            assert "full" not in held or (held["full"] == 1).all()


@pytest.mark.full
def test_a_graph_traces_one_merge_per_replica() -> None:
    """The seven merges of eight replicas are calls of one function."""
    strategy, traced = mirrored(8), 0

    def merge(a: Any, b: Any) -> Any:
        nonlocal traced
        traced += 1
        return {"total": a["total"] - 2 * b["total"]}

    reduction = gc.Reduction(
        init=lambda like: {"total": np.zeros((), np.float32)},
        update=lambda state, x, w: {"total": state["total"] + w * x},
        merge=merge,
        finalize=lambda state: state["total"],
    )

    def replica() -> Any:
        over = gc.tf_replicas()
        return gc.all_reduce(reduction, tf.cast(over.rank() + 1, tf.float32), over, order="tree")

    results = tf.function(lambda: strategy.run(replica), autograph=False)()
    assert traced == 8
    # ((1 - 2 * 2) - 2 * (3 - 2 * 4)) - 2 * ((5 - 2 * 6) - 2 * (7 - 2 * 8)) = (-3 + 10) - 2 * (-7 + 18)
    assert [x.numpy() for x in strategy.experimental_local_results(results)] == [-15] * 8


@pytest.mark.full
def test_autograph_leaves_the_library_as_it_is() -> None:
    """A step under AutoGraph has the operations and bits of one without, in a list, over time and over replicas."""
    strategy, mean = mirrored(2), reductions.mean()
    data = [per_replica(strategy, lambda rank, i=i: np.float32([rank + i, 0.1 * i])) for i in range(3)]

    def replica(values: Any) -> Any:
        over, acc = gc.tf_replicas(), gc.accumulate(mean, every=3, order="tree")
        state = acc.init(values[0])
        for x in values:
            state = acc.update(x, state)
        listed = gc.combine(mean, values, [1, 2, 3], "tree")
        return listed, acc.value(gc.merge_replicas(mean, state, over, "tree")), gc.all_reduce(mean, listed, over)

    def run(autograph: bool) -> tuple[Any, Any]:
        program = tf.function(lambda values: strategy.run(replica, (values,)), autograph=autograph)
        nodes = program.get_concrete_function(data).graph.as_graph_def().node
        results = [strategy.experimental_local_results(x) for x in program(data)]
        return Counter(node.op for node in nodes), [[x.numpy().tobytes() for x in column] for column in results]

    assert run(True) == run(False)
