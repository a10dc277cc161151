"""The accumulated training step without a strategy, and under strategies of one, two and four replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.tensorflow import AccumulatedStep
from tests.integrations.tensorflow.strategies import (
    FULL,
    STRATEGIES,
    exact_mean,
    feed,
    given,
    gradient_at,
    local,
    microbatch,
    mirrored,
    per_replica,
    replace,
    scope,
    subtract,
)
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("tensorflow")

MODES = ("eager", "function")


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Iterator[tf.distribute.Strategy]:
    """The strategy, whose scope is active during the test."""
    with scope(request.param) as chosen:
        yield chosen


REPLICATED = pytest.mark.parametrize("strategy", [pytest.param("none", marks=FULL), *STRATEGIES[1:]], indirect=True)
"""The quick tier has only replicated strategies, which trace a superset of the functions."""


@pytest.fixture(params=MODES)
def run(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Wraps a step for eager or tf.function execution."""
    return tf.function if request.param == "function" else lambda step: step


@pytest.mark.parametrize("order", [pytest.param("sequential", marks=FULL), "tree"])
def test_windows_match_exact_arithmetic_on_every_replica(strategy: Any, run: Any, order: Any) -> None:
    w = tf.Variable(tf.zeros(3))
    step = run(AccumulatedStep(given, [w], subtract, every=2, order=order))
    expected = np.zeros(3, np.float32)
    for k in (0, 2, 4):
        assert feed(strategy, step, range(k, k + 1)) == [False]
        np.testing.assert_array_equal(w.numpy(), expected, strict=True)
        assert feed(strategy, step, range(k + 1, k + 2)) == [True]
        expected = expected - exact_mean(strategy.num_replicas_in_sync, range(k, k + 2))
        for copy in local(strategy, w):
            np.testing.assert_array_equal(copy, expected, strict=True)
    if run is tf.function:
        assert step.experimental_get_tracing_count() == 1


@pytest.mark.sampled
@REPLICATED
def test_flush_applies_a_partial_window_with_its_true_weight(strategy: Any, run: Any) -> None:
    n, w = strategy.num_replicas_in_sync, tf.Variable(tf.zeros(3))
    module = AccumulatedStep(given, [w], replace, every=4)
    step, flush = run(module), run(module.flush)
    assert feed(strategy, step, range(2)) == [False] * 2
    assert flush()
    np.testing.assert_array_equal(w.numpy(), exact_mean(n, range(2)), strict=True)
    assert not flush()
    assert feed(strategy, step, range(4, 8)) == [False] * 3 + [True]
    assert not flush()
    assert feed(strategy, step, range(2, 6)) == [False] * 3 + [True]
    np.testing.assert_array_equal(w.numpy(), exact_mean(n, range(2, 6)), strict=True)


def test_nan_stays_in_its_window_and_out_of_any_where_its_weight_is_0(strategy: Any, run: Any) -> None:
    last = strategy.num_replicas_in_sync - 1
    w = tf.Variable(tf.zeros(3))
    step = run(AccumulatedStep(given, [w], replace, every=2))
    twos = per_replica(strategy, lambda r: np.full(3, 2, np.float32))
    bad = per_replica(strategy, lambda r: np.full(3, np.nan if r == last else 2, np.float32))
    one, masked = (per_replica(strategy, lambda r, x=x: np.float32(x if r == last else 1)) for x in (1, 0))
    for first, expected in (((bad, one), np.nan), ((twos, one), 2), ((bad, masked), 2)):
        step(*first)
        step(twos, one)
        np.testing.assert_array_equal(w.numpy(), np.full(3, expected, np.float32), strict=True)


@pytest.mark.sampled
@REPLICATED
def test_variables_without_gradient_are_not_touched(strategy: Any, run: Any) -> None:
    w, still = keras.Variable(np.zeros(3, np.float32)), keras.Variable(np.ones(2, np.float32))
    optimizer = keras.optimizers.AdamW(weight_decay=0.5)
    step = run(AccumulatedStep(lambda g, weight: ([None, g], weight), [still, w], optimizer, every=2))
    assert feed(strategy, step, range(4)) == [False, True] * 2
    np.testing.assert_array_equal(still.numpy(), np.ones(2, np.float32), strict=True)
    assert (w.numpy() != 0).all()


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.5),
    "adam": lambda: keras.optimizers.Adam(0.125),
    "adamw_clipped": lambda: keras.optimizers.AdamW(0.125, weight_decay=0.25, global_clipnorm=0.5),
    "loss_scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0),
}


QUICK = [("none", "adam"), *(("mirrored_2", name) for name in ("adamw_clipped", "loss_scaled"))]


