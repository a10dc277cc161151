"""TensorFlow: small leaves of exact sums are processed as one array."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, tree
from tests.foreign_orders.data import assert_same_bits


@pytest.mark.full
@pytest.mark.parametrize("how", ["eager", "graph", "xla"])
def test_small_leaves_of_tensorflow_have_the_bits_of_numpy(how: str) -> None:
    rng, dtypes = np.random.default_rng(3), [np.dtype(x) for x in (np.float32, ml_dtypes.bfloat16, np.float16)]
    shapes = [(), (1,), (0,), (2, 0), (3, 5), (17,), (4097,)]

    def grads(seed: int) -> list[Any]:
        made = [np.asarray(rng.normal(size=shapes[i % 7]) * 2.0 ** rng.integers(-9, 9)) for i in range(21)]
        made[0] = np.asarray([np.nan, np.inf, 1][seed % 3])
        return [None if i % 11 == seed + 3 else x.astype(dtypes[i % 3]) for i, x in enumerate(made)]

    red = reductions.mean("exact")

    def program(like: Any, terms: Any, weight: Any) -> Any:
        one = red.update(red.update(red.init(like), terms[0], weight), terms[1], 0.3)
        merged = red.merge(one, red.update(red.init(like), terms[2]))
        return one.value, red.clear(one).value, red.finalize(merged), gc.combine(red, terms, [weight, 0.3, 1])

    flat, structure = tree.flatten((grads(99), [grads(seed) for seed in range(3)], np.float32(0.7)))
    here = [i for i, x in enumerate(flat) if x is not None]

    def call(*arrays: Any) -> list[Any]:
        given = dict(zip(here, arrays, strict=True))
        return tree.flatten(program(*tree.unflatten(structure, [given.get(i) for i in range(len(flat))])))[0]

    run = call if how == "eager" else tf.function(call, autograph=False, jit_compile=how == "xla")
    results, expected = run(*(tf.convert_to_tensor(flat[i]) for i in here)), call(*(flat[i] for i in here))
    for a, b in zip(results, expected, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_same_bits(a.numpy(), b)


@pytest.mark.full
def test_graphs_of_exact_sums_grow_by_what_takes_small_leaves_in_and_out() -> None:
    red = reductions.mean("exact")
    calls = {
        "update": lambda state, grads: red.update(state, grads, 0.3).value,
        "finalize": lambda state, grads: red.finalize(state),
        "merge": lambda state, grads: red.merge(state, state).value,
        "combine": lambda state, grads: gc.combine(red, [grads] * 3, [1, 0.3, 1]),
    }

    def operations(call: Any, leaves: int) -> int:
        grads = [tf.ones((i % 5 + 1, 3)) for i in range(leaves)]
        graph = tf.function(call, autograph=False).get_concrete_function(red.init(grads), grads).graph.as_graph_def()
        return len(graph.node) + sum(len(called.node_def) for called in graph.library.function)

    # Separately, each leaf would add 206, 477, 65 and 881.
    most = {"update": 30, "finalize": 20, "merge": 30, "combine": 50}
    for name, call in calls.items():
        assert operations(call, 20) - operations(call, 10) <= 10 * most[name], name


@pytest.mark.full
def test_loops_of_exact_sums_are_traced_once_per_shape() -> None:
    def loops(updates: int) -> int:
        @tf.function(jit_compile=True, autograph=False)
        def program(values: Any) -> Any:
            state = reduction.init(values)
            for _ in range(updates):
                state = reduction.update(state, values)
            return reduction.finalize(state)

        graph = program.get_concrete_function([tf.ones(8), tf.ones(9)]).graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        return sum("While" in node.op for node in nodes)

    reduction = reductions.sum("exact")
    assert loops(4) == loops(2) > 0
