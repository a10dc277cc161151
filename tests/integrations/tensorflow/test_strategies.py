"""Every strategy gives the bits of a plain list; unsupported uses raise and write nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.tensorflow import AccumulatedStep
from tests.integrations.tensorflow.strategies import (
    FULL,
    STRATEGIES,
    feed,
    given,
    local,
    mirrored,
    per_replica,
    replace,
    scope,
)
from tests.spec.selection import named

pytestmark = pytest.mark.needs("tensorflow")

EVERY = 4
NAMES = (*STRATEGIES, *(pytest.param(name, marks=FULL) for name in ("mirrored_8", "central_2")))


@pytest.mark.sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reduction", named(("mean",), {"mean": reductions.mean(), "sum": reductions.sum()}))
def test_a_strategy_gives_the_bits_of_one_list(name: str, reduction: Any) -> None:
    with scope(name) as strategy:
        n = strategy.num_replicas_in_sync
        drawn = np.random.default_rng(n).standard_normal((n, 2 * EVERY, 33), np.float32)
        weights = np.random.default_rng(n).uniform(0.5, 8, drawn.shape[:2]).astype(np.float32)
        w = tf.Variable(tf.zeros(33))
        step = tf.function(AccumulatedStep(given, [w], replace, every=EVERY, order="tree", reduction=reduction))
        for window in (slice(0, EVERY), slice(EVERY, 2 * EVERY)):
            for k in range(window.start, window.stop):
                arrays = per_replica(strategy, lambda r, k=k: drawn[r, k])
                applied, _ = step(arrays, per_replica(strategy, lambda r, k=k: weights[r, k]))
                assert bool(applied) == (k == window.stop - 1)
            listed = list(drawn[:, window].reshape(-1, 33))
            expected = gc.combine(reduction, listed, weights[:, window].ravel().tolist(), order="tree")
            for copy in local(strategy, w):
                np.testing.assert_array_equal(copy, expected, strict=True)
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_reduced_each_in_its_own_way(name: str) -> None:
    kinds = {"loss": reductions.mean(), "correct": reductions.sum(), "largest": reductions.max()}
    metrics = reductions.per_leaf(kinds)

    def evaluate(loss: tf.Tensor, weight: tf.Tensor) -> Any:
        found = {"loss": loss, "correct": tf.cast(weight, tf.int32), "largest": loss}
        return gc.all_reduce(metrics, found, over=gc.tf_replicas(), weight=weight)

    with scope(name) as strategy:
        n = strategy.num_replicas_in_sync
        losses = per_replica(strategy, lambda r: np.float32(r))
        weights = per_replica(strategy, lambda r: np.float32(1 if r < n - 1 else 3))
        found = tf.function(lambda *x: strategy.run(evaluate, args=x))(losses, weights)
    loss = np.float32((sum(range(n - 1)) + 3 * (n - 1)) / np.float32(n + 2))
    expected = {"loss": loss, "correct": np.int32(n + 2), "largest": np.float32(n - 1)}
    for key, value in expected.items():
        assert [x.tolist() for x in local(strategy, found[key])] == [value] * len(local(strategy, found[key]))


def test_a_window_length_that_differs_between_replicas_is_refused() -> None:
    def length(index: Any) -> Any:
        return tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group) + 1

    with mirrored(2).scope():
        w = tf.Variable(tf.ones(3))
        module = AccumulatedStep(given, [w], replace, every=length)
        for call in (module, tf.function(module)):
            with pytest.raises(
                (gc.GradCombineError, tf.errors.InvalidArgumentError), match="same on all replicas, received another"
            ):
                feed(mirrored(2), call, range(1))
            assert [x.numpy().tolist() for pair in module.windows for x in pair][:2] == [[0, 0, 0]] * 2
            assert module.position["step"].numpy() == 0
            assert w.numpy().tolist() == [1, 1, 1]


def test_an_integer_variable_has_no_mean() -> None:
    with mirrored(2).scope():
        w = tf.Variable(tf.zeros(3, tf.int64))
        with pytest.raises(gc.GradCombineError, match=r"mean: leaf \[0\]: expected a dtype that is float or complex"):
            AccumulatedStep(given, [w], replace, every=2)


@pytest.mark.parametrize("run", [lambda f: f, tf.function], ids=["eager", "function"])
def test_a_collective_in_cross_replica_context_is_refused(run: Callable[[Any], Any]) -> None:
    reduce = run(lambda x: gc.all_reduce(reductions.mean(), x, over=gc.tf_replicas()))
    with mirrored(2).scope(), pytest.raises(gc.GradCombineError, match="received a call in cross-replica context"):
        reduce(tf.ones(3))


def test_a_variable_with_a_layout_is_refused() -> None:
    mesh = dtensor.create_mesh([("data", 2)], devices=["CPU:0", "CPU:1"])
    w = dtensor.DVariable(dtensor.copy_to_mesh(tf.zeros(3), dtensor.Layout.replicated(mesh, 1)))
    with pytest.raises(gc.GradCombineError, match=r"leaf \[0\]: expected a variable without a DTensor layout"):
        AccumulatedStep(given, [w], replace, every=2)
