"""Local SGD with an outer optimizer over the replicas of a strategy: bits of the reference, and communication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import GradCombineError
from gradcombine.integrations.tensorflow import Outer
from tests.integrations.islands import EVERY, FRAGMENTS, SHAPES, STEPS, moves, ruled, seen_by, start
from tests.integrations.tensorflow.strategies import Counting, central, local, mirrored, per_replica, scope

pytestmark = pytest.mark.needs("tensorflow")


def nesterov() -> Any:
    return keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True)


def made(fragments: int = 1) -> tuple[list[Any], Outer]:
    """Returns the outer parameters and an `Outer` with Nesterov momentum."""
    variables = [tf.Variable(x) for x in start().values()]
    optimizer = [nesterov() for _ in range(fragments)] if fragments > 1 else nesterov()
    return variables, Outer(variables, optimizer, EVERY, order="tree")


def stepper(strategy: Any, islands: Outer) -> Any:
    """A tf.function for one inner step, which adds its argument on each island, and the outer step after it."""

    def step(added: list[Any], weight: Any) -> Any:
        def inner(*added: Any) -> None:
            for x, change in zip(islands.params, added, strict=True):
                x.assign_add(change)

        strategy.run(inner, args=tuple(added))
        return islands.update(weight)

    return tf.function(step)


def run(strategy: Any, step: Any, i: int, added: Any, weights: np.ndarray) -> Any:
    changes = [per_replica(strategy, lambda r, x=x: x[r, i]) for x in added.values()]
    return step(changes, per_replica(strategy, lambda r: weights[r, i]))


def assert_bits(strategy: Any, islands: Outer, variables: list[Any], expected: Any, ranks: range) -> None:
    """Compares the parameters of the islands in `ranks` and the outer parameters on all replicas."""
    for name, x, outer in zip(SHAPES, islands.params, variables, strict=True):
        for rank, received in enumerate(local(strategy, outer)):
            np.testing.assert_array_equal(received, expected["outer"][name], f"outer {name} {rank}", strict=True)
        for rank in ranks:
            received = local(strategy, x)[rank]
            np.testing.assert_array_equal(received, expected["params"][rank][name], f"{name} {rank}", strict=True)


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("name", ["none", "mirrored_2", "mirrored_4"])
def test_a_strategy_has_the_bits_of_a_simulation(name: str, fragments: int) -> None:
    with scope(name) as strategy:
        n = strategy.num_replicas_in_sync
        added, weights = moves(n), seen_by(n)
        variables, islands = made(fragments)
        step = stepper(strategy, islands)
        for i, expected in enumerate(ruled(added, weights, FRAGMENTS[fragments])):
            ends = run(strategy, step, i, added, weights)
            assert ends.numpy().tolist() == [(i + 1 + f * EVERY // fragments) % EVERY == 0 for f in range(fragments)]
            assert_bits(strategy, islands, variables, expected, range(n))
        assert step.experimental_get_tracing_count() == 1


def test_nothing_is_exchanged_between_boundaries() -> None:
    """In eager mode, a fragment's elements are exchanged only at its boundary; scalars are not counted."""
    counting = Counting()
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], counting)
    with strategy.scope():
        variables = [tf.Variable(x) for x in start().values()]
        islands = Outer(variables, [nesterov(), nesterov()], EVERY)
        exchanged = []
        for _ in range(EVERY):
            before = counting.elements
            islands.update(per_replica(strategy, lambda r: np.float32(r + 1)))
            exchanged.append(counting.elements - before)
    assert exchanged == [0, 4 + 9, 0, 30]


@pytest.mark.full
def test_a_lost_island_changes_nothing() -> None:
    """An island with weight 0 and NaN parameters changes no bits and gets the outer parameters at the end."""
    with scope("mirrored_2") as strategy:
        added, weights = moves(2), seen_by(2)
        expected = ruled({name: x[:1] for name, x in added.items()}, weights[:1], FRAGMENTS[1])[EVERY - 1]
        for x in added.values():
            x[1] = np.nan
        weights[1] = 0
        variables, islands = made()
        step = stepper(strategy, islands)
        for i in range(EVERY):
            run(strategy, step, i, added, weights)
        assert_bits(strategy, islands, variables, {**expected, "params": expected["params"] * 2}, range(2))


def test_an_island_that_joins_begins_from_the_outer_parameters() -> None:
    with scope("mirrored_2") as strategy:
        x = tf.Variable(8.0)
        islands = Outer([x], keras.optimizers.SGD(1.0), 2)
        step = stepper(strategy, islands)
        step([tf.constant(-3.0)], 4.0)
        tf.function(islands.join)(per_replica(strategy, lambda r: r == 0))
        assert [float(value) for value in local(strategy, islands.params[0])] == [8, 5]
        step([tf.constant(-2.0)], 4.0)  # the first has weight 4 and moved by 2, the second has weight 8 and moved by 5
        assert [float(value) for value in local(strategy, islands.params[0])] == [4, 4]


