"""Replicas of a strategy: all-reduce, saving and loading."""

from __future__ import annotations

from copy import deepcopy
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate, FlushAtEpochEnd
from tests.integrations.keras.cases import Plain, Replace, bits, linear, warned_of
from tests.integrations.tensorflow import strategies
from tests.integrations.tensorflow.strategies import per_replica

RNG = np.random.default_rng(0)
X, Y = RNG.integers(-4, 5, (8, 2)).astype(np.float32), RNG.integers(-4, 5, (8, 1)).astype(np.float32)


mirrored = partial(strategies.mirrored, 2)


def under(strategy: tf.distribute.Strategy, optimizer: Any) -> Any:
    """A compiled step on each replica's gradient and weight; the loss is divided by the number of replicas."""
    with strategy.scope():
        w, chosen = keras.Variable(0.0), optimizer()
        chosen.build([w])

    def apply(gradient: Any, weight: Any) -> None:
        chosen.apply([gradient / 2], [w], weight=weight)

    @tf.function(autograph=False)
    def run(gradient: Any, weight: Any) -> None:
        strategy.run(apply, args=(gradient, weight))

    def step(*replicas: tuple[float, int]) -> None:
        gradients, weights = zip(*replicas, strict=True)
        run(
            per_replica(strategy, lambda rank: np.float32(gradients[rank])),
            per_replica(strategy, lambda rank: np.int32(weights[rank])),
        )

    return step, w, chosen


def test_the_true_mean_over_microbatches_and_replicas() -> None:
    step, w, optimizer = under(mirrored(), lambda: Accumulate(keras.optimizers.SGD(-1.0), 2))
    step((2.0, 1), (6.0, 3))
    assert w.numpy() == 0
    step((-4.0, 3), (8.0, 1))
    assert w.numpy() == (2 + 18 - 12 + 8) / 8
    assert optimizer.iterations.numpy() == 1
    # A replica without data.
    step((5.0, 2), (float("nan"), 0))
    assert bool(optimizer.flush()) and not bool(optimizer.flush())
    assert w.numpy() == 2 + 5


@pytest.mark.full
def test_a_window_is_rounded_once_by_its_wire() -> None:
    """514 needs nine bits and is rounded to bfloat16's eight; the two terms of 257 are not rounded before the sum."""
    wire = gc.wires.cast("bfloat16")
    step, w, optimizer = under(mirrored(), lambda: Accumulate(keras.optimizers.SGD(-1.0), 2, wire=wire))
    for _ in range(2):
        step((257.0, 1), (1.0, 1))
    assert w.numpy() == (512 + 2) / 4
    again = Accumulate.from_config(optimizer.get_config())
    assert again.wire == wire and again.get_config() == optimizer.get_config()


def test_a_wire_with_a_function_is_not_made_again() -> None:
    wire = gc.wires.blocks(4, size=32, rounding="stochastic", seed=3, wide=False)
    assert Accumulate.from_config(Accumulate("sgd", 2, wire=wire).get_config()).wire == wire
    for bad in (gc.wires.blocks(4, wide=lambda path, shape: True).name, "open('x')", "wires.cast(1)", 3):
        with pytest.raises(GradCombineError, match="without a function as wide"):
            Accumulate.from_config(Accumulate("sgd", 2).get_config() | {"wire": bad})


def test_keras_raises_where_this_accumulates() -> None:
    """Its accumulation branches around an all-reduce inside a replica."""
    with mirrored().scope():
        w, optimizer = keras.Variable(0.0), keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        optimizer.build([w])
    step = tf.function(lambda: mirrored().run(lambda: optimizer.apply([tf.constant(1.0)], [w])), autograph=False)
    with pytest.raises(RuntimeError, match="merge_call"):
        step()


