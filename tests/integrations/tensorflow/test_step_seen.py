"""The record of variables that have had a gradient is part of the step's state, decided at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.integrations.tensorflow import AccumulatedStep
from tests.integrations.tensorflow.strategies import RUNS, mirrored, replace, scope
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("tensorflow")

PLACES = [
    ("none", "eager"),
    ("none", "function"),
    ("none", "compiled"),
    ("mirrored_2", "eager"),
    ("mirrored_2", "function"),
]
WAYS = ("checkpoint", "states", "earlier checkpoint")
ONE = tf.constant(1.0)


def made(apply: Any, *second: float | None, every: int = 2, **settings: Any) -> tuple[AccumulatedStep, list[Any]]:
    """A step over three variables of value 1: the call chooses the second gradient, the third is always None."""
    variables = [tf.Variable(1.0) for _ in range(3)]

    def gradients(x: tf.Tensor, number: int = 0) -> Any:
        chosen = second[number]
        return [x, None if chosen is None else chosen * x, None], 1

    return AccumulatedStep(gradients, variables, apply, every=every, **settings), variables


def values(variables: list[Any]) -> list[float]:
    return [float(x.numpy()) for x in variables]


def by_keras(optimizer: Any, *second: float) -> tuple[list[Any], list[Any]]:
    """The three variables and the optimizer's after Keras steps without a gradient for the third."""
    variables = [tf.Variable(1.0) for _ in range(3)]
    optimizer.build(variables)
    for x in second:
        optimizer.apply([ONE, tf.constant(x)], variables[:2])
    return variables, optimizer.variables


def earlier(step: AccumulatedStep) -> tf.Module:
    """The saved state of a step from before `seen` was saved."""
    module = tf.Module()
    for name in ("position", "windows", "layout", "metrics_position", "metrics_windows", "_apply", "_optimizer"):
        if hasattr(step, name):
            setattr(module, name, getattr(step, name))
    return module


def hand_over(way: str, before: AccumulatedStep, step: AccumulatedStep, folder: Path) -> None:
    if way == "states":
        step.load_states(before.states())
        return
    path = tf.train.Checkpoint(step=before if way == "checkpoint" else earlier(before)).save(folder / "window")
    tf.train.Checkpoint(step=step).restore(path).assert_consumed()


@pytest.mark.parametrize(
    ("way", "place", "ends", "traced"),
    cases(
        [
            ("checkpoint", PLACES[2], "call", True),
            ("states", PLACES[1], "call", False),
            ("checkpoint", PLACES[3], "flush", False),
            ("states", PLACES[4], "flush", False),
        ],
        WAYS,
        PLACES,
        ("call", "flush"),
        (False, True),
        pairwise=True,
    ),
)
def test_a_restored_window_is_applied_as_a_whole(
    way: str, place: tuple[str, str], ends: str, traced: bool, tmp_path: Path
) -> None:
    """Even by a new step whose function has no gradient for the second variable and may have been traced already."""
    strategy, run = place
    with scope(strategy):
        before, _ = made(replace, 2.0)
        before(tf.constant(3.0))
        step, variables = made(replace, None)
        call = RUNS[run](lambda: step.flush() if ends == "flush" else step(ONE)[0])
        if traced and run != "eager":
            tf.function(call).get_concrete_function()
        hand_over(way, before, step, tmp_path)
        assert call()
    assert values(variables) == ([3, 6, 1] if ends == "flush" else [2, 3, 1])


@pytest.mark.full
@pytest.mark.parametrize("run", cases([("compiled",)], RUNS))
def test_zeros_are_a_gradient_in_a_restored_window_and_in_later_ones(run: str, tmp_path: Path) -> None:
    """Weight decay and Adam's moments treat them as Keras does, where a gradient of None skips the variable."""
    before, _ = made(keras.optimizers.AdamW(0.5, weight_decay=0.5), 0.0)
    RUNS[run](before)(ONE)
    optimizer = keras.optimizers.AdamW(0.5, weight_decay=0.5)
    step, variables = made(optimizer, None)
    hand_over("checkpoint", before, step, tmp_path)
    call = RUNS[run](step)
    call(ONE)
    call(ONE), call(ONE)
    expected, _ = by_keras(keras.optimizers.AdamW(0.5, weight_decay=0.5), 0.0, 0.0)
    np.testing.assert_allclose(values(variables), values(expected), rtol=1e-6)
    assert values(expected)[1:] == [0.5625, 1]


