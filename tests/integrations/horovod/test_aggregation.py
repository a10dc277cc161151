"""Local gradient aggregation agrees exactly with a plain Python reference of Horovod's semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine.integrations.horovod import AllReduce, LocalGradientAggregation
from tests.spec.selection import cases

RANKS = 10
SUM = AllReduce(gc.LOCAL, "sum")
Pass = Sequence[int | None]


class Restatement:
    """Horovod's documented semantics on integers; all ranks have the same gradients."""

    def __init__(self, k: int, mode: str, average: bool, count: int) -> None:
        self.k, self.mode, self.average = k, mode, average
        self.sums: list[int | None] = [None] * count
        self.counter = self.iterations = self.applied = self.allreduces = 0

    def one_pass(self, grads: Pass) -> tuple[list[float | None], bool]:
        """Returns the gradients and whether they are applied."""
        if self.counter == 0:
            self.sums = [None if s is None else 0 for s in self.sums]
        pairs = list(zip(self.sums, grads, strict=True))
        self.sums = [s if g is None else (s or 0) + g for s, g in pairs]
        self.counter += 1
        if self.counter == self.k:
            self.counter = 0
            self.allreduces += any(s is not None for s in self.sums)
            self.applied += 1
            divisor = self.k if self.average else 1
            return [None if s is None else np.float32(RANKS * s) / np.float32(divisor) for s in self.sums], True
        self.iterations += 1
        known = [None if s is None else g or 0 for s, g in zip(self.sums, grads, strict=True)]
        return (known if self.mode == "graph" else list(self.sums)), False


