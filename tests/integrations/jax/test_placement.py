"""A step compiles only once when the parameters are committed to a mesh or a device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gradcombine.integrations.jax import train_step, value_and_grad
from gradcombine.integrations.optax import MultiSteps, accumulate, skip_not_finite
from tests.spec.selection import cases

pytestmark = pytest.mark.needs("jax")

ADAM = optax.adam(0.5)
BATCH = np.ones((4, 8), np.float32)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(params["w"][None] * x)


def on_a_mesh(spec: Any) -> Any:
    return NamedSharding(jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]), spec)


PLACES: dict[str, Callable[[], Any]] = {
    "mesh": lambda: on_a_mesh(P()),
    "split over a mesh": lambda: on_a_mesh(P("d")),
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


FORMS: dict[str, Callable[[Any], Any]] = {
    "train_step every": lambda params: of_step(train_step(loss, ADAM, every=2), params),
    "train_step microbatches": lambda params: of_step(train_step(loss, ADAM, microbatches=2), params),
    "accumulate": lambda params: of_transformation(accumulate(ADAM, 2, skip=skip_not_finite()), params),
    "MultiSteps": lambda params: of_transformation(MultiSteps(ADAM, 2), params),
    "MultiSteps compat": lambda params: of_transformation(MultiSteps(ADAM, 2, compat=True), params),
}


QUICK = [
    *((form, "mesh") for form in ("train_step microbatches", "accumulate")),
    ("train_step every", "split over a mesh"),
]


@pytest.mark.parametrize(("form", "place"), cases(QUICK, FORMS, PLACES))
def test_a_step_compiles_once(form: str, place: str) -> None:
    with jax.numpy_dtype_promotion("standard"):
        step, params, state = FORMS[form](jax.device_put({"w": np.ones(8, np.float32)}, PLACES[place]()))
        devices = params["w"].sharding.device_set
        assert all(x.committed and x.sharding.device_set == devices for x in jax.tree.leaves(state))
        for _ in range(3):
            params, state, _ = step(params, state, BATCH)
    assert step._cache_size() == 1


def test_parameters_without_a_place_leave_the_state_without_one() -> None:
    state = train_step(loss, ADAM, every=2).init({"w": jnp.ones(8)})
    assert not any(x.committed for x in jax.tree.leaves(state))