@pytest.mark.full
@pytest.mark.parametrize("infinite", [pytest.param(0, marks=pytest.mark.full), 1])
def test_all_replicas_skip_an_infinity_of_any(infinite: int) -> None:
    """Keras checks only the first replica."""
    seen = []
    for make in (_with_weight, lambda inner: Accumulate(inner, 1)):

        def scaled(make: Any = make) -> Any:
            return make(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(-1.0), initial_scale=4.0))

        step, w, chosen = under(mirrored(), scaled)
        step(*((float("inf") if rank == infinite else 4.0, 1) for rank in range(2)))
        seen.append((float(w.numpy()), float(chosen.scale_loss(1.0))))
    assert seen[1] == (0, 2)
    assert (seen[0] == seen[1]) == (infinite == 0)


def _with_weight(optimizer: Any) -> Any:
    """Keras' optimizers take no weight."""
    plain = optimizer.apply
    optimizer.apply = lambda grads, variables, weight: plain(grads, variables)
    return optimizer


def test_a_scale_around_it_is_refused() -> None:
    with mirrored().scope():
        optimizer = keras.optimizers.LossScaleOptimizer(Accumulate(keras.optimizers.SGD(1.0), 2))
        with pytest.raises(GradCombineError, match=r"expected Accumulate\(LossScaleOptimizer.*compile adds one"):
            optimizer.build([keras.Variable(0.0)])


@pytest.mark.full
def test_clipping_sees_the_combined_gradient() -> None:
    inner = lambda: keras.optimizers.SGD(-1.0, global_clipnorm=3.0)  # noqa: E731
    step, w, _ = under(mirrored(), lambda: Accumulate(inner(), 1))
    step((8.0, 1), (-4.0, 1))
    step((8.0, 1), (0.0, 1))
    assert w.numpy() == 2 + 3


@pytest.mark.full
def test_what_takes_its_variables_place_has_the_maximum_of_all_replicas() -> None:
    with mirrored().scope():
        w, scale = keras.Variable(0.0, aggregation="mean"), keras.Variable(0.0, aggregation="mean")
        scale.overwrite_with_gradient = True
        optimizer = Accumulate(keras.optimizers.SGD(-1.0), 1)
        optimizer.build([w, scale])

    @tf.function(autograph=False)
    def step() -> None:
        def apply() -> None:
            rank = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            optimizer.apply([tf.constant(1.0), 3.0 + rank], [w, scale])

        mirrored().run(apply)

    step()
    assert [x.numpy() for x in mirrored().experimental_local_results(scale.value)] == [4, 4]
    assert w.numpy() == 2


def train(model: Any, part: slice) -> None:
    model.fit(X[part], Y[part], batch_size=2, shuffle=False, verbose=0)


INNER = {
    "momentum": lambda: keras.optimizers.SGD(2.0**-6, momentum=0.5),
    "ema": lambda: keras.optimizers.SGD(2.0**-6, use_ema=True, ema_momentum=0.5),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        ("ema", {}, (slice(6), slice(6, 8))),
        pytest.param("momentum", {}, (slice(6), slice(6, 8)), marks=pytest.mark.full),
        pytest.param("momentum", {"steps_per_execution": 4}, (slice(8),), marks=pytest.mark.full),
    ],
)
def test_fit_on_two_replicas_equals_large_batches(name: str, settings: Any, parts: Any) -> None:
    large = linear(INNER[name]())
    with mirrored().scope():
        model = linear(Accumulate(INNER[name](), 2), **settings)
    large.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    for part in parts:
        train(model, part)
    assert bits(model.weights) == bits(large.weights)
    assert bits(model.optimizer.inner_optimizer.variables) == bits(large.optimizer.variables)


@pytest.mark.full
def test_replicas_count_by_their_examples_in_fit() -> None:
    """The replicas have 2 and 2 examples, then 2 and 1."""
    with mirrored().scope():
        model = linear(Accumulate(keras.optimizers.SGD(-1.0), 4))
    model.fit(X[:7], Y[:7], batch_size=4, shuffle=False, verbose=0, callbacks=[FlushAtEpochEnd()])
    residuals = X[:7].sum(axis=1, keepdims=True) - Y[:7]
    exact = [1 + Fraction(int(total)) * 2 / 7 for total in (residuals * X[:7]).sum(axis=0)]
    received = [Fraction(float(x)) for x in model.weights[0].numpy()[:, 0]]
    assert all(abs(a - b) <= abs(b) * Fraction(1, 2**22) for a, b in zip(received, exact, strict=True))


