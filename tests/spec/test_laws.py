"""The laws of the monoid, for every reduction and in every mode, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gradcombine import reductions, tree
from tests.spec import exact, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, WEIGHTS, contributions, deal
from tests.spec.programs import REDUCTIONS, rows
from tests.spec.selection import EXACT_NAMES, OTHER_NAMES, QUICK_NAMES

SUBJECTS = REDUCTIONS | {
    "exact sum": reductions.sum("exact"),
    "exact mean": reductions.mean("exact"),
    "moments": reductions.moments(),
    "adasum": reductions.adasum(),
}
ROUNDED_NAMES = ("moments", "adasum")
"""Merges round, whatever the contributions are."""

NAMES = pytest.mark.parametrize("names", [QUICK_NAMES, OTHER_NAMES, EXACT_NAMES, ROUNDED_NAMES], ids=" ".join)
ASSOCIATIVE = ("min", "max", "first", "last", *EXACT_NAMES)
"""The value is of one of the contributions, or it is rounded once."""


def holds(name: str, law: str, rounding: bool) -> bool:
    """Whether the law is one of this reduction, and of contributions of whose sums some are rounded."""
    if law == "associative":
        return name in ASSOCIATIVE if rounding else name not in ROUNDED_NAMES
    if law == "commutative":
        return name not in ("first", "last")
    return (name, law) != ("moments", "None adds nothing")  # there it stands for a contribution of zeros


@dataclass(frozen=True)
class Sides:
    """For each reduction and law, the two states that must be equal, finalized."""

    names: tuple[str, ...]

    def __call__(self, env: modes.Env, data: Any) -> Any:
        return {name: _sides(SUBJECTS[name], data) for name in self.names}


def _sides(reduction: Any, data: Any) -> Any:
    values, weights = rows(data["values"]), rows(data["weights"])
    empty = reduction.init(values[0])
    a, b, c = (reduction.update(empty, value, weight) for value, weight in zip(values, weights, strict=True))
    merge = reduction.merge
    both = merge(a, b)
    pairs = {
        "associative": (merge(both, c), merge(a, merge(b, c))),
        "commutative": (both, merge(b, a)),
        "update is merge": (both, reduction.update(a, values[1], weights[1])),
        "neutral on the left": (merge(empty, both), both),
        "neutral on the right": (merge(both, empty), both),
        "weight 0, traced": (reduction.update(both, _nan(values[1]), weights[0] * 0), both),
        "weight 0, known": (reduction.update(both, _nan(values[1]), 0), both),
        "cleared": (reduction.clear(both), empty),
        "None adds nothing": (reduction.update(both, dict.fromkeys(values[0]), 1), both),
    }

    def side(law: str, state: Any) -> Any:
        if law == "None adds nothing":  # to the value; its weight counts
            return state.value
        return {"value": reduction.finalize(state), "weight": state.weight}

    return {law: tuple(side(law, state) for state in pair) for law, pair in pairs.items()}


def _nan(value: Any) -> Any:
    return {name: None if x is None else x * np.float32(np.nan) for name, x in value.items()}


def check(results: Any, rounding: bool) -> None:
    for name, laws in results.items():
        for law, sides in laws.items():
            if holds(name, law, rounding):
                # Weights are rounded too, and may be so in another way.
                only = "value" if law == "associative" and rounding else None
                left, right = (tree.flatten("laws", side[only] if only else side)[0] for side in sides)
                for x, y in zip(left, right, strict=True):
                    assert x is y is None or (exact.bits(x) == exact.bits(y)).all(), f"{name}: {law}: {x}, {y}"


@NAMES
@settings(max_examples=10)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS))
def test_all_laws_where_nothing_rounds(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    for result in mode.run(Sides(names), deal(data, 1)):
        check(result, rounding=False)


@NAMES
@settings(max_examples=10)
@given(data=contributions(3, FLOATS, WEIGHTS))
def test_laws_under_rounding(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    """Addition of floats is not associative; every other law holds to the bit all the same."""
    for result in mode.run(Sides(names), deal(data, 1)):
        check(result, rounding=True)


def empty_values(env: modes.Env, data: Any) -> Any:
    return {name: reduction.finalize(reduction.init(data)) for name, reduction in SUBJECTS.items()}


def test_empty_states_have_a_value(mode: modes.Mode) -> None:
    """No contribution: zeros, ones for a product, the infinities for extrema; never NaN, never -0."""
    expected = {"product": 1.0, "min": np.inf, "max": -np.inf}
    (result,) = mode.run(empty_values, [{"w": np.float32([5, 6]), "none": None}])
    for name, value in result.items():
        assert value["none"] is None
        for leaf in value["w"] if name == "moments" else (value["w"],):
            np.testing.assert_array_equal(exact.bits(leaf), exact.bits(np.full(2, expected.get(name, 0), np.float32)))
