"""A step compiles only once: its results have the devices and dtypes of its arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gradcombine.integrations.jax import train_step, value_and_grad
from gradcombine.integrations.optax import MultiSteps, accumulate, skip_not_finite
from tests.integrations.jax.replicas import mesh
from tests.spec.selection import cases

ADAM = optax.adam(0.5)
BATCH = np.ones((4, 8), np.float32)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(params["w"][None] * x)


PLACES: dict[str, Callable[[], Any]] = {
    "mesh": lambda: NamedSharding(mesh(2), P()),
    "split over a mesh": lambda: NamedSharding(mesh(2), P("d")),
    "device": lambda: SingleDeviceSharding(jax.devices()[1]),
}


def of_step(step: Any, params: Any) -> tuple[Any, Any, Any]:
    return step.compiled, params, step.init(params)


def of_transformation(tx: Any, params: Any) -> tuple[Any, Any, Any]:
    gradient = value_and_grad(loss, 2)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = tx.update(gradient(params, x)[1], state, params)
        return optax.apply_updates(params, updates), state, None

    return step, params, tx.init(params)


FORMS: dict[str, Callable[[Any, Any], Any]] = {
    "train_step every": lambda tx, params: of_step(train_step(loss, tx, every=2), params),
    "train_step microbatches": lambda tx, params: of_step(train_step(loss, tx, microbatches=2), params),
    "accumulate": lambda tx, params: of_transformation(accumulate(tx, 2, skip=skip_not_finite()), params),
    "MultiSteps": lambda tx, params: of_transformation(MultiSteps(tx, 2), params),
    "MultiSteps compat": lambda tx, params: of_transformation(MultiSteps(tx, 2, compat=True), params),
}


QUICK = [
    *((form, "mesh") for form in ("train_step microbatches", "accumulate")),
    ("train_step every", "split over a mesh"),
]


@pytest.mark.parametrize(("form", "place"), cases(QUICK, FORMS, PLACES))
def test_a_step_compiles_once(form: str, place: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        step, params, state = FORMS[form](ADAM, jax.device_put({"w": np.ones(8, np.float32)}, PLACES[place]()))
        devices = params["w"].sharding.device_set
        assert all(x.committed and x.sharding.device_set == devices for x in jax.tree.leaves(state))
        for _ in range(3):
            params, state, _ = step(params, state, BATCH)
    assert step._cache_size() == 1


def test_parameters_without_a_place_leave_the_state_without_one() -> None:
    state = train_step(loss, ADAM, every=2).init({"w": jnp.ones(8)})
    assert not any(x.committed for x in jax.tree.leaves(state))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_the_optimizer_promotes_keeps_its_dtype(form: str) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates, state * np.float32(1.5)

    promoting = optax.GradientTransformation(lambda params: jnp.ones((), jnp.bfloat16), update)
    step, params, state = FORMS[form](promoting, {"w": jnp.ones(8)})
    for _ in range(2):
        params, state, _ = step(params, state, BATCH)
    (kept,) = [x for x in jax.tree.leaves(state) if x.dtype == jnp.bfloat16]
    assert kept == (1.5**2 if "microbatches" in form else 1.5)
    assert step._cache_size() == 1
