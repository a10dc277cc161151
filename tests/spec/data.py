"""Weighted contributions as Hypothesis strategies, and how to deal them to replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

SHAPES: dict[str, tuple[int, ...]] = {"w": (2,), "scalar": (), "empty": (0, 2)}

EXACT = st.sampled_from([-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0])
"""Values whose sums and products are exact in float32, so that the order cannot matter."""

FLOATS = st.integers(0, 2**32 - 1).map(
    lambda pattern: float(
        np.uint32(pattern & 0x87FFFFFF | 0x3C000000 + (pattern >> 27 & 7) * 0x800000).view(np.float32)
    )
)
"""Any sign and significand with eight exponents below 1: nearly every addition rounds, and nothing underflows."""

CLOSE = st.integers(0, 2**32 - 1).map(
    lambda pattern: float(
        np.uint32(pattern & 0x807FFFFF | 0x3C000000 + (pattern >> 27 & 3) * 0x800000).view(np.float32)
    )
)
"""Like `FLOATS` with four exponents: no two products with `WEIGHTS` are more than nine exponents apart, so that an
exact sum of them loses no digit."""

EXACT_WEIGHTS = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.0, 0.5])

WEIGHTS = EXACT_WEIGHTS | st.just(0.1)


@st.composite
def contributions(draw: Any, n: int, elements: Any, weights: Any = WEIGHTS) -> dict[str, Any]:
    """``n`` stacked trees with weights. Contributions of weight 0 hold NaN; one leaf is None."""
    scales = np.float32(draw(st.lists(weights, min_size=n, max_size=n)))
    values: dict[str, Any] = {"none": None}
    for name, shape in SHAPES.items():
        size = n * int(np.prod(shape))
        drawn = np.float32(draw(st.lists(elements, min_size=size, max_size=size))).reshape((n, *shape))
        drawn[scales == 0] = np.nan
        values[name] = drawn
    return {"values": values, "weights": scales}


def first(data: Any, n: int) -> Any:
    values = {name: None if x is None else x[:n] for name, x in data["values"].items()}
    return {"values": values, "weights": data["weights"][:n]}


def deal(data: Any, replicas: int) -> list[Any]:
    """Splits the contributions into one contiguous block per replica."""

    def block(x: Any, rank: int) -> Any:
        return None if x is None else np.split(x, replicas)[rank]

    return [
        {
            "values": {name: block(x, rank) for name, x in data["values"].items()},
            "weights": block(data["weights"], rank),
        }
        for rank in range(replicas)
    ]
