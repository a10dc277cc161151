"""State of the accumulated training step: checkpoints, and windows that rejected calls leave intact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import statefile
from gradcombine.integrations.keras import Accumulate
from gradcombine.integrations.tensorflow import AccumulatedStep
from gradcombine.verify import assert_equal_bits
from tests.integrations.tensorflow.strategies import (
    exact_mean,
    feed,
    given,
    gradient_at,
    mirrored,
    per_replica,
    replace,
    scope,
    subtract,
)
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("tensorflow")


PLACES = ("none", "one_device", "mirrored_2", "mirrored_4", "central_2")
APPLY = {"function": lambda: replace, "sgd": lambda: keras.optimizers.SGD(-1.0)}


@pytest.mark.parametrize(
    ("name", "way", "apply"),
    cases(
        [
            *((name, "checkpoint", "function") for name in ("none", "mirrored_2", "central_2")),
            ("none", "file of states", "function"),
        ],
        PLACES,
        ("checkpoint", "file of states"),
        APPLY,
    ),
)
def test_a_window_resumes_in_the_middle(name: str, way: str, apply: str, tmp_path: Path) -> None:
    reduction = gc.reductions.mean("fast" if way == "checkpoint" else "exact")

    def made() -> tuple[tf.Variable, AccumulatedStep]:
        w = tf.Variable(tf.zeros(3))
        return w, AccumulatedStep(given, [w], APPLY[apply](), every=2, reduction=reduction)

    with scope(name) as strategy:
        _, module = made()
        feed(strategy, tf.function(module), range(3))
        w, resumed = made()
        if way == "checkpoint":
            path = tf.train.Checkpoint(step=module).save(tmp_path / "window")
            tf.train.Checkpoint(step=resumed).restore(path).assert_consumed()
        else:
            statefile.save_replicas(tmp_path / "window.npz", reduction, module.states())
            resumed.load_states(statefile.load_replicas(tmp_path / "window.npz", reduction, [np.zeros(3, np.float32)]))
        w.assign(tf.zeros(3))  # a Keras optimizer saves its variables, too
        assert feed(strategy, resumed, range(3, 4)) == [True]
        np.testing.assert_array_equal(w.numpy(), exact_mean(strategy.num_replicas_in_sync, range(2, 4)), strict=True)


@pytest.mark.parametrize(("old", "new", "matched"), [("mirrored_2", "none", True), ("none", "mirrored_2", False)])
def test_restoring_on_another_number_of_replicas_is_told(old: str, new: str, matched: bool, tmp_path: Path) -> None:
    def made(name: str) -> tf.train.Checkpoint:
        with scope(name):
            w = tf.Variable(tf.zeros(3))
            return tf.train.Checkpoint(step=AccumulatedStep(given, [w], replace, every=2))

    path = made(old).save(tmp_path / "window")
    status = made(new).restore(path)
    with pytest.raises(AssertionError):
        status.assert_consumed()
    with nullcontext() if matched else pytest.raises(AssertionError):
        status.assert_existing_objects_matched()


def saved_and_restored(folder: Path, before: dict[str, Any], after: dict[str, Any], begun: int) -> list[float]:
    """The sums applied after restoring a window of `begun` microbatches, until all eight are in."""

    def made(settings: dict[str, Any]) -> tuple[AccumulatedStep, list[float]]:
        applied: list[float] = []
        w = tf.Variable(0.0)
        options = {"reduction": gc.reductions.sum(), **settings}
        step = AccumulatedStep(lambda g: ([g], 1), [w], lambda g, _: applied.append(float(g[0])), **options)
        return step, applied

    old, _ = made(before)
    for k in range(begun):
        old(tf.constant(float(k)))
    path = tf.train.Checkpoint(step=old).save(folder / "window")
    new, applied = made(after)
    tf.train.Checkpoint(step=new).restore(path).assert_consumed()
    for k in range(begun, 8):
        new(tf.constant(float(k)))
    new.flush()
    return applied


@pytest.mark.parametrize(
    ("before", "begun", "after", "applied"),
    [(4, 3, 2, [6, 9, 13]), (4, 3, 3, [6, 15, 7]), (2, 1, 4, [6, 22]), (4, 4, 2, [9, 13])],
)
def test_a_checkpoint_of_another_length_loses_nothing(
    tmp_path: Path, before: int, begun: int, after: int, applied: list[float]
) -> None:
    """A window with at least as many microbatches as the new length ends with the next one; a shorter one continues."""
    assert saved_and_restored(tmp_path, {"every": before}, {"every": after}, begun) == applied


NUMBERED = {count: gc.reductions.numbered(gc.reductions.mean(), count) for count in (8, 16)}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (gc.reductions.mean(), gc.reductions.sum(), "expected a window with sum, received mean"),
        (gc.reductions.sum(), gc.reductions.max(), "expected a window with max, received sum"),
        (gc.reductions.mean("exact"), gc.reductions.mean(), r"expected a window with float32\(\), received int32"),
        (gc.reductions.mean(), NUMBERED[8], r"expected a window with numbered\(mean\), received mean"),
        (NUMBERED[8], NUMBERED[16], r"expected a window with int32\(16,\), received int32\(8,\)"),
    ],
)
def test_a_checkpoint_of_another_reduction_is_refused(tmp_path: Path, before: Any, after: Any, message: str) -> None:
    """TensorFlow matches variables by their order only, in which a mean and a sum agree."""
    with pytest.raises(gc.GradCombineError, match=f"tf.train.Checkpoint.restore: {message}"):
        saved_and_restored(tmp_path, {"every": 8, "reduction": before}, {"every": 8, "reduction": after}, 3)


def test_states_that_do_not_match_are_refused() -> None:
    with scope("mirrored_2") as strategy:
        module = AccumulatedStep(given, [tf.Variable(tf.zeros(3))], replace, every=2)
        feed(strategy, module, range(1))
        before = module.states()
        other = gc.accumulate(gc.reductions.mean(), every=2).init([np.zeros(4, np.float32)])
        with pytest.raises(gc.GradCombineError, match=r"expected float32 of shape \(3,\)"):
            module.load_states([other] * len(before))
        with pytest.raises(gc.GradCombineError, match="states, one per replica"):
            module.load_states([*before, before[0]])
        assert_equal_bits(module.states(), before)


def test_more_replicas_resume_the_windows_of_fewer(tmp_path: Path) -> None:
    with mirrored(2).scope():
        module = AccumulatedStep(given, [tf.Variable(tf.zeros(3))], replace, every=2)
        feed(mirrored(2), module, range(1))
        path = tf.train.Checkpoint(step=module).save(tmp_path / "window")
    with mirrored(4).scope():
        w = tf.Variable(tf.zeros(3))
        resumed = AccumulatedStep(given, [w], replace, every=2)
        tf.train.Checkpoint(step=resumed).restore(path).expect_partial()
        resumed.flush()
    np.testing.assert_array_equal(w.numpy(), exact_mean(2, range(1)), strict=True)


@pytest.mark.parametrize("run", [lambda flush: flush, tf.function], ids=["eager", "function"])
def test_a_flush_applies_a_window_of_fewer_microbatches_than_replicas(run: Callable[[Any], Any]) -> None:
    """After one microbatch on one replica, the position on two is rounded down to 0."""
    with scope("none") as strategy:
        module = AccumulatedStep(given, [tf.Variable(tf.zeros(3))], replace, every=4)
        feed(strategy, module, range(1))
        windows = statefile.resize(gc.reductions.mean(), module.states(), 2)
    with scope("mirrored_2") as strategy:
        w = tf.Variable(tf.zeros(3))
        resumed = AccumulatedStep(given, [w], replace, every=2)
        resumed.load_states(windows)
        flush = run(resumed.flush)
        assert bool(flush()) and not bool(flush())
        np.testing.assert_array_equal(w.numpy(), exact_mean(1, range(1)), strict=True)
        assert feed(strategy, resumed, range(2)) == [False, True]
        np.testing.assert_array_equal(w.numpy(), exact_mean(2, range(2)), strict=True)


def test_a_failure_on_one_replica_leaves_all_windows_whole() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w = tf.Variable(tf.zeros(3))
        step = AccumulatedStep(given, [w], replace, every=2)
        feed(strategy, step, range(1))
        with pytest.raises(gc.GradCombineError, match="mean: expected a finite weight that is not negative"):
            step(per_replica(strategy, lambda r: gradient_at(r, 1)), per_replica(strategy, lambda r: np.float32(-r)))
        feed(strategy, step, range(1, 2))
    np.testing.assert_array_equal(w.numpy(), exact_mean(2, range(2)), strict=True)


def rows(indices: Any, values: Any, dense_shape: Any = (3,)) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, tf.constant(indices), tf.constant(dense_shape))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda g: [g], r"expected \(gradients, weight\) or \(gradients, weight, outputs\), received list of 1"),
        (lambda g: ([g, g], 1), "expected a list of 1 gradients, one per variable, received list of 2"),
        (lambda g: (g, 1), "expected a list of 1 gradients, one per variable, received EagerTensor"),
        (lambda g: ([g[:2]], 1), r"mean: leaf \[0\]: expected shape \(3,\), received \(2,\)"),
        (lambda g: ([tf.cast(g, tf.float64)], 1), r"mean: leaf \[0\]: expected dtype float32"),
        (lambda g: ([g], [1]), "mean: expected a finite weight that is not negative, received list"),
        (lambda g: ([rows([0, 1], g)], 1), r"AccumulatedStep: leaf \[0\]: expected rows of a tensor of shape \(3,\)"),
        (lambda g: ([rows([[0]], g[:1])], 1), r"leaf \[0\]: expected rows of a tensor of shape \(3,\)"),
        (lambda g: ([rows([0], g[tf.newaxis])], 1), r"leaf \[0\]: expected rows of a tensor of shape \(3,\)"),
        (lambda g: ([rows([3], g[:1])], 1), r"leaf \[0\]: expected indices of rows of the tensor"),
        (lambda g: ([rows([-1], g[:1])], 1), r"leaf \[0\]: expected indices of rows of the tensor"),
        (lambda g: ([rows([0], g[:1], [5])], 1), r"expected slices of a tensor of shape \(3,\), received \(5,\)"),
        (lambda g: ([None], 1), "expected a gradient for one variable or more, in this call or one before, received n"),
    ],
)
def test_results_that_do_not_fit_are_refused(result: Any, message: str) -> None:
    w = tf.Variable(tf.zeros(3))
    with pytest.raises(gc.GradCombineError, match=message):
        AccumulatedStep(result, [w], replace, every=1)(tf.ones(3))
    assert w.numpy().tolist() == [0, 0, 0]


def test_what_belongs_to_another_strategy_is_refused() -> None:
    outside, plain = tf.Variable(tf.zeros(3)), keras.optimizers.SGD()
    accumulating = keras.optimizers.SGD(gradient_accumulation_steps=2)
    unscoped = AccumulatedStep(given, [outside], replace, every=2)
    with mirrored(2).scope():
        inside = tf.Variable(tf.zeros(3))
        step = AccumulatedStep(given, [inside], replace, every=2)

        def made(variable: Any, apply: Any = replace) -> Any:
            return AccumulatedStep(given, [variable], apply, every=2)

        refused: list[tuple[Callable[[], Any], str]] = [
            (lambda: made(outside), r"leaf \[0\]: expected a variable created under"),
            (lambda: made(inside, plain), r"leaf .iterations: expected a variable created under"),
            (lambda: made(tf.ones(3)), "expected a variable, received EagerTensor"),
            (lambda: made(inside, 3), "expected a Keras optimizer or a function, received 3"),
            (lambda: made(inside, keras.optimizers.SGD), "a Keras optimizer or a function, received SGD, not called"),
            (lambda: made(inside, Accumulate(plain, 2)), "expected an optimizer that does not accumulate already"),
            (lambda: made(inside, accumulating), "an optimizer without gradient_accumulation_steps, received 2"),
            (lambda: mirrored(2).run(step, args=(tf.ones(3), 1.0)), "received a call inside strategy.run"),
            (lambda: unscoped(tf.ones(3), 1.0), "received a call under another one"),
        ]
        for call, message in refused:
            with pytest.raises(gc.GradCombineError, match=message):
                call()


def test_a_step_of_a_strategy_may_be_called_outside_of_its_scope() -> None:
    with mirrored(2).scope():
        w = tf.Variable(tf.zeros(3))
        step = tf.function(AccumulatedStep(given, [w], subtract, every=2))
    assert feed(mirrored(2), step, range(2)) == [False, True]
    np.testing.assert_array_equal(w.numpy(), -exact_mean(2, range(2)), strict=True)