class Counters:
    """Stands in for an optimizer."""

    def __init__(self) -> None:
        self.iterations, self.applied, self.allreduces = (tf.Variable(0) for _ in range(3))

    def all_reduce(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        assert len(gradients) == len(variables)
        self.allreduces.assign_add(1)
        return [RANKS * x for x in gradients]

    def apply(self) -> None:
        self.applied.assign_add(1)


def run(passes: Sequence[Pass], k: int, mode: Any, average: bool, compiled: bool) -> None:
    """Compares every pass; gradients of shapes (2,), (), (2,), ... are filled with the number of the pass."""
    count = len(passes[0])
    variables = [tf.Variable(tf.zeros((2,) if i % 2 == 0 else ())) for i in range(count)]
    counters, expected = Counters(), Restatement(k, mode, average, count)
    aggregation = LocalGradientAggregation(k, counters.all_reduce, average_aggregated_gradients=average, mode=mode)

    def one_pass(values: list[Any]) -> Any:
        gradients = [None if x is None else x * tf.ones_like(v) for x, v in zip(values, variables, strict=True)]
        received = aggregation.compute_gradients(gradients, variables)
        applied = aggregation.apply_gradients(counters.apply, counters, list(zip(received, variables, strict=True)))
        return received, applied, aggregation.counter

    call = tf.function(one_pass) if compiled else one_pass
    for grads in passes:
        received, applied, counter = call([None if g is None else tf.constant(float(g)) for g in grads])
        wanted, wanted_applied = expected.one_pass(grads)
        assert [x is None for x in received] == [x is None for x in wanted]
        for x, y, v in zip(received, wanted, variables, strict=True):
            if x is not None:
                np.testing.assert_array_equal(x, np.full(v.shape, y, np.float32), strict=True)
        assert (bool(applied), int(counter)) == (wanted_applied, expected.counter)
        for name in ("iterations", "applied", "allreduces"):
            assert getattr(counters, name).numpy() == getattr(expected, name), name


MODES = ("eager", "graph")


@pytest.mark.full
@pytest.mark.parametrize(("mode", "average"), cases([("eager", True), ("graph", False)], MODES, (False, True)))
@settings(max_examples=15)
@given(k=st.integers(1, 4), passes=st.lists(st.tuples(*[st.none() | st.integers(-9, 9)] * 3), min_size=1, max_size=9))
def test_any_none_in_eager_execution(k: int, passes: list[Pass], average: bool, mode: str) -> None:
    if k == 1:
        passes = [passes[0]]
    run(passes, k, mode, average, compiled=False)


PATTERNS = {"none absent": (1, 2), "one": (3,), "first absent": (None, 1, 2), "all absent": (None, None)}


QUICK = [*(("eager", 3, pattern) for pattern in PATTERNS), ("graph", 3, "first absent"), ("graph", 1, "none absent")]


@pytest.mark.parametrize(("mode", "k", "pattern"), cases(QUICK, MODES, (1, 3), PATTERNS))
def test_in_a_function(mode: str, k: int, pattern: str) -> None:
    passes = [[None if g is None else g * n - 4 for g in PATTERNS[pattern]] for n in range(1, 8)]
    run(passes, k, mode, average=True, compiled=True)


@pytest.mark.parametrize(("mode", "k"), cases([("eager", 2), ("graph", 3), (None, 2)], (*MODES, None), (2, 3)))
def test_in_a_graph_of_tensorflow_1(mode: Any, k: int) -> None:
    """With a TensorFlow 1 optimizer and global step; a gradient of None keeps its position."""
    expected = Restatement(k, mode or "graph", False, 2)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable, other = (tf.compat.v1.Variable(tf.zeros(2), use_resource=True) for _ in range(2))
        step = tf.compat.v1.train.get_or_create_global_step()
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
        aggregation = LocalGradientAggregation(k, lambda gradients, _: [RANKS * x for x in gradients], mode=mode)
        given_value = tf.compat.v1.placeholder(tf.float32, ())
        gradients = aggregation.compute_gradients([None, given_value * tf.ones(2)], [other, variable])
        pairs = list(zip(gradients, [other, variable], strict=True))
        train = aggregation.apply_gradients(
            lambda: optimizer.apply_gradients(pairs[1:], global_step=step), optimizer, pairs, global_step=step
        )
        session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
        moved = 0.0
        assert gradients[0] is None
        for n in range(1, 3 * k):
            (_, wanted), applied = expected.one_pass([None, n])
            assert wanted is not None
            received, was_applied = session.run([gradients[1], train], {given_value: n})
            moved -= wanted if applied else 0
            np.testing.assert_array_equal(received, np.full(2, wanted, np.float32))
            assert was_applied == applied
            np.testing.assert_array_equal(session.run(variable), np.full(2, moved, np.float32))
            assert session.run([aggregation.counter, step]) == [expected.counter, n]


def test_graph_mode_is_chosen_in_a_graph() -> None:
    """Created outside, it also works inside a tf.function, as in Horovod."""
    aggregation = LocalGradientAggregation(3, lambda gradients, variables: gradients)
    variable = tf.Variable(0.0)
    one_pass = tf.function(lambda x: aggregation.compute_gradients([x], [variable])[0])
    assert [one_pass(tf.constant(x)).numpy() for x in (1.0, 2.0)] == [1, 3]


SLICES = ([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], [2, 0, 2], [4, 2])


def slices() -> tf.IndexedSlices:
    values, indices, shape = SLICES
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(shape))


DENSE = np.float32([[3, 4], [0, 0], [6, 8], [0, 0]])


@pytest.mark.parametrize("compiled", [False, True])
def test_the_text_for_sparse_gradients(compiled: bool) -> None:
    """The previous pass stays in the window."""
    aggregation = LocalGradientAggregation(2, SUM, mode="eager")
    variable = tf.Variable(tf.zeros((4, 2)))
    aggregation.compute_gradients([tf.ones((4, 2))], [variable])
    call: Any = tf.function(aggregation.compute_gradients) if compiled else aggregation.compute_gradients
    with pytest.raises(gc.GradCombineError) as caught:
        call([slices()], [variable])
    text = "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False."
    assert str(caught.value) == text
    assert int(aggregation.counter) == 1
    np.testing.assert_array_equal(aggregation.compute_gradients([tf.ones((4, 2))], [variable])[0], np.full((4, 2), 2.0))