@pytest.mark.parametrize(
    ("name", "optimizer"), cases(QUICK, ("none", "one_device", "mirrored_2", "mirrored_4"), OPTIMIZERS)
)
def test_keras_optimizers_run_at_the_boundary_alone_on_the_mean_itself(name: str, optimizer: str) -> None:
    with scope(name) as strategy:
        n, inner, w = strategy.num_replicas_in_sync, OPTIMIZERS[optimizer](), tf.Variable(tf.ones(3))
        step = tf.function(AccumulatedStep(given, [w], inner, every=2))
        iterations = []
        for k in range(6):
            feed(strategy, step, range(k, k + 1))
            iterations.append(int(inner.iterations.numpy()))
        trained = local(strategy, w)
    assert iterations == [0, 1, 1, 2, 2, 3]
    plain, alone = OPTIMIZERS[optimizer](), tf.Variable(tf.ones(3))
    plain.build([alone])
    update = tf.function(lambda gradient: plain.apply([gradient], [alone]))
    for k in (0, 2, 4):
        update(tf.constant(exact_mean(n, range(k, k + 2))))
    for copy in trained:
        np.testing.assert_array_equal(copy, alone.numpy(), strict=True)


def test_a_variable_that_is_listed_twice_is_refused() -> None:
    """Tied weights, of which two layers list one: both gradients would be applied, each of them the total."""
    w, b = tf.Variable(tf.ones(3)), tf.Variable(tf.ones(3))
    message = r"^AccumulatedStep: leaf \[2\]: expected each variable once, received that of \[0\] again"
    with pytest.raises(gc.GradCombineError, match=message):
        AccumulatedStep(given, [w, b, w], keras.optimizers.SGD(1.0), every=2)


@pytest.mark.parametrize("wrap", [lambda x: x, keras.optimizers.LossScaleOptimizer])
def test_an_optimizer_of_other_variables_is_refused(wrap: Any) -> None:
    inner, w, other = keras.optimizers.Adam(0.125), tf.Variable(tf.ones(3)), tf.Variable(tf.ones(3))
    inner.build([w])
    message = r"^AccumulatedStep: leaf \[1\]: expected an optimizer that is not built, or built with this variable"
    with pytest.raises(gc.GradCombineError, match=message):
        AccumulatedStep(given, [w, other], wrap(inner), every=2)


def test_an_optimizer_may_have_more_variables() -> None:
    """As in Keras, for instance if some are frozen now."""
    optimizer, w = keras.optimizers.SGD(1.0), tf.Variable(tf.ones(3))
    optimizer.build([tf.Variable(1.0), w])
    feed(tf.distribute.get_strategy(), AccumulatedStep(given, [w], optimizer, every=2), range(2))
    np.testing.assert_array_equal(w.numpy(), 1 - exact_mean(1, range(2)), strict=True)


@pytest.mark.full
@pytest.mark.parametrize("size", [pytest.param(1, marks=FULL), 2])
def test_mean_of_300_bfloat16_ones_is_1(size: int) -> None:
    with mirrored(size).scope():
        w = tf.Variable(tf.zeros(2, tf.bfloat16))
        module = AccumulatedStep(lambda: ([tf.ones(2, tf.bfloat16)], 1), [w], replace, every=300)

        @tf.function
        def epoch() -> None:
            for _ in tf.range(300):
                module()

        epoch()
        assert w.numpy().tolist() == [1, 1]


def test_the_whole_step_compiles_without_a_strategy() -> None:
    w = tf.Variable(tf.zeros(3))
    step = tf.function(AccumulatedStep(given, [w], keras.optimizers.SGD(1.0), every=2), jit_compile=True)
    assert feed(tf.distribute.get_strategy(), step, range(4)) == [False, True] * 2
    np.testing.assert_array_equal(w.numpy(), -exact_mean(1, range(2)) - exact_mean(1, range(2, 4)), strict=True)
    assert step.experimental_get_tracing_count() == 1


@REPLICATED
def test_a_compiled_gradient_function_and_its_outputs(strategy: Any) -> None:
    w = tf.Variable(tf.ones(3))

    @tf.function(jit_compile=True)
    def compiled(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * x)
        return tape.gradient(loss, [w]), loss

    def gradients(x: tf.Tensor, weight: tf.Tensor) -> Any:
        found, loss = compiled(x)
        return found, weight, {"loss": loss}

    step = tf.function(AccumulatedStep(gradients, [w], subtract, every=2))
    for k in range(2):
        _, outputs = step(*microbatch(strategy, k))
        for rank, loss in enumerate(strategy.experimental_local_results(outputs["loss"])):
            assert loss.numpy() == gradient_at(rank, k).sum()
    expected = 1 - exact_mean(strategy.num_replicas_in_sync, range(2))
    np.testing.assert_array_equal(w.numpy(), expected, strict=True)


