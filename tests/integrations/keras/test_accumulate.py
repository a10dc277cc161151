"""When the inner optimizer is applied, and with which gradients."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import gradcombine as gc
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import (
    ON_JAX,
    WITH_SEVERAL,
    Replace,
    bits,
    matrix_and_vector,
    microbatches,
    stepper,
    tensor,
)
from tests.spec.selection import FULL, cases

REDUCTIONS = {"mean": gc.reductions.mean, "sum": gc.reductions.sum}


QUICK = [(3, "mean", "sequential"), (3, "mean", "tree"), (1, "sum", "sequential"), (3, "sum", "tree")]


@pytest.mark.parametrize(("every", "reduction", "order"), cases(QUICK, (1, 3), ("mean", "sum"), ("sequential", "tree")))
def test_the_inner_optimizer_gets_the_bits_of_combine(every: int, reduction: Any, order: Any, mode: str) -> None:
    variables, weights = matrix_and_vector(), [3, 1, 2, 5, 7, 1]
    step = stepper(Accumulate(Replace(), every, reduction=reduction, order=order), variables, mode)
    given = microbatches(0, 6)
    for first in range(0, 6, every):
        for k in range(first, first + every):
            before = bits(variables)
            step(given[k], weights[k])
            assert k == first + every - 1 or bits(variables) == before
        window = slice(first, first + every)
        expected = gc.combine(REDUCTIONS[reduction](), given[window], weights[window], order)
        assert bits(variables) == [x.tobytes() for x in expected]


@pytest.mark.parametrize("precision", ["compensated", pytest.param("exact", marks=pytest.mark.slow)])
def test_precisions(precision: Any, mode: str) -> None:
    variables, given = matrix_and_vector(), microbatches(1, 3)
    step = stepper(Accumulate(Replace(), 3, precision=precision), variables, mode)
    for k in range(3):
        step(given[k], k + 1)
    expected = gc.combine(gc.reductions.mean(precision), given, [1, 2, 3])
    assert bits(variables) == [x.tobytes() for x in expected]


def schedule() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 2], [1.0, 0.5, 0.125])


INNER = {
    "schedule": lambda: keras.optimizers.SGD(schedule(), momentum=0.9),
    "clip": lambda: keras.optimizers.AdamW(0.1, weight_decay=0.1, global_clipnorm=0.5),
    "ema": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2, clipvalue=0.1),
    "scaled": lambda: keras.optimizers.SGD(0.5, loss_scale_factor=1024.0),
    "dynamic": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), dynamic_growth_steps=2),
    "name": lambda: "sgd",
}


@pytest.mark.parametrize("name", INNER)
def test_windows_are_the_inner_optimizers_steps(name: str) -> None:
    """State, schedules and moving averages equal those of the inner optimizer run on the combined gradients."""
    accumulated, alone = matrix_and_vector(), matrix_and_vector()
    optimizer, inner = Accumulate(INNER[name](), 2), keras.optimizers.get(INNER[name]())
    step, reference = stepper(optimizer, accumulated, "eager"), stepper(inner, alone, "eager")
    given = microbatches(2, 6)
    for k in range(0, 6, 2):
        step(given[k], 1)
        step(given[k + 1], 3)
        reference(gc.mean(given[k : k + 2], [1, 3]))
    assert bits(accumulated) == bits(alone)
    assert bits(optimizer.inner_optimizer.variables) == bits(inner.variables)
    assert int(optimizer.iterations) == 3 and float(optimizer.learning_rate) == float(inner.learning_rate)


def test_keras_counts_microbatches_in_schedules_and_this_does_not() -> None:
    rates = []
    for optimizer in (
        keras.optimizers.SGD(schedule(), gradient_accumulation_steps=2),
        Accumulate(keras.optimizers.SGD(schedule()), 2),
    ):
        step = stepper(optimizer, matrix_and_vector(), "eager")
        for given in microbatches(3, 4):
            step(given)
        rates.append(float(optimizer.learning_rate))
    assert rates == [0.125, 0.5]


@pytest.mark.full
def test_narrow_gradients_are_accumulated_in_float32() -> None:
    """The mean of 300 ones in bfloat16 is 0.85 in Keras and 1 here."""
    means = []
    for optimizer in (
        keras.optimizers.SGD(-1.0, gradient_accumulation_steps=300),
        Accumulate(keras.optimizers.SGD(-1.0), 300),
    ):
        w = keras.Variable([0.0], dtype="bfloat16")
        step = stepper(optimizer, [w], "compiled")
        for _ in range(300):
            step([np.ones(1, np.float32)])
        means.append(float(w[0]))
    assert means == [0.8515625, 1.0]


def test_the_window_may_have_another_dtype() -> None:
    optimizer = Accumulate(Replace(), 2, dtype="float64" if not ON_JAX else "bfloat16")
    optimizer.build(matrix_and_vector())
    dtypes = {x.dtype for x in optimizer.variables if "_window_" in x.path}
    assert dtypes == {"bfloat16" if ON_JAX else "float64"}


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "missing", [pytest.param((0, 0), marks=FULL), (1, 1), (0, 1), pytest.param((1, 0), marks=FULL)]
)
def test_a_gradient_that_is_none_adds_nothing(missing: tuple[int, int], mode: str) -> None:
    """Keras loses the variable's window on TensorFlow, and leaks it into the next window on JAX.

    In (0, 1), a graph traced before the variable had any gradient ends a window that has one.
    """
    variables, given = matrix_and_vector(), microbatches(4, 4)
    step = stepper(Accumulate(Replace(), 2), variables, mode)
    for first, position in zip((0, 2), missing, strict=True):
        window = given[first : first + 2]
        window[position] = [window[position][0], None]
        step(window[0])
        step(window[1])
        expected = gc.mean(window)
        assert bits(variables) == [x.tobytes() for x in expected]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_keras_loses_or_leaks_the_window_of_a_gradient_that_is_none_at_its_end() -> None:
    a, b = keras.Variable([0.0]), keras.Variable([0.0])
    step = stepper(keras.optimizers.SGD(-1.0, gradient_accumulation_steps=2), [a, b], "eager")
    ones, hundreds = np.ones(1, np.float32), np.full(1, 100, np.float32)
    step([ones, hundreds])
    step([ones, None])
    assert float(b[0]) == 0
    step([ones, ones])
    step([ones, ones])
    # The mean of the second window is 1.
    assert float(b[0]) == (51 if ON_JAX else 1)


def test_a_variable_without_any_gradient_is_left_alone(mode: str) -> None:
    used, unused = matrix_and_vector()
    optimizer = Accumulate(keras.optimizers.SGD(1.0, weight_decay=0.5), 2)
    step = stepper(optimizer, [used, unused], mode)
    given = [np.ones((2, 3)), None]
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        any(step(given) for _ in range(2))
    assert used.numpy().max() < 1 and unused.numpy().tolist() == [1.0] * 5


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("flushed", [False, True])
def test_momentum_moves_no_variable_without_a_gradient_in_the_window(mode: str, flushed: bool) -> None:
    """As in Keras, whose optimizers skip such variables: for example those of a layer that is frozen now."""
    used, frozen = matrix_and_vector()
    optimizer = Accumulate(keras.optimizers.SGD(1.0, momentum=0.5), 3 if flushed else 2)
    step = stepper(optimizer, [used, frozen], mode)

    def window(*given: Any) -> tuple[list[float], bool]:
        before = used.numpy()
        for present in given:
            step([np.ones((2, 3)), np.ones(5) if present else None])
        assert bool(optimizer.flush()) is flushed
        return frozen.numpy().tolist(), bool((used.numpy() != before).all())

    assert window(True, True) == ([0.0] * 5, True)
    assert window(False, False) == ([0.0] * 5, True)
    # The mean of 1 and nothing is 0.5, and the velocity that of the first window, -1.
    assert window(True, False) == ([-1.0] * 5, True)
    assert window(False, True) == ([-2.0] * 5, True)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_average_overwrites_a_variable_whose_gradient_is_none(mode: str) -> None:
    """As in Keras, where each third step sets all variables to their moving averages."""
    variables = [keras.Variable(np.float32(1)) for _ in range(3)]
    averaged = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3)
    step, seen = stepper(Accumulate(averaged, 2), variables, mode), []
    for first, second in (((1, 1, 1),) * 2, ((1, 1, 1),) * 2, ((1, 1, None), (1, None, None)), ((1, 1, 1),) * 2):
        step(first)
        step(second)
        seen.append([float(x.numpy()) for x in variables])
    # The averages after two windows are -0.5; in the third, the variables are -2, -1.5 and -1 before it ends.
    assert seen == [[0] * 3, [-1] * 3, [-1.25, -1, -0.75], [-2.25, -2, -1.75]]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_skipped_window_moves_no_average_of_a_variable_whose_gradient_is_none(mode: str) -> None:
    variables = [keras.Variable(np.float32(1)) for _ in range(3)]
    averaged = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    optimizer = Accumulate(keras.optimizers.LossScaleOptimizer(averaged, 1.0), 2)
    step = stepper(optimizer, variables, mode)
    for first, second in (((1, 1, 1),) * 2, ((1, 1, 1),) * 2, ((np.inf, 1, None), (1, None, None))):
        step(first)
        step(second)
    assert [float(x.numpy()) for x in variables] == [-1] * 3 and int(optimizer.iterations) == 2
    averages = optimizer.inner_optimizer.inner_optimizer._model_variables_moving_average
    assert [float(x.numpy()) for x in averages] == [-0.5] * 3


@WITH_SEVERAL
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_each_variable_may_have_its_own_optimizer() -> None:
    """As many optimizers as variables; Keras raises for one without gradients, which a compiled step may have."""
    variables = matrix_and_vector()
    inner = {x.path: keras.optimizers.SGD(rate, momentum=0.5) for x, rate in zip(variables, (1.0, 0.5), strict=True)}
    optimizer = Accumulate(keras.optimizers.MultiOptimizer(lambda x: inner[x.path]), 2)
    step = stepper(optimizer, variables, "compiled")
    matrix, vector, seen = np.ones((2, 3), np.float32), np.ones(5, np.float32), []
    for last in ([matrix, vector], [matrix, None], [None, vector], [matrix, None]):
        step([matrix, last[1] if len(seen) == 3 else vector])
        step(last)
        seen.append([float(x.numpy().ravel()[0]) for x in variables])
    # The means are 1 and 1, 1 and 0.5, 0.5 and 1, 1 and nothing; the first two windows' velocities are -1, -0.5 ...
    assert seen == [[0.0, 0.5], [-1.5, 0.0], [-2.75, -0.75], [-4.375, -0.75]]


def test_a_microbatch_of_weight_0_and_an_earlier_window_reach_nothing(mode: str) -> None:
    variables, given = matrix_and_vector(), microbatches(5, 4)
    poison = [np.full_like(x, np.nan) for x in given[0]]
    step = stepper(Accumulate(Replace(), 2), variables, mode)
    step(given[0], 1)
    step(poison, 1)
    step(poison, 0)
    step(given[3], 2)
    assert bits(variables) == [x.tobytes() for x in given[3]]


def by_index(index: Any) -> Any:
    return index + 1


def test_a_window_may_have_a_length_by_its_index(mode: str) -> None:
    variables = matrix_and_vector()
    optimizer = Accumulate(Replace(), by_index)
    step = stepper(optimizer, variables, mode)
    applied = []
    for given in microbatches(6, 6):
        before = int(optimizer.iterations)
        step(given)
        applied.append(int(optimizer.iterations) - before)
    assert applied == [1, 0, 1, 0, 0, 1]


def test_flush_divides_by_the_true_weight() -> None:
    variables, given = matrix_and_vector(), microbatches(7, 5)
    optimizer = Accumulate(Replace(), 3)
    assert not optimizer.flush()
    step = stepper(optimizer, variables, "eager")
    for k in range(2):
        step(given[k], k + 1)
    assert bool(optimizer.flush()) and not bool(optimizer.flush())
    assert bits(variables) == [x.tobytes() for x in gc.mean(given[:2], [1, 2])]
    for k in range(2, 5):
        step(given[k], 1)
    assert bits(variables) == [x.tobytes() for x in gc.mean(given[2:])]
    assert not bool(optimizer.flush()) and int(optimizer.iterations) == 2


def test_a_weight_may_be_given_around_the_call() -> None:
    """Sets the weight in a train_step, where Keras calls the optimizer without one; an explicit argument wins."""
    variables, given = matrix_and_vector(), microbatches(8, 4)
    optimizer = Accumulate(Replace(), 4)
    step = stepper(optimizer, variables, "eager")
    tensors = [[tensor(x) for x in gradients] for gradients in given]
    with optimizer.weighted(3):
        optimizer.apply(tensors[0])
        with optimizer.weighted(5):
            optimizer.apply(tensors[1])
        step(given[2], 7)
    optimizer.apply(tensors[3])
    assert bits(variables) == [x.tobytes() for x in gc.mean(given, [3, 5, 7, 1])]
