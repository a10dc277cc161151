"""Ratios of sums have one exact result in a list, over time and over replicas, in every mode."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine.reductions import Ratio, ratios
from tests.spec import exact, modes
from tests.spec.programs import rows
from tests.spec.selection import COLLECTIVE, among, unrolled

DATA = {
    "tokens": np.float32([[6, 3], [2, -5], [np.nan, 1], [0.5, 0.25]]),
    "count": np.int32([3, 4, 0, 6]),
    "balance": np.float32([[1, 0], [8, 4], [-2, 2], [np.inf, 0]]),
    "microbatches": np.float32([1, 1, 1, 0]),
}
REDUCTION = ratios(["tokens", "microbatches"])


def contribution(row: Any) -> dict[str, Ratio]:
    return {"tokens": Ratio(row["tokens"], row["count"]), "microbatches": Ratio(row["balance"], row["microbatches"])}


def expected(data: Any) -> list[float]:
    """Expected ratios. A contribution of denominator 0 is skipped, even if it is NaN."""
    total = [Fraction(0), Fraction(0)]
    for values, counts in (("tokens", "count"), ("balance", "microbatches")):
        held = [(x, int(n)) for x, n in zip(data[values], data[counts], strict=True) if n]
        for i in range(2):
            # These sums are exact; the quotients and the sum of both ratios round once each.
            quotient = sum((Fraction(float(x[i])) for x, _ in held), Fraction(0)) / sum(n for _, n in held)
            total[i] += Fraction(float(exact.round_to(quotient)))
    return [float(exact.round_to(x)) for x in total]


def everywhere(env: modes.Env, data: Any) -> Any:
    contributions = [contribution(row) for row in rows(data)]
    acc = gc.accumulate(REDUCTION, every=len(contributions), order="tree")
    state = acc.init(contributions[0])
    for value in contributions:
        state = acc.update(value, state)
    return gc.combine(REDUCTION, contributions, order="tree"), acc.value(state)


@unrolled
def test_a_list_and_time(mode: modes.Mode) -> None:
    (results,) = mode.run(everywhere, [DATA])
    for result in results:
        assert np.asarray(result).tolist() == expected(DATA)


def over_replicas(env: modes.Env, data: Any) -> Any:
    (own,) = [contribution(row) for row in rows(data)]
    return gc.all_reduce(REDUCTION, own, over=env.collective)


@pytest.mark.parametrize("name", among(COLLECTIVE[:1], modes.EXCHANGING))
def test_replicas(name: str) -> None:
    dealt = [{key: x[i : i + 1] for key, x in DATA.items()} for i in range(4)]
    for result in modes.get(name).run(over_replicas, dealt):
        assert np.asarray(result).tolist() == expected(DATA)
