"""The monoid laws hold bit for bit, for every reduction in every mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gradcombine import reductions
from tests.spec import exact, laws, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, WEIGHTS, contributions
from tests.spec.programs import REDUCTIONS, rows
from tests.spec.selection import OTHER_NAMES, QUICK_NAMES, traced_quickly, unrolled

SUBJECTS = REDUCTIONS | {
    "exact sum": reductions.sum("exact"),
    "exact mean": reductions.mean("exact"),
    "moments": reductions.moments(),
    "adasum": reductions.adasum(),
}
EXACT_NAMES = ("exact sum", "exact mean")
NAMES = pytest.mark.parametrize("names", [QUICK_NAMES, OTHER_NAMES, laws.ROUNDED_NAMES, EXACT_NAMES], ids="_".join)


@dataclass(frozen=True)
class Sides:
    """Pairs that must be equal, by reduction and law."""

    names: tuple[str, ...]

    def __call__(self, env: modes.Env, data: Any) -> Any:
        values, weights = rows(data["values"]), rows(data["weights"])
        return {name: laws.sides(SUBJECTS[name], values, weights) for name in self.names}


@pytest.mark.sampled
@traced_quickly((str(QUICK_NAMES),))  # other quick tests cover the bits of the other reductions
@unrolled
@NAMES
@settings(max_examples=5)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS), rounded=contributions(3, FLOATS, WEIGHTS))
def test_all_laws(mode: modes.Mode, names: tuple[str, ...], data: Any, rounded: Any) -> None:
    """Addition of floats is not associative; every other law holds to the bit under rounding too."""
    for drawn, rounding in ((data, False), (rounded, True)):
        for result in mode.run(Sides(names), [drawn]):
            for name, pairs in result.items():
                laws.check(name, pairs, rounding)


def empty_values(env: modes.Env, data: Any) -> Any:
    return {name: reduction.finalize(reduction.init(data)) for name, reduction in SUBJECTS.items()}


@unrolled
def test_empty_states_have_a_value(mode: modes.Mode) -> None:
    """Without contributions: zeros, ones for a product, infinities for extrema; never NaN or -0."""
    expected = {"product": 1.0, "min": np.inf, "max": -np.inf}
    (result,) = mode.run(empty_values, [{"w": np.float32([5, 6]), "none": None}])
    for name, value in result.items():
        assert value["none"] is None
        for leaf in value["w"] if name == "moments" else (value["w"],):
            np.testing.assert_array_equal(exact.bits(leaf), exact.bits(np.full(2, expected.get(name, 0), np.float32)))
