"""Errors of training steps; a failed call leaves parameters and state intact."""

from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradcombine as gc
from gradcombine.integrations.jax import Loss, train_step

pytestmark = pytest.mark.needs("jax")

NEGATE = optax.sgd(1.0)
X = np.ones((1, 2, 4), np.float32)


def start() -> Any:
    return {"w": jnp.ones(4), "frozen": None}


def linear(params: Any, x: Any) -> Any:
    return jnp.mean(params["w"][None] * x)


def bad_state() -> Any:
    return optax.EmptyState()


def made(loss: Any = linear, optimizer: Any = NEGATE, **options: Any) -> Any:
    roles = {x.name for x in fields(Loss)} & set(options)
    of_loss = Loss(loss, **{name: options.pop(name) for name in roles}) if roles else loss
    return train_step(of_loss, optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "expected a window length that is an integer of 1 or more"),
        ({"every": 2.5}, "received 2.5"),
        ({"microbatches": 0}, r"expected from 1 to 2\*\*24 microbatches"),
        ({"every": 2, "microbatches": 2}, "expected every or microbatches, received both"),
        ({"optimizer": optax.sgd}, "expected an optax.GradientTransformation, received function"),
        ({"every": lambda index: 2, "order": "tree"}, "expected max_every"),
        ({"over": None}, "expected a collective"),
        ({"carry_argnum": 0}, "expected argument positions"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(gc.GradCombineError, match=message):
        made(**options)


@pytest.mark.parametrize(
    ("options", "state", "message"),
    [
        ({}, bad_state, "expected a TrainState, from step.init.*, received EmptyState"),
        (
            {"has_aux": True, "loss": lambda p, x: (linear(p, x), x[0])},
            None,
            "expected a state made by step.init.*, received one made without aux",
        ),
        ({"loss": lambda p, x: p["w"]}, None, "expected a loss that is a real floating scalar"),
        ({"weight": lambda x: -1}, None, "expected a finite weight that is not negative, received -1"),
        (
            {"differentiate": False},
            None,
            r"expected a function that returns \(value, gradients\), for differentiate=False",
        ),
        (
            {"differentiate": False, "loss": lambda p, x: (jnp.float32(0), {"w": x})},
            None,
            r"leaf \['grads'\]\['frozen'\]: expected .* a leaf here, received nothing",
        ),
    ],
)
def test_a_failed_call_damages_no_state(options: dict[str, Any], state: Any, message: str) -> None:
    step = made(**{"every": 2} | options)
    params = start()
    given = step.init(params) if state is None else state()
    with pytest.raises(gc.GradCombineError, match=message):
        step(params, given, X[0])
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, given)))


def test_a_carry_is_asked_for_and_refused() -> None:
    with pytest.raises(gc.GradCombineError, match="expected no carry, received int"):
        train_step(linear, NEGATE).init(start(), carry=3)
    with pytest.raises(gc.GradCombineError, match=r"expected step.init\(params, carry=...\), for carry_argnum"):
        train_step(Loss(linear, carry_argnum=1), NEGATE).init(start())


def test_whole_windows_have_nothing_to_flush() -> None:
    step = train_step(linear, NEGATE, microbatches=2)
    with pytest.raises(gc.GradCombineError, match="expected a step with every, for flush"):
        step.flush(start(), step.init(start()))
