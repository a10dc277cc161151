"""Windows of several replicas in .keras files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from gradcombine.errors import GradCombineError
from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import bits, linear
from tests.integrations.keras.test_replicas import X, Y, mirrored


def scope(replicas: int) -> Any:
    return mirrored().scope() if replicas == 2 else tf.distribute.OneDeviceStrategy("CPU:0").scope()


def windows(model: Any) -> list[list[bytes]]:
    """The variables of the window, by replica."""
    window = model.optimizer._window
    return [[np.asarray(x).tobytes() for x in window.values(variable)] for variable in window.variables]


def train(model: Any, part: slice) -> None:
    model.fit(X[part], Y[part], batch_size=2, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    ("before", "after", "order"),
    [
        pytest.param(2, 2, "sequential", marks=pytest.mark.full),
        pytest.param(1, 2, "sequential", marks=pytest.mark.full),
        (2, 1, "tree"),
        pytest.param(2, 1, "sequential", marks=pytest.mark.slow),
        pytest.param(2, 2, "tree", marks=pytest.mark.slow),
    ],
)
def test_a_file_resumes_under_any_number_of_replicas(before: int, after: int, order: Any, tmp_path: Path) -> None:
    """Gradients are integers over a power of two: any order of additions is exact."""
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"order": "tree"}, "a window with"), ({"reduction": "sum"}, "a window with sum, .* received mean")],
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


def test_weights_of_one_of_several_windows_are_refused() -> None:
    with mirrored().scope():
        model = linear(Accumulate("sgd", 4))
    train(model, slice(0, 4))
    before = windows(model)
    with pytest.raises(GradCombineError, match="a window of all replicas"):
        model.optimizer.set_weights([x.numpy() for x in model.optimizer.variables])
    assert windows(model) == before


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning")
@pytest.mark.parametrize("having", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("ends", ["call", "flush"])
def test_a_variable_with_a_gradient_on_one_replica_alone_is_in_the_file(having: tuple[int, ...], ends: str) -> None:
    """In the process that resumes the window it has none; another variable never had one, and does not decay."""

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

        tf.function(lambda: mirrored_once.run(own))()

    mirrored_once, store = mirrored(), {}
    with mirrored_once.scope():
        before, its = made()
        resumed, variables = made()
    call(before, its, having)
    before.save_own_variables(store)
    resumed.load_own_variables(store)
    if ends == "flush":
        resumed.flush()
    else:
        call(resumed, variables, ())
    # Keras divides the losses of two replicas by 2: the true gradients are 2 and 4, of which the mean is over all.
    share = len(having) / (2 if ends == "flush" else 4)
    assert [float(x.numpy()) for x in variables] == [-2, 0.5 - 4 * share, 1]