@REPLICATED
def test_autograph_converts_the_functions_of_the_caller(strategy: Any) -> None:
    w = tf.Variable(tf.zeros(3))

    def gradients(x: tf.Tensor, weight: tf.Tensor) -> Any:
        if weight > 2:
            x = 2 * x
        return [x], 1

    def apply(found: list[Any], variables: list[Any]) -> None:
        if tf.reduce_all(found[0] > 2):
            variables[0].assign(found[0])

    step = tf.function(AccumulatedStep(gradients, [w], apply, every=1))
    for weight, expected in ((1, 0), (3, 4)):
        step(
            per_replica(strategy, lambda r: np.full(3, 2, np.float32)),
            per_replica(strategy, lambda r, x=weight: np.int32(x)),
        )
        np.testing.assert_array_equal(w.numpy(), np.full(3, expected, np.float32), strict=True)


def test_sparse_gradients_become_dense(strategy: Any, run: Any) -> None:
    table = tf.Variable(tf.zeros((4, 2)))

    def gradients(rows: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        found = tape.gradient(loss, [table])
        assert isinstance(found[0], tf.IndexedSlices)
        return found, 1

    step = run(AccumulatedStep(gradients, [table], replace, every=2))
    for rows in ([0, 1, 1, 1], [1, 1, 1, 3]):
        step(per_replica(strategy, lambda r, rows=rows: np.int32(rows)))
    np.testing.assert_array_equal(table.numpy(), np.float32([[0.5] * 2, [3] * 2, [0] * 2, [0.5] * 2]), strict=True)


def test_windows_of_a_length_that_changes(strategy: Any, run: Any) -> None:
    step = run(AccumulatedStep(given, [tf.Variable(tf.zeros(3))], replace, every=lambda index: index + 1))
    assert feed(strategy, step, range(6)) == [True, False, True, False, False, True]


@pytest.mark.parametrize("order", ["sequential", pytest.param("tree", marks=FULL)])
def test_a_number_that_comes_again_counts_once(strategy: Any, run: Any, order: Any) -> None:
    """In windows that end with a flush; the same number counts again in the next window."""
    w, size = tf.Variable(tf.zeros(3)), strategy.num_replicas_in_sync
    settings = {"reduction": gc.reductions.numbered(gc.reductions.mean(), 2 * size), "order": order, "max_every": 8}
    module = AccumulatedStep(given, [w], subtract, every=gc.UNTIL_FLUSH, **settings)
    step, expected = run(module), np.zeros(3, np.float32)
    for _ in range(2):
        for k in (1, 0, 1, 1, 0):
            step(*microbatch(strategy, k), number=per_replica(strategy, lambda r, k=k: np.int32(k * size + r)))
        gc.ledger.require_once(*module.states())
        assert module.flush()
        expected -= exact_mean(size, range(2))
        np.testing.assert_array_equal(w.numpy(), expected)
    with pytest.raises(gc.GradCombineError, match=f"from 0 to {2 * size - 1}, or -1, received {2 * size}"):
        module(*microbatch(strategy, 0), number=per_replica(strategy, lambda r: np.int32(2 * size)))


def test_a_number_that_comes_again_counts_toward_a_window_of_calls() -> None:
    w, numbered = tf.Variable(tf.zeros(())), gc.reductions.numbered(gc.reductions.mean(), 3)
    step = AccumulatedStep(lambda x: ([x], 1.0), [w], subtract, every=3, reduction=numbered)
    assert [bool(step(tf.constant(x), number=k)[0]) for k, x in ((0, 1.0), (1, 2.0), (1, 2.0))] == [False, False, True]
    assert w.numpy() == -1.5
    with pytest.raises(gc.GradCombineError):
        gc.ledger.require_once(*step.states())


@REPLICATED
def test_microbatches_have_the_numbers_that_calls_give_them(strategy: Any, run: Any) -> None:
    """So microbatches of a window that other replicas left open can be redistributed."""
    w, size = tf.Variable(tf.zeros(3)), strategy.num_replicas_in_sync
    numbered = gc.reductions.numbered(gc.reductions.mean(), 2 * size)
    module = AccumulatedStep(given, [w], subtract, every=2, reduction=numbered)
    step = run(module)
    for k in (1, 0):
        number = per_replica(strategy, lambda r, k=k: np.int32(k * size + r))
        step(*microbatch(strategy, k), number=number)
        held = [gc.ledger.read(state).held for state in module.states()]
        assert held == [tuple(x * size + r for x in range(k, 2)) for r in range(size)]
    gc.ledger.require_once(*module.states())
    np.testing.assert_array_equal(w.numpy(), -exact_mean(size, range(2)))
    plain = AccumulatedStep(given, [w], subtract, every=2)
    with pytest.raises(gc.GradCombineError, match="no number, or a reduction that is numbered"):
        plain(*microbatch(strategy, 0), number=number)


@pytest.mark.parametrize("make", [lambda: gc.reductions.measured(gc.reductions.mean()), gc.reductions.moments])
def test_a_reduction_of_another_structure_is_refused(make: Any) -> None:
    w = tf.Variable(1.0)
    step = AccumulatedStep(lambda x: ([x], 1), [w], lambda gradients, variables: None, 1, reduction=make())
    with pytest.raises(gc.GradCombineError, match="a reduction whose result has the structure of the gradients"):
        step(tf.constant(1.0))
