"""The laws of the monoid, as pairs of states that must be equal: one oracle for every reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import gradcombine as gc
from gradcombine.sparse import RowSparse
from tests.spec import exact

ROUNDED_NAMES = ("moments", "adasum")
"""Merges round, whatever the contributions are."""
ASSOCIATIVE = ("min", "max", "first", "last", "exact sum", "exact mean")
"""The value is of one of the contributions, or it is rounded once."""


def holds(name: str, law: str, rounding: bool) -> bool:
    """Whether the law is one of this reduction, and of contributions of whose sums some are rounded."""
    if law == "associative":
        return name in ASSOCIATIVE if rounding else name not in ROUNDED_NAMES
    if law == "commutative":
        return name not in ("first", "last")
    return (name, law) != ("moments", "None adds nothing")  # there it stands for a contribution of zeros


def value_and_weight(reduction: gc.Reduction, state: Any) -> Any:
    return {"value": reduction.finalize(state), "weight": state.weight}


def sides(
    reduction: gc.Reduction,
    values: list[Any],
    weights: list[Any],
    told: Callable[[gc.Reduction, Any], Any] = value_and_weight,
) -> dict[str, tuple[Any, Any]]:
    """For each law, what is told of the two states that must be equal.

    Args:
      values: three contributions, dicts.
      weights: theirs.
      told: a function of the reduction and a state.
    """
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

    of_both = told(reduction, both)

    def side(law: str, state: Any) -> Any:
        if law == "None adds nothing":  # to the value; its weight counts
            return state.value
        return of_both if state is both else told(reduction, state)

    return {law: (side(law, left), side(law, right)) for law, (left, right) in pairs.items()}


def _nan(value: Any) -> Any:
    nan = np.float32(np.nan)

    def of(x: Any) -> Any:
        return x._replace(values=x.values * nan) if isinstance(x, RowSparse) else x * nan

    return {name: None if x is None else of(x) for name, x in value.items()}


def check(name: str, laws: dict[str, tuple[Any, Any]], rounding: bool) -> None:
    """Every law of this reduction holds to the bit."""
    for law, pair in laws.items():
        if holds(name, law, rounding):
            # Weights are rounded too, and may be so in another way.
            only = "value" if law == "associative" and rounding else None
            left, right = (list(_leaves(side[only] if only else side)) for side in pair)
            assert len(left) == len(right)
            for x, y in zip(left, right, strict=True):
                assert x is y is None or (exact.bits(x) == exact.bits(y)).all(), f"{name}: {law}: {x}, {y}"


def _leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, (dict, tuple, list)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _leaves(child)
    else:
        yield node
