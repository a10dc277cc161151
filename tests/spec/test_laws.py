"""The laws of the monoid, in every mode, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings

from tests.spec import exact, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, WEIGHTS, contributions, deal
from tests.spec.programs import REDUCTIONS, rows

CHOOSING = ("min", "max", "first", "last")
"""Their values are of one of the contributions, unrounded."""


def commutative(results: Any) -> Any:
    return {name: laws for name, laws in results.items() if name not in ("first", "last")}


@dataclass(frozen=True)
class Sides:
    """For each reduction and law, the two states that must be equal, finalized."""

    names: tuple[str, ...]

    def __call__(self, env: modes.Env, data: Any) -> Any:
        return {name: _sides(REDUCTIONS[name], data) for name in self.names}


def _sides(reduction: Any, data: Any) -> Any:
    values, weights = rows(data["values"]), rows(data["weights"])
    empty = reduction.init(values[0])
    a, b, c = (reduction.update(empty, value, weight) for value, weight in zip(values, weights, strict=True))
    merge = reduction.merge
    pairs = {
        "associative": (merge(merge(a, b), c), merge(a, merge(b, c))),
        "commutative": (merge(a, b), merge(b, a)),
        "update is merge": (
            reduction.update(a, values[1], weights[1]),
            merge(a, reduction.update(empty, values[1], weights[1])),
        ),
        "neutral on the left": (merge(empty, a), a),
        "neutral on the right": (merge(a, empty), a),
        "weight 0, traced": (reduction.update(a, _nan(values[1]), weights[0] * 0), a),
        "weight 0, known": (reduction.update(a, _nan(values[1]), 0), a),
        "cleared": (reduction.clear(a), empty),
        "None adds nothing": (_values(reduction.update(a, dict.fromkeys(values[0]), 1)), _values(a)),
    }
    finalize = reduction.finalize
    return {
        law: pair if law == "None adds nothing" else tuple({"value": finalize(s), "weight": s.weight} for s in pair)
        for law, pair in pairs.items()
    }


def _values(state: Any) -> Any:
    return state.value


def _nan(value: Any) -> Any:
    return {name: None if x is None else x * np.float32(np.nan) for name, x in value.items()}


def check(results: Any, laws: Any = None) -> None:
    for name in results:
        for law, (left, right) in results[name].items():
            if laws is None or law in laws:
                for x, y in zip(_leaves(left), _leaves(right), strict=True):
                    np.testing.assert_array_equal(exact.bits(x), exact.bits(y), err_msg=f"{name}: {law}")


def _leaves(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [leaf for child in node.values() for leaf in _leaves(child)]
    return [] if node is None else [node]


ROUNDED = ("update is merge", "neutral on the left", "neutral on the right", "weight 0, traced", "weight 0, known")


@settings(max_examples=10)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS))
def test_all_laws_where_nothing_rounds(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    for result in mode.run(Sides(names), deal(data, 1)):
        check(commutative(result))
        check({n: {k: v for k, v in r.items() if k != "commutative"} for n, r in result.items()})


@settings(max_examples=10)
@given(data=contributions(3, FLOATS, WEIGHTS))
def test_laws_under_rounding(mode: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    """Addition of floats is not associative; every other law holds to the bit all the same."""
    for result in mode.run(Sides(names), deal(data, 1)):
        check(commutative(result), ("commutative",))
        check(result, (*ROUNDED, "cleared", "None adds nothing"))
        picked = {name: result[name]["associative"] for name in names if name in CHOOSING}
        check({name: {"associative": (a["value"], b["value"])} for name, (a, b) in picked.items()})


def empty_values(env: modes.Env, data: Any) -> Any:
    return {name: reduction.finalize(reduction.init(data)) for name, reduction in REDUCTIONS.items()}


def test_empty_states_have_a_value(mode: modes.Mode) -> None:
    """No contribution: zeros, ones for a product, the infinities for extrema; never NaN, never -0."""
    expected = {"product": 1.0, "min": np.inf, "max": -np.inf}
    (result,) = mode.run(empty_values, [{"w": np.float32([5, 6]), "none": None}])
    for name, value in result.items():
        assert value["none"] is None
        np.testing.assert_array_equal(exact.bits(value["w"]), exact.bits(np.full(2, expected.get(name, 0), np.float32)))