@pytest.mark.parametrize("mode", MODES)
def test_sparse_as_dense(mode: Any) -> None:
    aggregation = LocalGradientAggregation(2, SUM, sparse_as_dense=True, mode=mode)
    variable = tf.Variable(tf.zeros((4, 2)))
    first, second = (aggregation.compute_gradients([slices()], [variable])[0] for _ in range(2))
    np.testing.assert_array_equal(first, DENSE)
    np.testing.assert_array_equal(second, 2 * DENSE)


def test_one_pass_a_step_leaves_sparse_gradients_sparse() -> None:
    (received,) = passed([slices()], [tf.Variable(tf.zeros((4, 2)))], AllReduce(gc.LOCAL, "sum", prescale_factor=2.0))
    assert isinstance(received, tf.IndexedSlices)
    np.testing.assert_array_equal(received.values, 2 * np.float32(SLICES[0]))


@pytest.mark.parametrize(("scale", "expected"), [(True, 3 / 4), (False, 3)])
@pytest.mark.parametrize("size", [4, lambda: 4])
@pytest.mark.parametrize("k", [1, 2])
def test_local_variables_are_not_exchanged(k: int, size: Any, scale: bool, expected: float) -> None:
    local, shared = tf.Variable(0.0), tf.Variable(0.0)
    exchanged = []

    def all_reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:
        exchanged.append([v is shared for v in variables])
        return [10 * x for x in gradients]

    aggregation = LocalGradientAggregation(k, all_reduce, size=size, scale_local_gradients=scale)
    aggregation.register_local_var(local)
    for g in [3.0] if k == 1 else [1.0, 2.0]:
        received = aggregation.compute_gradients([tf.constant(g), tf.constant(g)], [local, shared])
    assert [float(x) for x in received] == [expected, 30]
    assert exchanged == [[True]]


@pytest.mark.parametrize("registered", [lambda x: x, lambda x: x.value])
@pytest.mark.parametrize("passed_on", [lambda x: x, lambda x: x.value])
def test_a_keras_variable_and_its_tensorflow_variable_are_one(registered: Any, passed_on: Any) -> None:
    local = keras.Variable(0.0)
    aggregation = LocalGradientAggregation(1, lambda gradients, _: [10 * x for x in gradients], size=2)
    aggregation.register_local_var(registered(local))
    assert float(aggregation.compute_gradients([tf.constant(3.0)], [passed_on(local)])[0]) == 1.5


def test_a_failed_all_reduce_can_be_tried_again() -> None:
    fails = [True]

    def all_reduce(gradients: list[Any], variables: list[Any]) -> list[Any]:
        if fails.pop():
            raise ConnectionError
        return gradients

    aggregation, variable = LocalGradientAggregation(2, all_reduce), tf.Variable(0.0)
    aggregation.compute_gradients([tf.constant(1.0)], [variable])
    with pytest.raises(ConnectionError):
        aggregation.compute_gradients([tf.constant(2.0)], [variable])
    fails.append(False)
    assert aggregation.compute_gradients([tf.constant(2.0)], [variable])[0].numpy() == 3


def test_narrow_gradients_are_added_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    aggregation, variable = LocalGradientAggregation(3, SUM), tf.Variable(tf.zeros((), tf.bfloat16))
    for x in (256, 1, 1):
        (received,) = aggregation.compute_gradients([tf.constant(x, tf.bfloat16)], [variable])
    assert received.dtype == tf.bfloat16 and float(received) == 258