@pytest.mark.full
@pytest.mark.parametrize("run", cases([("function",)], RUNS))
def test_a_gradient_of_an_earlier_window_is_not_forgotten(run: str, tmp_path: Path) -> None:
    """Its momentum continues after a restart as without one."""
    results = []
    for restarts in (False, True):
        step, variables = made(keras.optimizers.SGD(1.0, momentum=0.5), 1.0, None, every=1)
        optimizer = step._optimizer
        RUNS[run](lambda step=step: step(ONE, 0))()
        if restarts:
            held = tf.train.Checkpoint(step=step, variables=variables, optimizer=optimizer)
            path = held.save(tmp_path / "all")
            step, variables = made(keras.optimizers.SGD(1.0, momentum=0.5), None, None, every=1)
            new = tf.train.Checkpoint(step=step, variables=variables, optimizer=step._optimizer)
            new.restore(path).assert_consumed()
        RUNS[run](lambda step=step: step(ONE, 1))()
        results.append(values(variables))
    assert results == [[-1.5, -0.5, 1]] * 2


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["none", "mirrored_2"])
def test_the_function_that_ends_a_window_need_not_have_been_traced_last(strategy: str) -> None:
    with scope(strategy):
        optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
        step, variables = made(optimizer, None, 0.0)
        train = tf.function(step)
        for number in (0, 0, 1, 0):
            train(tf.constant(0.0), number)
    assert values(variables) == [0.25, 0.5, 1]


@pytest.mark.full
def test_a_gradient_that_was_traced_and_never_run_is_none() -> None:
    step, variables = made(keras.optimizers.SGD(1.0, weight_decay=0.5), None, 1.0)
    train = tf.function(step)
    train.get_concrete_function(ONE, 1)
    for _ in range(2):
        train(ONE, 0)
    train(ONE, 0)
    tf.function(step.flush)()
    assert values(variables)[1:] == [1, 1]


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: keras.optimizers.AdamW(0.5, weight_decay=0.5, amsgrad=True),
    "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.5, weight_decay=0.5, nesterov=True),
    "averaged": lambda: keras.optimizers.Adam(0.5, weight_decay=0.5, use_ema=True, ema_momentum=0.5),
    "clipped": lambda: keras.optimizers.Adagrad(0.5, weight_decay=0.5, global_clipnorm=0.5),
    "nadam": lambda: keras.optimizers.Nadam(0.5, weight_decay=0.5),
    "ftrl": lambda: keras.optimizers.Ftrl(0.5, weight_decay=0.5),
    "loss_scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.5, weight_decay=0.5), 4.0),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "place"),
    cases([("adamw", PLACES[2]), ("averaged", PLACES[1]), ("sgd", PLACES[4])], OPTIMIZERS, PLACES),
)
def test_slots_of_a_variable_without_gradient_are_kept_as_by_keras(
    name: str, place: tuple[str, str], tmp_path: Path
) -> None:
    """Another variable has a gradient only in the restored window; all variables of the optimizer are compared."""
    strategy, run = place
    with scope(strategy):
        before, _ = made(OPTIMIZERS[name](), 3.0, None)
        before(ONE)
        optimizer = OPTIMIZERS[name]()
        step, variables = made(optimizer, None)
        hand_over("checkpoint", before, step, tmp_path)
        call = RUNS[run](step)
        for _ in range(3):
            call(ONE)
    expected, plain = by_keras(OPTIMIZERS[name](), 1.5, 0.0)
    np.testing.assert_allclose(values(variables), values(expected), rtol=1e-5)
    assert values(variables)[2] == 1
    for x, y in zip(optimizer.variables, plain, strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, err_msg=x.path)


@pytest.mark.sampled
@pytest.mark.parametrize("run", ["eager", "function"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_gradient_on_the_second_replica_alone_is_one(restored: bool, run: str, tmp_path: Path) -> None:
    """Even if it is all zeros, which a sum over the replicas would not show."""

    def step_of(chosen: bool) -> tuple[AccumulatedStep, list[Any]]:
        variables = [tf.Variable(1.0) for _ in range(3)]

        def gradients() -> Any:
            rank = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
            return [ONE, tf.constant(0.0) if chosen and int(rank) == 1 else None, None], 1

        return AccumulatedStep(gradients, variables, keras.optimizers.SGD(1.0, weight_decay=0.5), every=2), variables

    with mirrored(2).scope():
        step, variables = step_of(True)
        RUNS[run](step)()
        if restored:
            before = step
            step, variables = step_of(False)
            hand_over("checkpoint", before, step, tmp_path)
        RUNS[run](step)()
    assert values(variables) == [-0.5, 0.5, 1]


def test_an_earlier_checkpoint_holds_the_optimizer_as_well(tmp_path: Path) -> None:
    before, _ = made(keras.optimizers.SGD(1.0, momentum=0.5), 1.0, every=1)
    before(ONE)
    for way in ("checkpoint", "earlier checkpoint"):
        step, _ = made(keras.optimizers.SGD(1.0, momentum=0.5), None, every=1)
        hand_over(way, before, step, tmp_path)
        assert values(step._optimizer.momentums) == [-1, -1, 0]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "run"),
    [("max", "eager"), ("max", "function"), ("max", "compiled"), ("min", "function"), ("product", "compiled")],
)
def test_an_empty_accumulator_that_is_not_zero_is_no_gradient(name: str, run: str) -> None:
    step, variables = made(replace, None, reduction=getattr(gc.reductions, name)())
    call = RUNS[run](step)
    for _ in range(2):
        call(tf.constant(2.0))
    RUNS[run](lambda: step.flush())()
    assert values(variables) == [4 if name == "product" else 2, 1, 1]


