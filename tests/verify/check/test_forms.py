"""`check_step` accepts steps in all usual forms: states, modules, filtered functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import keras
import numpy as np
import optax
import pytest
import tensorflow as tf
from flax import nnx
from flax.training.train_state import TrainState

from gradcombine.verify import Cause, check_step
from tests.verify.steps.dividing import part, parts

pytestmark = pytest.mark.usefixtures("as_users_do")

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 6)).astype(np.float32),
    "y": RNG.normal(size=(8, 3)).astype(np.float32),
    "mask": np.float32([1, 1, 1, 0, 1, 0, 0, 1]),
}
TX = optax.adamw(1e-2)
Sum = Callable[[Any, Any], Any]
"""``(model, microbatch) -> gradient of the summed loss``."""


def squares(predicted: Any, batch: Any) -> Any:
    return (((predicted - batch["y"]) ** 2).sum(-1) * batch["mask"]).sum()


def combined(of_sum: Sum, model: Any, batch: Any, k: int, right: bool) -> Any:
    """The mean over all real examples, or, if not `right`, the mean of the microbatches' means."""
    divided = parts(batch, k)
    sums, counts = [of_sum(model, part) for part in divided], [part["mask"].sum() for part in divided]
    if right:
        return jax.tree.map(lambda *g: sum(g) / sum(counts), *sums)
    return jax.tree.map(lambda *g: sum(x / n for x, n in zip(g, counts, strict=True)) / k, *sums)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.tanh(nn.Dense(5)(x)))


def linen(right: bool) -> tuple[Any, Any]:
    net = LinenNet()
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), BATCH["x"]), tx=TX)
    of_sum = jax.grad(lambda params, part: squares(net.apply(params, part["x"]), part))

    def make_step(k: int) -> Any:
        return jax.jit(lambda s, batch: s.apply_gradients(grads=combined(of_sum, s.params, batch, k, right)))

    return make_step, state


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(nnx.tanh(self.hidden(x)))


def in_place(right: bool) -> tuple[Any, Any]:
    """A step of flax.nnx, which updates its module and optimizer in place."""
    model = NnxNet(nnx.Rngs(0))
    of_sum = nnx.grad(lambda model, part: squares(model(part["x"]), part))

    def make_step(k: int) -> Any:
        @nnx.jit
        def update(model: Any, optimizer: Any, batch: Any) -> None:
            optimizer.update(model, combined(of_sum, model, batch, k, right))

        def step(state: Any, batch: Any) -> Any:
            update(*state, batch)
            return state

        return step

    return make_step, (model, nnx.Optimizer(model, TX, wrt=nnx.Param))


def filtered(right: bool) -> tuple[Any, Any]:
    """A step of equinox, whose modules have functions and Python numbers among their leaves."""
    model = eqx.nn.Sequential([eqx.nn.MLP(6, 3, 5, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.3, inference=True)])
    of_sum = eqx.filter_grad(lambda model, part: squares(jax.vmap(model)(part["x"]), part))

    def make_step(k: int) -> Any:
        @eqx.filter_jit
        def step(state: Any, batch: Any) -> Any:
            model, moments = state
            grads = combined(of_sum, model, batch, k, right)
            updates, moments = TX.update(grads, moments, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, updates), moments

        return step

    return make_step, (model, TX.init(eqx.filter(model, eqx.is_array)))


