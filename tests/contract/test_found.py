"""Regressions: mistakes that once raised another error or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import optax
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.audit import audit
from gradcombine.integrations import horovod
from gradcombine.integrations import keras as for_keras
from gradcombine.integrations import optax as for_optax
from gradcombine.integrations.jax import grads_by_denominator, train_step, value_and_grad, zero
from gradcombine.places.window import Window
from gradcombine.verify import plan

SGD = optax.sgd(0.1)


def own(r: Any) -> Any:
    return reductions.sum()


def refusal(call: Callable[[Any], Any], value: Any) -> str:
    try:
        call(value)
    except gc.GradCombineError as error:
        return str(error)
    return ""


@pytest.fixture
def optimizer() -> Any:
    made = for_keras.Accumulate(keras.optimizers.SGD(), 2)
    made.build([keras.Variable(0.0)])
    return made


_multi_steps = for_optax.MultiSteps(SGD, 2)
_step = train_step(lambda w, x: w * x, SGD)


@pytest.mark.parametrize(
    "settings", [{"dtype": "float8_e8m0fnu"}, {"dtype": "float8_e4m3fn"}, {"name": "a/b"}, {"name": "\ud800"}]
)
def test_a_keras_optimizer_that_its_backend_could_not_hold_is_refused(settings: dict[str, str]) -> None:
    with pytest.raises(gc.GradCombineError):
        for_keras.Accumulate("sgd", 2, **settings).apply([tf.constant(1.0)], [keras.Variable(0.0)])


def test_keras_weights_of_which_one_is_wrong_change_none(optimizer: Any) -> None:
    before = [x.numpy() for x in optimizer.variables]
    for at in range(len(before)):
        wrong = [np.full_like(x, 1) for x in before]
        wrong[at] = np.full(np.shape(before[at]), 1j)
        assert refusal(optimizer.set_weights, wrong)
        for x, y in zip(optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(x.numpy(), y)


def test_a_step_keeps_the_dtypes_of_its_optimizers_state_or_refuses_another_form() -> None:
    """Dtypes stay fixed over the calls of a window, as a conditional needs it."""

    def counting(more: Callable[[Any], Any]) -> optax.GradientTransformation:
        return optax.GradientTransformation(lambda p: jnp.bfloat16(0), lambda u, s, p=None: (u, more(s)))

    step = train_step(lambda w, x: jnp.mean(w * x), counting(lambda s: s.astype(jnp.float32) + 1), every=1)
    assert step(0.0, step.init(0.0), np.float32([1]))[1].opt_state == jnp.bfloat16(1)
    step = train_step(lambda w, x: jnp.mean(w * x), counting(lambda s: (s, s)), every=1)
    with pytest.raises(gc.GradCombineError, match="an optimizer state whose structure and shapes do not change"):
        step(0.0, step.init(0.0), np.float32([1]))


def test_a_scalar_that_jit_does_not_take_is_named() -> None:
    with pytest.raises(gc.GradCombineError, match=r"train_step: leaf \[0\]: .* received ulonglong"):
        train_step(lambda w, x: w * x, SGD)(0.0, _step.init(0.0), np.ulonglong(2))


FLATTENING: dict[str, Callable[[Any], Any]] = {
    "value_and_grad": lambda x: value_and_grad(own, 2)(x, np.ones(4)),
    "value_and_grad, keywords": lambda x: value_and_grad(own, 2)(0.0, np.ones(4), x=x),
    "init": lambda x: train_step(own, SGD).init(x),
    "train_step": lambda x: train_step(own, SGD, microbatches=2).function(0.0, None, x),
    "grads_by_denominator": lambda x: grads_by_denominator(own, {"a": "b"})(x),
    "plan": lambda x: plan(own, x, np.ones(4), SGD, microbatches=2),
    "audit": lambda x: audit(jax.jit(own), x),
    "MultiSteps": lambda x: _multi_steps.update(1.0, _multi_steps.init(0.0)._replace(inner_opt_state=x)),
    "a state": lambda x: _step.function(0.0, _step.init(0.0)._replace(opt_state=x), 1.0),
}


@pytest.mark.parametrize("call", FLATTENING.values(), ids=FLATTENING)
def test_dicts_whose_keys_have_no_order_are_named(call: Callable[[Any], Any]) -> None:
    keys = {"a": np.float32(1), 1: np.float32(1)}
    assert "dicts with keys that JAX can sort" in refusal(call, keys)


def test_shapes_and_ledgers_that_no_memory_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gc.GradCombineError, match=r"from 1 to 2\*\*24 microbatches, received 16777217"):
        reductions.numbered(reductions.sum(), 2**24 + 1)
    statefile.save(path := tmp_path / "x.npz", reductions.sum(), reductions.sum().init(np.float32(0)))
    with pytest.raises(gc.GradCombineError, match="a shape that an array can have"):
        statefile.load(path, reductions.sum(), SimpleNamespace(dtype=np.dtype(np.float32), shape=(2**70,)))


def test_a_dtype_that_ends_the_process_in_a_compiler_is_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected a dtype that JAX has, received float6_e2m3fn"):
        audit(jax.jit(lambda x: x + 1), np.ones((), ml_dtypes.float6_e2m3fn))


@pytest.mark.parametrize("every", [np.int64(4), np.array(4)])
def test_the_length_of_a_window_is_an_integer(every: Any) -> None:
    assert type(Window(reductions.mean(), every).every) is int


def test_costs_of_accumulators_of_several_arrays_are_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="one array per leaf"):
        zero.exchange_costs(reductions.sum("exact"), np.float32([1]), 2, 2)


def test_states_and_batches_that_only_jax_knows() -> None:
    """Rejects an optimizer state whose structure changes, and float0 arrays."""
    tx = for_optax.accumulate(SGD, 1)
    params = {"w": np.zeros(2, np.float32)}
    state = tx.init(params)
    with pytest.raises(gc.GradCombineError, match="expected an optimizer state whose structure and shapes"):
        tx.update(params, state._replace(inner=[*state.inner]), params)
    with pytest.raises(gc.GradCombineError, match="expected a batch of numbers, received an array of float0"):
        value_and_grad(own, 2)(0.0, np.zeros((4, 2), jax.dtypes.float0))


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_python_float_beyond_float32_is_an_infinite_gradient_of_a_process_set() -> None:
    reduce = horovod.AllReduce(gc.LOCAL, "adasum", process_set=[0], prescale_factor=2)
    assert [x.numpy().tolist() for x in reduce([tf.constant([1.0]), 1e308])] == [[2.0], np.inf]