@pytest.mark.full
def test_replicas_of_different_shares_without_weights_warn() -> None:
    """Windows of one microbatch: the replicas have 2 and 2 examples, then 2 and 1."""
    with mirrored().scope():
        model = linear(Accumulate(keras.optimizers.SGD(-1.0), 1), Plain)
    model.fit(X[:4], Y[:4], batch_size=4, shuffle=False, verbose=0)
    with warned_of("1 and of 2"):
        model.fit(X[:7], Y[:7], batch_size=4, shuffle=False, verbose=0)


@pytest.mark.full
def test_xla_has_the_same_bits() -> None:
    trained = []
    for jit_compile in (False, True):
        model = linear(Accumulate(Replace(), 2), jit_compile=jit_compile)
        model.fit(X / 3, Y / 7, batch_size=4, shuffle=False, verbose=0)
        trained.append(bits(model.optimizer.variables[-6:-3]))
    assert trained[0] == trained[1]


def test_sparse_gradients() -> None:
    w, optimizer = keras.Variable(np.zeros((3, 1), np.float32)), Accumulate(Replace(), 2)
    for rows in ([0, 0], [2, 0]):
        optimizer.apply([tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant(rows), (3, 1))], [w])
    assert w.numpy().tolist() == [[2.5], [0], [0.5]]


def test_rows_of_one_id_are_added_before_they_are_squared() -> None:
    """Unlike by Keras, whose accumulator gets 1 + 1 here."""

    def squares(accumulates: bool, gradient: Any) -> float:
        w, inner = keras.Variable(np.zeros((3, 1), np.float32)), keras.optimizers.Adagrad(1.0, 0.0)
        optimizer = Accumulate(inner, 1) if accumulates else inner
        optimizer.apply([gradient], [w])
        return float(keras.ops.max(inner._accumulators[0]))

    sparse = tf.IndexedSlices(tf.ones((2, 1)), tf.constant([0, 0]), (3, 1))
    dense = tf.convert_to_tensor(sparse)
    assert [squares(x, y) for x in (True, False) for y in (sparse, dense)] == [4, 4, 2, 4]


def test_other_strategies_and_contexts() -> None:
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    step, w, _ = under(one, lambda: Accumulate(keras.optimizers.SGD(-2.0), 2))
    step((1.0, 1))
    step((3.0, 1))
    assert w.numpy() == 2
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0")
    with central.scope(), pytest.raises(GradCombineError, match="variables on every replica"):
        Accumulate(keras.optimizers.SGD(1.0), 2).build([keras.Variable(0.0)])
    with mirrored().scope():
        v, optimizer = keras.Variable(0.0), Accumulate(keras.optimizers.SGD(1.0), 2)
        optimizer.build([v])
        with pytest.raises(GradCombineError, match="replica context"):
            optimizer.apply([tf.constant(1.0)], [v])
    with pytest.raises(GradCombineError, match="under the strategy"):
        optimizer.apply([tf.constant(1.0)], [v])


def test_a_refused_strategy_names_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(GradCombineError, match=r"^Accumulate: .*a synchronous strategy"):
        Accumulate(keras.optimizers.SGD(1.0), 2).build([])


def scope(replicas: int) -> Any:
    return mirrored().scope() if replicas == 2 else tf.distribute.OneDeviceStrategy("CPU:0").scope()


