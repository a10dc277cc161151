"""Input that cannot be checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax
import pytest

from gradcombine.errors import GradCombineError
from tests.verify.microbatches.problem import ALIKE, check, right

SGD = optax.sgd(0.1)


@pytest.mark.parametrize(
    ("windows", "inner", "accumulating", "options", "message"),
    [
        ([], SGD, right, {}, "at least one window"),
        ([[]], SGD, right, {}, "at least one window"),
        (ALIKE, SGD, lambda inner: right(SGD), {}, "inner transformation once, received 0 times"),
        (ALIKE, SGD, lambda inner: optax.chain(right(inner), right(inner)), {}, "once, received 2 times"),
        (ALIKE, SGD, lambda inner: 3, {}, "accumulating to return a transformation, received int"),
        (ALIKE, "sgd", right, {}, "an optax transformation or a Keras optimizer, received str"),
        (ALIKE, SGD, right, {"weights": lambda batch: 0}, "positive weights, received 0.0"),
        (ALIKE, SGD, right, {"weights": lambda batch: np.nan}, "positive weights, received nan"),
        (ALIKE, SGD, right, {"loss": lambda params, batch: params["w"][0] * np.float32("nan")}, "finite gradients"),
    ],
)
def test_is_refused(windows: Any, inner: Any, accumulating: Any, options: Any, message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        check(windows, inner, accumulating, **options)
