"""The laws of the monoid, for every reduction and in every mode, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gradcombine import reductions
from tests.spec import exact, laws, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, WEIGHTS, contributions, deal
from tests.spec.programs import REDUCTIONS, rows
from tests.spec.selection import OTHER_NAMES, QUICK_NAMES, traced_quickly, unrolled

SUBJECTS = REDUCTIONS | {
    "exact sum": reductions.sum("exact"),
    "exact mean": reductions.mean("exact"),
    "moments": reductions.moments(),
    "adasum": reductions.adasum(),
}
NAMES = pytest.mark.parametrize(
    "names",
    [
        *(pytest.param(names, id="_".join(names)) for names in (QUICK_NAMES, OTHER_NAMES, laws.ROUNDED_NAMES)),
        *(pytest.param((name,), id=name.replace(" ", "_")) for name in ("exact sum", "exact mean")),
    ],
)
TRACED = traced_quickly((str(QUICK_NAMES),))  # the bits of the others have quick tests of their own


@dataclass(frozen=True)
class Sides:
    """For each reduction and law, the two states that must be equal, finalized."""

    names: tuple[str, ...]

    def __call__(self, env: modes.Env, data: Any) -> Any:
        values, weights = rows(data["values"]), rows(data["weights"])
        return {name: laws.sides(SUBJECTS[name], values, weights) for name in self.names}


@TRACED
@unrolled
@NAMES
@settings(max_examples=10)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS))
def test_all_laws_where_nothing_rounds(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    for result in mode.run(Sides(names), deal(data, 1)):
        for name, of_one in result.items():
            laws.check(name, of_one, rounding=False)


@TRACED
@unrolled
@NAMES
@settings(max_examples=10)
@given(data=contributions(3, FLOATS, WEIGHTS))
def test_laws_under_rounding(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    """Addition of floats is not associative; every other law holds to the bit all the same."""
    for result in mode.run(Sides(names), deal(data, 1)):
        for name, of_one in result.items():
            laws.check(name, of_one, rounding=True)


def empty_values(env: modes.Env, data: Any) -> Any:
    return {name: reduction.finalize(reduction.init(data)) for name, reduction in SUBJECTS.items()}


@unrolled
def test_empty_states_have_a_value(mode: modes.Mode) -> None:
    """No contribution: zeros, ones for a product, the infinities for extrema; never NaN, never -0."""
    expected = {"product": 1.0, "min": np.inf, "max": -np.inf}
    (result,) = mode.run(empty_values, [{"w": np.float32([5, 6]), "none": None}])
    for name, value in result.items():
        assert value["none"] is None
        for leaf in value["w"] if name == "moments" else (value["w"],):
            np.testing.assert_array_equal(exact.bits(leaf), exact.bits(np.full(2, expected.get(name, 0), np.float32)))
