"""Windows updated in place have the bits of `gradcombine.combine`, and a failed call writes nothing."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions
from gradcombine.integrations.keras import Accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep
from tests.integrations.tensorflow.strategies import FULL, RUNS, given, mirrored, per_replica, replace
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("tensorflow")

EVERY = 5

CALLS = {
    **{name: lambda step, *_, run=run: run(step) for name, run in RUNS.items()},
    "function_in_xla": lambda step, *batch: _in_xla(tf.function(step), *batch),
}
"""Functions of a step and an example of its batch."""


def _in_xla(step: Any, *batch: Any) -> Any:
    """A step that was already traced as a standalone graph and then runs inside a compiled one."""
    step.get_concrete_function(*batch)
    return tf.function(lambda *batch: step(*batch), jit_compile=True)


QUICK = [*(("mean", run) for run in CALLS), ("sum", "eager")]


@pytest.mark.parametrize(("name", "run"), cases(QUICK, ("mean", "sum"), CALLS))
def test_windows_have_the_bits_of_a_left_chain(name: str, run: str) -> None:
    reduction = getattr(reductions, name)()
    rng = np.random.default_rng(0)
    gradients = rng.standard_normal((3, EVERY, 33), np.float32)
    gradients[1, 2, 0] = np.nan  # must not reach the third window
    gradients[:, :, 1] = -0.0
    weights = rng.uniform(0.5, 8, (3, EVERY)).astype(np.float32)
    weights[2, 0], gradients[2, 0, 2] = 0, np.inf  # the first contribution of this window is masked
    weights[0, 3], gradients[0, 3, 2] = 0, np.nan
    w = tf.Variable(tf.zeros(33))
    step = CALLS[run](AccumulatedStep(given, [w], replace, every=EVERY, reduction=reduction), w, tf.zeros(()))
    for window, scales in zip(gradients, weights, strict=True):
        applied = [bool(step(tf.constant(g), tf.constant(x))[0]) for g, x in zip(window, scales, strict=True)]
        assert applied == [False] * (EVERY - 1) + [True]
        expected = gc.combine(reduction, list(window), scales.tolist())
        np.testing.assert_array_equal(w.numpy().view(np.int32), expected.view(np.int32))


DTYPES = (np.float16, ml_dtypes.bfloat16, np.float64, np.complex64)
QUICK_DTYPES = [(np.float16, 1), (ml_dtypes.bfloat16, 0), (ml_dtypes.bfloat16, 3), (np.float64, 3), (np.complex64, 3)]


@pytest.mark.parametrize(("dtype", "weight"), cases(QUICK_DTYPES, DTYPES, (0, 1, 3)))
def test_known_weights_and_other_dtypes(dtype: Any, weight: int) -> None:
    drawn = np.random.default_rng(1).standard_normal((4, 7)).astype(dtype)
    a, b = tf.Variable(tf.zeros(7, drawn.dtype)), tf.Variable(tf.zeros(2))
    # One weight is a constant of the trace, the other is not; the second variable has only one gradient.
    known = AccumulatedStep(lambda g: ([g, None], weight), [a, b], replace, every=2)
    step = tf.function(known)
    for pair in (drawn[:2], drawn[2:]):
        for g in pair:
            step(tf.constant(g))
        expected = gc.combine(reductions.mean(), list(pair), [weight] * 2)
        assert a.numpy().tobytes() == expected.tobytes()
    assert step.experimental_get_tracing_count() == 1


def test_a_variable_without_a_gradient_in_some_traces_starts_each_window_empty() -> None:
    a, b = tf.Variable(tf.zeros(2)), tf.Variable(tf.zeros(2))
    step = tf.function(AccumulatedStep(lambda g, both: ([g, g if both else None], 1), [a, b], replace, every=2))
    g = tf.constant([2.0, 4.0])
    for both, expected in ((True, [2, 4]), (False, [1, 2])):
        step(g, both)
        step(g, True)
        assert b.numpy().tolist() == expected


WRAPPED = {
    "clipped": (reductions.clipped(reductions.mean(), 5.0), [[6, 8], [0, 0]], [1.5, 2]),
    "zeroed": (reductions.zeroed(reductions.mean()), [[np.inf, 1], [2, 4]], [2, 4]),
}


QUICK_WRAPPED = [("clipped", "eager"), ("clipped", "function_in_xla"), ("zeroed", "function"), ("zeroed", "compiled")]


@pytest.mark.parametrize(("name", "run"), cases(QUICK_WRAPPED, WRAPPED, CALLS))
def test_what_a_reduction_makes_of_contributions_is_added(name: str, run: str) -> None:
    reduction, contributions, expected = WRAPPED[name]
    w = tf.Variable(tf.zeros(2))
    step = AccumulatedStep(lambda g: ([g], 1), [w], replace, every=2, reduction=reduction)
    call = CALLS[run](step, w)
    for g in contributions:
        call(tf.constant(g, tf.float32))
    assert w.numpy().tolist() == expected


@FULL
def test_no_more_operations_are_traced_than_by_keras_own_accumulation() -> None:
    specs = [tf.TensorSpec([2])] * 24

    def size(make: Any) -> int:
        variables = [keras.Variable(tf.zeros(2)) for _ in specs]
        call = make(variables)
        graph = tf.function(call, autograph=False).get_concrete_function(specs).graph.as_graph_def()
        return len(graph.node) + sum(len(function.node_def) for function in graph.library.function)

    def peer(variables: Any) -> Any:
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4)
        optimizer.build(variables)
        return lambda gradients: optimizer.apply(gradients, variables)

    def accumulate(variables: Any) -> Any:
        optimizer = Accumulate(keras.optimizers.Adam(), every=4)
        optimizer.build(variables)
        return lambda gradients: optimizer.apply(gradients, variables)

    limit = size(peer)
    assert size(lambda v: AccumulatedStep(lambda g: (g, 1), v, keras.optimizers.Adam(), every=4)) <= limit
    assert size(lambda v: AccumulatedStep(lambda g: (g, g[0][0]), v, keras.optimizers.Adam(), every=4)) <= limit
    assert size(accumulate) <= limit


@pytest.mark.full
@pytest.mark.parametrize("failing", [pytest.param("assertion", marks=FULL), "checked"])
def test_a_failure_inside_a_graph_writes_nothing_on_any_replica(failing: str) -> None:
    strategy = mirrored(2)

    def gradients(g: tf.Tensor, weight: tf.Tensor) -> Any:
        if failing == "assertion":
            tf.debugging.assert_less(weight, 9.0)
        return [g] * 16, weight

    reduction = reductions.checked(reductions.mean()) if failing == "checked" else reductions.mean()
    with strategy.scope():
        variables = [tf.Variable(tf.zeros(3)) for _ in range(16)]
        module = AccumulatedStep(gradients, variables, replace, every=2, reduction=reduction)
    step = tf.function(module)
    ones = per_replica(strategy, lambda r: np.full(3, 1, np.float32))
    good = per_replica(strategy, lambda r: np.float32(1))
    bad = per_replica(strategy, lambda r: np.float32(-np.inf if failing == "checked" else 9) if r else np.float32(1))
    step(ones, good)
    held = [x.numpy() for group in module.windows for x in group]
    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(ones, bad)
        assert int(module.position["step"].numpy()) == 1
        for before, x in zip(held, (x for group in module.windows for x in group), strict=True):
            np.testing.assert_array_equal(x.numpy(), before, strict=True)
    assert bool(step(ones, good)[0])
    assert variables[-1].numpy().tolist() == [1, 1, 1]


def test_a_window_is_rounded_once_by_its_wire() -> None:
    """514 needs nine bits and is rounded to bfloat16's eight; the two terms of 257 are not rounded before the sum."""
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(tf.zeros((40, 50)))
        reduction = reductions.mean(wire=gc.wires.cast("bfloat16"))
        step = tf.function(AccumulatedStep(given, [w], replace, every=2, reduction=reduction))
        for _ in range(2):
            step(per_replica(strategy, lambda r: tf.fill((40, 50), (257.0, 1.0)[r])), 1.0)
        for x in strategy.experimental_local_results(w):
            np.testing.assert_array_equal(x.numpy(), np.full((40, 50), (512 + 2) / 4, np.float32))