def windows(model: Any) -> list[list[bytes]]:
    """The variables of the window on each replica."""
    window = model.optimizer._window
    return [[np.asarray(x).tobytes() for x in window.values(variable)] for variable in window.variables]


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        (2, 2, "sequential"),
        (1, 2, "sequential"),
        (2, 1, "tree"),
        pytest.param(2, 1, "sequential", marks=pytest.mark.slow),
        pytest.param(2, 2, "tree", marks=pytest.mark.slow),
    ],
)
def test_a_file_resumes_under_any_number_of_replicas(before: int, after: int, order: Any, tmp_path: Path) -> None:
    """Gradients are dyadic fractions, so sums are exact in any order."""
    with scope(before):
        model = linear(Accumulate(keras.optimizers.SGD(2.0**-6), 4, order=order))
    train(model, slice(0, 6))
    model.save(tmp_path / "model.keras")
    with scope(after):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    if before == after:
        assert windows(loaded) == windows(model)
    for each in (model, loaded):
        train(each, slice(6, 8))
    assert int(loaded.optimizer.iterations.numpy()) == 1
    assert bits(loaded.weights) == bits(model.weights)
    large = linear(keras.optimizers.SGD(2.0**-6))
    large.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert bits(loaded.weights) == bits(large.weights)


@pytest.mark.full
def test_a_checkpoint_resumes_on_one_replica(tmp_path: Path) -> None:
    model, restored = (linear(Accumulate(keras.optimizers.Adam(0.1), 3)) for _ in range(2))
    train(model, slice(0, 4))
    restored.optimizer.build(restored.trainable_variables)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path).assert_existing_objects_matched()
    for each in (model, restored):
        train(each, slice(4, 8))
    assert bits(restored.weights) == bits(model.weights)
    assert bits(restored.optimizer.variables) == bits(model.optimizer.variables)


def test_a_checkpoint_of_one_of_several_windows_is_refused(tmp_path: Path) -> None:
    """Not in between windows, and not while it is restored."""
    step, w, optimizer = under(mirrored(), lambda: Accumulate(keras.optimizers.SGD(-1.0), 2))
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, w=w)
    step((2.0, 1), (6.0, 3))
    with pytest.raises(GradCombineError, match=r"windows that were flushed, .* received open windows of 2 replicas"):
        checkpoint.save(str(tmp_path / "c"))
    optimizer.flush()
    path = checkpoint.save(str(tmp_path / "c"))
    step((8.0, 1), (8.0, 1))
    checkpoint.restore(path)
    for _ in range(2):
        step((1.0, 1), (2.0, 1))
    assert w.numpy() == 5 + 1.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": "tree"}, "a window with"),
        ({"reduction": "sum"}, "a window with sum, .* received mean"),
        ({"precision": "exact"}, "a window with mean, precision 'exact', received mean, precision 'fast'"),
    ],
)
def test_a_checkpoint_of_another_window_is_refused(settings: Any, message: str, tmp_path: Path) -> None:
    optimizers = [Accumulate("sgd", 3), Accumulate("sgd", 3, **settings)]
    for each in optimizers:
        w = keras.Variable([0.0])
        each.build([w])
    optimizers[0].apply([tf.ones(1)])
    path = tf.train.Checkpoint(optimizer=optimizers[0]).save(str(tmp_path / "c"))
    before = bits(optimizers[1].variables)
    with pytest.raises(GradCombineError, match=message):
        tf.train.Checkpoint(optimizer=optimizers[1]).restore(path)
    assert bits(optimizers[1].variables) == before
    unbuilt = Accumulate("sgd", 3, **settings)
    tf.train.Checkpoint(optimizer=unbuilt).restore(path)
    with pytest.raises(GradCombineError, match=message):
        unbuilt.build([w])