def compiled(right: bool) -> tuple[Any, Any]:
    """A step of Keras: the model's compiled `train_step`, which averages over k batches."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])

    def make_step(k: int) -> Any:
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=k if k > 1 else None)
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction="sum" if right else "mean_with_sample_weight"))
        run = tf.function(model.train_step, autograph=False)

        def step(params: Any, batch: Any) -> Any:
            for variable, value in zip(model.trainable_variables, params, strict=True):
                variable.assign(value)
            weight = k * batch["mask"] / batch["mask"].sum() if right else batch["mask"]
            for rows in parts((batch["x"], batch["y"], weight), k):
                run(tuple(map(tf.constant, rows)))
            return [x.numpy() for x in model.trainable_variables]

        return step

    return make_step, [x.numpy() for x in model.trainable_variables]


def mirrored(right: bool) -> tuple[Any, Any]:
    """A step of TensorFlow: a `tf.function` under a strategy, with a replica per microbatch."""
    params = {"w": RNG.normal(size=(6, 3)).astype(np.float32)}

    def make_step(k: int) -> Any:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(k)])

        @tf.function
        def run(params: Any, parts: Any, count: Any) -> Any:
            def replica(part: Any) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(params)
                    error = tf.reduce_sum((part["x"] @ params["w"] - part["y"]) ** 2, -1)
                    divisor = count if right else tf.reduce_sum(part["mask"])
                    loss = tf.reduce_sum(error * part["mask"]) / divisor
                return tape.gradient(loss, params)

            how = tf.distribute.ReduceOp.SUM if right else tf.distribute.ReduceOp.MEAN
            return strategy.reduce(how, strategy.run(replica, (parts,)), axis=None)

        def step(params: Any, batch: Any) -> Any:
            of = strategy.experimental_distribute_values_from_function(
                lambda context: jax.tree.map(tf.constant, part(batch, k, context.replica_id_in_sync_group))
            )
            return run(jax.tree.map(tf.constant, params), of, tf.constant(batch["mask"].sum()))

        return step

    return make_step, params


FORMS = {"linen": linen, "nnx": in_place, "equinox": filtered, "keras": compiled, "strategy": mirrored}
RETURNS = {"strategy": "gradients"}
quick_first = [pytest.param(x, marks=[pytest.mark.full] * (x != "nnx")) for x in FORMS]


class Keyed(NamedTuple):
    """A train state with a PRNG key; a step that donates the state deletes the key."""

    params: Any
    key: Any


def donated(k: int) -> Any:
    @partial(jax.jit, donate_argnums=0)
    def step(state: Keyed, batch: Any) -> Keyed:
        grads = [(x["x"] * x["mask"][:, None]).sum(0) for x in parts(batch, k)]
        return Keyed(state.params - sum(grads) / batch["mask"].sum(), jax.random.fold_in(state.key, 1))

    return step


@pytest.mark.full
@pytest.mark.needs("jax", "optax", "flax", "equinox")
def test_a_step_may_donate_its_state() -> None:
    state = Keyed(jax.numpy.ones(6), jax.random.key(1))
    report = check_step(donated, state, BATCH, returns="params")
    assert report.passes, report
    assert not state.params.is_deleted()
    assert jax.random.uniform(state.key) >= 0, "the key is the caller's still"


@pytest.mark.full
@pytest.mark.needs("jax", "optax", "flax", "equinox")
@pytest.mark.parametrize("right", [True, False])
def test_a_step_may_change_its_state_and_return_metrics_alone(right: bool) -> None:
    make_step, state = in_place(right)

    def make(k: int) -> Any:
        step = make_step(k)

        def train_step(state: Any, batch: Any) -> Any:
            step(state, batch)
            return {"loss": batch["mask"].sum()}

        return train_step

    report = check_step(make, state, BATCH, returns="params")
    assert report.cause is (None if right else Cause.MEAN_OF_MEANS), report


@pytest.mark.full
@pytest.mark.needs("jax", "optax", "flax", "equinox")
@pytest.mark.parametrize("form", quick_first)
def test_a_mean_of_means_is_named_in_every_form(form: str) -> None:
    make_step, state = FORMS[form](right=False)
    report = check_step(make_step, state, BATCH, returns=RETURNS.get(form, "params"))
    assert report.cause is Cause.MEAN_OF_MEANS, report


@pytest.mark.full
@pytest.mark.needs("jax", "optax", "flax", "equinox")
@pytest.mark.parametrize("form", FORMS)
def test_the_right_mean_passes_in_every_form(form: str) -> None:
    make_step, state = FORMS[form](right=True)
    report = check_step(make_step, state, BATCH, returns=RETURNS.get(form, "params"))
    assert report.faults == (), report
    assert report.passes or form == "keras", report  # Keras layers stay in float32, so accuracy is not checked