def test_an_empty_accumulator_is_in_no_norm_of_all_gradients(tmp_path: Path) -> None:
    """The maximum of an empty window; the second variable has a gradient only in the restored window."""
    clipped = {"global_clipnorm": 5.0}
    before, _ = made(keras.optimizers.SGD(1.0, **clipped), 4.0, reduction=gc.reductions.max())
    before(ONE)
    step, variables = made(keras.optimizers.SGD(1.0, **clipped), None, reduction=gc.reductions.max())
    hand_over("checkpoint", before, step, tmp_path)
    tf.function(step)(tf.constant(3.0))
    assert values(variables) == [1 - 3, 1 - 4, 1]


@pytest.mark.sampled
@pytest.mark.parametrize("run", cases([("eager",), ("function",)], RUNS))
def test_a_call_without_any_gradient_ends_a_restored_window(run: str, tmp_path: Path) -> None:
    before, _ = made(replace, 2.0)
    before(ONE)
    variables = [tf.Variable(1.0) for _ in range(3)]
    step = AccumulatedStep(lambda: ([None] * 3, 1), variables, replace, every=2)
    with pytest.raises((gc.GradCombineError, tf.errors.InvalidArgumentError), match="a gradient for one variable"):
        (tf.function(step) if run == "compiled" else RUNS[run](step))()
    hand_over("checkpoint", before, step, tmp_path)
    RUNS[run](step)()
    assert values(variables) == [0.5, 1, 1]


@pytest.mark.full
def test_terms_of_a_restored_window_are_applied(tmp_path: Path) -> None:
    def step_of(both: bool) -> tuple[AccumulatedStep, list[Any]]:
        w, b, c = variables = [tf.Variable(1.0) for _ in range(3)]

        def loss(x: Any) -> Any:
            return {"fit": w * x, "decay": (b if both else w) * x}, {"tokens": 2, "microbatches": 1}

        del c
        terms = {"fit": "tokens", "decay": "microbatches"}
        return AccumulatedStep(loss, variables, replace, every=2, terms=terms), variables

    before, _ = step_of(True)
    before(ONE)
    for way in ("checkpoint", "earlier checkpoint"):
        step, variables = step_of(False)
        hand_over(way, before, step, tmp_path)
        tf.function(step)(ONE)
        assert values(variables) == [1, 0.5, 1]


@pytest.mark.full
def test_a_saved_model_holds_what_has_had_a_gradient(tmp_path: Path) -> None:
    step, variables = made(replace, 2.0, None)
    step(ONE, 0)
    module: Any = tf.Module()
    module.step, module.trained = step, variables
    module.one = tf.function(lambda x: step(x, 1)[0], input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert loaded.one(tf.constant(3.0))
    assert values(loaded.trained) == [2, 1, 1]


@pytest.mark.parametrize("run", ["eager", "function"])
def test_where_all_variables_have_a_gradient_nothing_more_is_exchanged(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AccumulatedStep, "_touched", None)
    with mirrored(2).scope():
        w = tf.Variable(1.0)
        call = RUNS[run](AccumulatedStep(lambda: ([2 * ONE], 1), [w], replace, every=2))
        for _ in range(2):
            call()
    assert w.numpy() == 2


@pytest.mark.sampled
@pytest.mark.parametrize("run", ["eager", "function"])
def test_replicas_of_other_processes_decide_with_these(run: str) -> None:
    """Other processes may trace different functions, so the decision is not made while tracing."""
    with mirrored(2).scope():
        step, variables = made(keras.optimizers.SGD(1.0, weight_decay=0.5), 0.0)
        step._is_single_process = False
        call = RUNS[run](step)
        for _ in range(2):
            call(ONE)
    assert values(variables) == [-0.5, 0.5, 1]
