"""Invalid arguments of `check_microbatches`."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

from gradcombine.errors import GradCombineError
from gradcombine.integrations.optax import accumulate
from tests.verify.microbatches.problem import ALIKE, check

SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("batch", "inner", "accumulating", "options", "message"),
    [
        ({}, SGD, accumulate, {}, "a batch of two examples or more, received none"),
        (ALIKE, SGD, accumulate, {"microbatches": [32]}, "as many examples as parts: 32 microbatches"),
        (ALIKE, SGD, lambda inner, k: accumulate(SGD, k), {}, "inner transformation once, received 0 times"),
        (ALIKE, SGD, lambda inner, k: optax.chain(accumulate(inner, k), accumulate(inner, k)), {}, "received 2 times"),
        (ALIKE, SGD, lambda inner, k: 3, {}, "received AttributeError"),
        (ALIKE, "sgd", accumulate, {}, "an optax transformation or a Keras optimizer, received str"),
        (
            ALIKE,
            SGD,
            accumulate,
            {"loss": lambda params, batch: params["w"][0] * np.float32("nan")},
            "finite gradients",
        ),
    ],
)
def test_is_refused(batch: Any, inner: Any, accumulating: Any, options: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=f"^check_microbatches: .*{message}"):
        check(batch, inner, accumulating, **options)