def test_nan_stays_in_its_window() -> None:
    aggregation, variable = LocalGradientAggregation(2, SUM, mode="eager"), tf.Variable(0.0)
    received = [aggregation.compute_gradients([tf.constant(x)], [variable])[0].numpy() for x in (np.nan, 1.0, 2.0, 3.0)]
    np.testing.assert_array_equal(received, [np.nan, np.nan, 2, 5])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_keras_optimizer(compiled: bool) -> None:
    """Momentum changes at boundaries only; iterations count every pass."""
    variable = keras.Variable(np.float32([8, 8]))
    optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
    optimizer.build([variable])
    aggregation = LocalGradientAggregation(2, SUM, average_aggregated_gradients=True)

    def one_pass(x: Any) -> Any:
        gradients = aggregation.compute_gradients([x], [variable])
        pairs = list(zip(gradients, [variable], strict=True))
        return aggregation.apply_gradients(lambda: optimizer.apply_gradients(pairs), optimizer, pairs)

    call = tf.function(one_pass) if compiled else one_pass
    applied = [bool(call(tf.constant([x, 2 * x]))) for x in (1.0, 3.0, 2.0, 2.0, 5.0)]
    assert applied == [False, True, False, True, False]
    # Velocities -(2, 4) and -(2, 4) / 2 - (2, 4).
    np.testing.assert_array_equal(variable.numpy(), [8 - 2 - 3, 8 - 4 - 6])
    assert int(optimizer.iterations) == 5


def passed(gradients: list[Any], variables: list[Any], allreduce: Any = SUM, local: int = 0, **settings: Any) -> Any:
    aggregation = LocalGradientAggregation(1, allreduce, **settings)
    for variable in variables[:local]:
        aggregation.register_local_var(variable)
    return aggregation.compute_gradients(gradients, variables)


NO_PASSES = r"^backward_passes_per_step must be > 0$"
ONE = [tf.constant(1.0)], [tf.Variable(0.0)]
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no passes": (lambda: LocalGradientAggregation(0, SUM), NO_PASSES),
    "negative passes": (lambda: LocalGradientAggregation(-1, SUM), NO_PASSES),
    "a half pass": (lambda: LocalGradientAggregation(1.5, SUM), "an integer backward_passes_per_step"),  # pyright: ignore[reportArgumentType]
    "lengths": (lambda: passed([None], []), "0 gradients"),
    "a short answer of the all-reduce": (lambda: passed(*ONE, lambda *_: []), "1 gradients from allreduce"),
    "no size, for local variables": (lambda: passed(*ONE, lambda gradients, _: gradients, 1), "expected a size"),
    "a size of 0": (lambda: passed(*ONE, local=1, size=lambda: 0), "a size of 1 or more"),
    "text as a size": (lambda: passed(*ONE, local=1, size=lambda: "a"), "a size of 1 or more"),
    "text from the all-reduce": (lambda: passed(*ONE, lambda *_: ["a"]), r"\[0\]: .*from allreduce, received 'a'"),
    "None from the all-reduce": (lambda: passed(*ONE, lambda *_: [None]), r"\[0\]: .*from allreduce, received None"),
    "another dtype": (lambda: passed(*ONE, lambda *_: [np.ones((), np.float64)]), "float32 of shape .* float64"),
    "another shape": (lambda: passed(*ONE, lambda *_: [np.ones(3, np.float32)]), r"of shape \(\) from allreduce"),
    "a local gradient of integers": (
        lambda: passed([tf.constant(1)], [tf.Variable(0)], local=1, size=4),
        "float or complex gradients, to divide them, received int32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, text = BAD[case]
    with pytest.raises(gc.GradCombineError, match=text):
        call()


@pytest.mark.parametrize("average", [False, True])
def test_the_all_reduce_may_return_numpy_arrays(average: bool) -> None:
    aggregation = LocalGradientAggregation(
        2, lambda gradients, _: [10 * x.numpy() for x in gradients], average_aggregated_gradients=average
    )
    results = [aggregation.compute_gradients([tf.constant([x])], [tf.Variable([0.0])])[0] for x in (1.0, 2.0)]
    assert isinstance(results[1], tf.Tensor) and results[1].numpy() == (15 if average else 30)
