"""Steps of released packages: verdicts agree with a closed form in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.field.problem import MASK, TABLE, TOKENS, loss, truth
from tests.field.run import checked

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("jax", "optax", "flax", "equinox", "keras", "tensorflow"),
    pytest.mark.usefixtures("as_users_do"),
]
VERDICTS = {
    "equinox_loop": ["MEAN_OF_MEANS"],
    "flax_nnx_optimizer": ["MEAN_OF_MEANS"],
    "keras_optimizer": ["MEAN_OF_MEANS"],
    "optax_apply_every": ["SUM"],
    "optax_micro_grad": [],
    "optax_multi_steps": ["MEAN_OF_MEANS"],
}


@pytest.mark.parametrize("harness", VERDICTS)
@pytest.mark.filterwarnings("default")  # of the packages
def test_a_package_is_judged_as_the_truth_has_it(harness: str) -> None:
    row = checked(harness)
    assert row["causes"] == VERDICTS[harness], row
    whole, divided = row["off"]
    assert whole < 1e-5
    assert (divided > 1e-2) == bool(row["causes"]), row


def test_the_closed_form_is_the_derivative() -> None:
    with jax.enable_x64(True):
        table, way = TABLE.astype(np.float64), np.random.default_rng(1).normal(size=TABLE.shape)

        def mean(t: float) -> float:
            total, count = loss(jax.numpy.asarray(table + t * way), TOKENS, MASK)
            return float(total / count)

        slope = (mean(1e-6) - mean(-1e-6)) / 2e-6
    np.testing.assert_allclose(np.sum(truth() * way), slope, rtol=1e-8)