def test_through_a_wire() -> None:
    """The islands' changes are sent in eight bits, and all islands end with the same bits."""
    added = np.random.default_rng(1).normal(size=(2, 64, 64)).astype(np.float32)
    with scope("mirrored_2") as strategy:
        x = tf.Variable(tf.zeros((64, 64)))
        islands = Outer([x], keras.optimizers.SGD(1.0), 1, reduction=gc.reductions.mean(wire=gc.wires.blocks(8)))
        run(strategy, stepper(strategy, islands), 0, {"x": added[:, None]}, np.ones((2, 1), np.float32))
        ours, other = local(strategy, islands.params[0])
    np.testing.assert_array_equal(ours, other)
    error = np.abs(ours - added.astype(np.float64).mean(0)).max()
    assert 0 < error <= np.abs(added).max() / 128  # half a quantization step of 7 bits; each is rounded once


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "mirrored_2"])
def test_a_checkpoint_resumes_between_exchanges(name: str, tmp_path: Path) -> None:
    with scope(name) as strategy:
        n = strategy.num_replicas_in_sync
        added, weights = moves(n), seen_by(n)
        expected, middle = ruled(added, weights, FRAGMENTS[2]), STEPS - 3
        variables, islands = made(2)
        step = stepper(strategy, islands)
        for i in range(middle):
            run(strategy, step, i, added, weights)
        path = tf.train.Checkpoint(variables=variables, islands=islands).save(tmp_path / "islands")
        variables, islands = made(2)
        tf.train.Checkpoint(variables=variables, islands=islands).restore(path).assert_consumed()
        step = stepper(strategy, islands)
        for i in range(middle, STEPS):
            run(strategy, step, i, added, weights)
            assert_bits(strategy, islands, variables, expected[i], range(n))


def test_narrow_parameters_move_in_float32() -> None:
    """bfloat16, where the difference of two neighbours is exact, and a Keras variable."""
    x = keras.Variable(np.float32([1, 2]), dtype="bfloat16")
    islands = Outer([x], keras.optimizers.SGD(1.0), 1)
    islands.params[0].assign_sub(tf.constant([2**-8, 0.5], tf.bfloat16))
    islands.update()
    assert islands.params[0].dtype == tf.bfloat16
    assert np.float32(x.value).tolist() == [1 - 2**-8, 1.5]


def variable() -> Any:
    return tf.Variable([1.0, 2.0])


def outside() -> Any:
    """Variables created without a strategy, or under another one."""
    x = variable()
    with mirrored(2).scope():
        return Outer([x], nesterov(), 2)


def on_one_device() -> Any:
    with central().scope():
        return Outer([variable()], nesterov(), 2)


def inside() -> Any:
    with mirrored(2).scope():
        islands = Outer([variable()], nesterov(), 2)
        return mirrored(2).run(islands.update)


BAD = {
    "no optimizer": lambda: Outer([variable()], lambda gradients, variables: None, 2),
    "no optimizers": lambda: Outer([variable()], [], 2),
    "one optimizer for two fragments": lambda: Outer([variable(), variable()], [nesterov()] * 2, 2),
    "a tensor": lambda: Outer([tf.zeros(2)], nesterov(), 2),
    "integers": lambda: Outer([tf.Variable([1, 2])], nesterov(), 2),
    "a schedule": lambda: Outer([variable()], nesterov(), lambda i: 2),
    "more fragments than steps": lambda: Outer([variable()], [nesterov(), nesterov()], 1),
    "a weight that is no scalar": lambda: Outer([variable()], nesterov(), 2).update([1.0, 2.0]),
    "a negative weight": lambda: Outer([variable()], nesterov(), 2).update(-1.0),
    "a weight that is no number": lambda: Outer([variable()], nesterov(), 2).update("a"),
    "no flag": lambda: Outer([variable()], nesterov(), 2).join(1.0),
    "a vector of flags": lambda: Outer([variable()], nesterov(), 2).join(tf.constant([True, False])),
    "error feedback": lambda: Outer(
        [variable()], nesterov(), 1, reduction=gc.reductions.fed_back(gc.reductions.mean(wire=gc.wires.blocks(8)))
    ).update(),
    "another strategy": outside,
    "variables of one device": on_one_device,
    "a call inside strategy.run": inside,
}


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.LossScaleOptimizer(nesterov(), initial_scale=8.0),
        lambda: keras.optimizers.SGD(1.0, loss_scale_factor=8.0),
    ],
)
def test_a_loss_scale_is_refused(optimizer: Any) -> None:
    """The optimizer would divide the difference of the parameters by it."""
    with pytest.raises(GradCombineError, match=r"^Outer: expected an optimizer without a loss scale.*received .* divi"):
        Outer([variable(), variable()], [nesterov(), optimizer()], 2)


def test_an_optimizer_of_other_variables_is_refused() -> None:
    optimizer = nesterov()
    optimizer.build([variable()])
    with pytest.raises(GradCombineError, match=r"^Outer: leaf \[0\]: expected an optimizer .* with this variable"):
        Outer([variable()], optimizer, 2)


def test_a_variable_that_is_listed_twice_is_refused() -> None:
    x = variable()
    with pytest.raises(GradCombineError, match=r"^Outer: leaf \[1\]: expected each variable once, received that of \["):
        Outer([x, x], nesterov(), 2)


def test_small_steps_in_float64_are_not_lost() -> None:
    x = tf.Variable(tf.ones(2, tf.float64))
    islands = Outer([x], keras.optimizers.SGD(1.0), 1)
    islands.params[0].assign_sub(tf.fill([2], tf.constant(2.0**-40, tf.float64)))
    islands.update()
    np.testing.assert_array_equal(x.numpy(), [1 - 2.0**-40] * 2)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    with pytest.raises(GradCombineError):
        BAD[name]()
