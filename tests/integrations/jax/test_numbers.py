"""Python and NumPy scalars as parameters and gradients, as jit and optax accept them."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gradcombine.integrations.jax import train_step
from gradcombine.integrations.optax import MultiSteps, accumulate, skip_large
from tests.spec.selection import cases

NEGATE = optax.sgd(1.0)
PARAMS: dict[str, Any] = {
    "float": 5.0,
    "list of floats": [5.0, 5.0],
    "beside None and an array": {"w": 5.0, "frozen": None, "v": np.float32([5, 5])},
    "numpy scalar": np.float32(5),
    "numpy float64": np.float64([5, 5]),
}


def loss(params: Any, x: Any) -> Any:
    """Every element of the gradient is the mean of x."""
    return sum((jnp.sum(w) for w in jax.tree.leaves(params)), jnp.float32(0)) * jnp.mean(x)


def require_all(values: Any, like: Any, expected: float) -> None:
    wanted = jax.tree.map(lambda x: np.full(np.shape(x), expected, np.float32), like)
    chex.assert_trees_all_equal(values, wanted, strict=True)


FORMS = ("every", "microbatches")
QUICK = [("beside None and an array", "every"), ("float", "microbatches"), ("numpy float64", "microbatches")]


@pytest.mark.parametrize(("name", "form"), cases(QUICK, PARAMS, FORMS))
def test_a_step_trains_them(name: str, form: str) -> None:
    step = train_step(loss, NEGATE, **{form: 2})
    params, state = PARAMS[name], step.init(PARAMS[name])
    for x in np.float32([[1, 1], [1, 5]]) if form == "every" else [np.float32([1, 1, 1, 5])]:
        params, state, _ = step(params, state, x)
    require_all(params, PARAMS[name], 5 - 2)


TRANSFORMATIONS = {
    "accumulate": accumulate(NEGATE, 2),
    "accumulate with skip": accumulate(NEGATE, 2, skip=skip_large(100.0)),
    "MultiSteps": MultiSteps(NEGATE, 2),
    "MultiSteps compat": MultiSteps(NEGATE, 2, compat=True),
}
QUICK_PAIRS = [
    *(("beside None and an array", name) for name in ("accumulate with skip", "MultiSteps compat")),
    *(("float", name) for name in ("accumulate", "MultiSteps")),
    ("numpy float64", "accumulate"),
]


@pytest.mark.parametrize(("name", "transformation"), cases(QUICK_PAIRS, PARAMS, TRANSFORMATIONS))
def test_a_transformation_takes_them(name: str, transformation: str) -> None:
    tx: Any = TRANSFORMATIONS[transformation]
    params, state = PARAMS[name], tx.init(PARAMS[name])
    for gradient in (1, 3):
        grads = jax.tree.map(lambda w, gradient=gradient: w * 0 + gradient, params)
        updates, state = tx.update(grads, state, params)
    require_all(updates, params, -2)