@pytest.mark.full
def test_weights_of_one_of_several_windows_are_refused() -> None:
    with mirrored().scope():
        model = linear(Accumulate("sgd", 4))
    train(model, slice(0, 4))
    before = windows(model)
    with pytest.raises(GradCombineError, match="a window of all replicas"):
        model.optimizer.set_weights([x.numpy() for x in model.optimizer.variables])
    assert windows(model) == before


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("having", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("ends", ["call", "flush"])
def test_a_variable_with_a_gradient_on_one_replica_alone_is_in_the_file(having: tuple[int, ...], ends: str) -> None:
    """In the resuming process it has no gradient; another variable never had one and does not decay."""

    def made() -> tuple[Any, list[Any]]:
        variables = [keras.Variable(0.0), keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = Accumulate(keras.optimizers.SGD(1.0, weight_decay=0.5), every=2)
        optimizer.build(variables)
        return optimizer, variables

    def call(optimizer: Any, variables: list[Any], having: tuple[int, ...]) -> None:
        def own() -> None:
            rank = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            one = tf.constant(1.0)
            optimizer.apply([one, 2 * one if rank in having else None, None], variables)

        tf.function(lambda: mirrored().run(own))()

    store: dict[str, Any] = {}
    with mirrored().scope():
        before, its = made()
        resumed, variables = made()
    call(before, its, having)
    before.save_own_variables(store)
    resumed.load_own_variables(store)
    if ends == "flush":
        resumed.flush()
    else:
        call(resumed, variables, ())
    # Keras divides the losses of two replicas by 2: the true gradients are 2 and 4.
    share = len(having) / (2 if ends == "flush" else 4)
    assert [float(x.numpy()) for x in variables] == [-2, 0.5 - 4 * share, 1]


@pytest.mark.full
def test_a_copy_goes_on_in_a_function_that_builds_it() -> None:
    w, again = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    optimizer = Accumulate(keras.optimizers.SGD(0.5, momentum=0.5), 2)
    optimizer.build([w])
    for n in range(3):
        optimizer.apply([tf.constant([n, 2.0 * n])], [w])
    again.assign(w.value)
    copied = deepcopy(optimizer)
    step = tf.function(lambda gradient: copied.apply([gradient], [again]))
    for n in range(3, 6):
        step(tf.constant([n, 2.0 * n]))
        optimizer.apply([tf.constant([n, 2.0 * n])], [w])
    assert bits([again, *copied.variables]) == bits([w, *optimizer.variables])


def test_a_step_that_fails_leaves_the_window() -> None:
    """TensorFlow runs what does not depend on the operation that failed."""
    w = tf.Variable(0.0)
    optimizer = Accumulate(keras.optimizers.SGD(1.0), 2)
    optimizer.build([w])

    @tf.function
    def step(x: Any) -> None:
        optimizer.apply([tf.debugging.check_numerics(x, "x")], [w], weight=1)

    step(tf.constant(1.0))
    before = bits(optimizer.variables)
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant(np.nan))
    assert bits(optimizer.variables) == before
    step(tf.constant(3.0))
    assert float(w) == -2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_fails_on_one_replica_leaves_all_windows(compiled: bool) -> None:
    strategy = mirrored()
    with strategy.scope():
        w, optimizer = keras.Variable(0.0), Accumulate(keras.optimizers.SGD(1.0), 2)
        optimizer.build([w])

    def apply(x: Any) -> None:
        optimizer.apply([tf.debugging.check_numerics(x, "x") / 2], [w])

    def run(x: Any) -> None:
        strategy.run(apply, args=(x,))

    step = tf.function(run) if compiled else run
    step(per_replica(strategy, lambda rank: np.float32(1 + rank)))
    for failing in 0, 1:
        with pytest.raises(tf.errors.InvalidArgumentError):
            step(per_replica(strategy, lambda rank, failing=failing: np.float32(np.nan if rank == failing else 8)))
        assert [int(x) for x in strategy.experimental_local_results(optimizer._window.leaves[-2].value)] == [1, 1]
    step(per_replica(strategy, lambda rank: np.float32(3 + rank)))
    assert w.numpy() == -2.5


def test_a_weight_around_the_replicas_is_refused() -> None:
    """Replicas run in other threads, which would not get it."""
    strategy = mirrored()
    with strategy.scope():
        w = keras.Variable(0.0)
        optimizer = Accumulate(keras.optimizers.SGD(1.0), 2)
        optimizer.build([w])
    with pytest.raises(GradCombineError, match="by this thread"), optimizer.weighted(2):
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [w]))
