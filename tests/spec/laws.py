"""The laws of `gradcombine.verify.check_reduction` as programs for the modes; both sides must have the same bits."""

from __future__ import annotations

from itertools import islice
from typing import Any

import gradcombine as gc
from gradcombine import tree
from gradcombine.reductions.algebra import Wrapper
from gradcombine.verify.check.laws import LAWS, Contribution, Trial
from tests.spec import exact

ROUNDED_NAMES = ("moments", "adasum")
"""Reductions whose merges round even for contributions that sum exactly."""
ASSOCIATIVE = ("min", "max", "first", "last", "exact sum", "exact mean")
"""Reductions whose value is one of the contributions or is rounded once."""
TRACED = {
    name: next(law for law in LAWS if statement in law.statement)
    for name, statement in {
        "identity": "identity of merge",
        "update": "merge(s, update(init, v, w))",
        "weight 0": "weight 0 changes nothing",
        "clear": "clear gives the empty state",
        "associative": "merge is associative",
        "commutative": "merge is commutative",
    }.items()
}
"""Laws that are checked in compiled programs."""


FIRST = {"identity": 2}
"""Number of pairs to compile, for laws that have further ones."""


class Weighed(Wrapper):
    """Finalizes to value and weight; caches the result of each state."""

    def __init__(self, of: gc.Reduction) -> None:
        super().__init__(of)
        self.finalized: dict[int, tuple[Any, Any]] = {}

    def finalize(self, state: Any) -> Any:
        if id(state) not in self.finalized:
            self.finalized[id(state)] = state, {"value": self.of.finalize(state), "weight": state.weight}
        return self.finalized[id(state)][1]


def holds(name: str, law: str, rounding: bool) -> bool:
    """Whether the law applies to this reduction, for contributions whose sums round (``rounding``) or are exact."""
    if law == "associative":
        return name in ASSOCIATIVE if rounding else name not in ROUNDED_NAMES
    if law == "commutative":
        return name not in ("first", "last")
    return (name, law) != ("moments", "None adds nothing")  # there it stands for a contribution of zeros


def sides(reduction: gc.Reduction, values: list[Any], weights: list[Any]) -> dict[str, list[tuple[Any, Any]]]:
    """Pairs that must be equal, by law, for three contributions, which are dicts, and their weights."""
    weighed, terms = Weighed(reduction), list(map(Contribution, values, weights))
    empty = weighed.init(values[0])
    states = {id(term): weighed.update(empty, *term) for term in terms[1:]}
    state = states[id(terms[0])] = weighed.update(weighed.update(empty, *terms[0]), *terms[1])

    def pairs(name: str) -> list[tuple[Any, Any]]:
        law = TRACED[name]
        trial = Trial(weighed, values[0], terms[: law.terms], lambda term: states[id(term)])
        return [pair[:2] for pair in islice(law.sides(trial), FIRST.get(name))]

    nothing = reduction.update(state, dict.fromkeys(values[0]), 1)
    # None adds nothing to the value; the weight still counts.
    return {name: pairs(name) for name in TRACED} | {"None adds nothing": [(nothing.value, state.value)]}


def check(name: str, laws: dict[str, list[tuple[Any, Any]]], rounding: bool) -> None:
    """Every law of this reduction holds to the bit."""
    for law, pairs in laws.items():
        for pair in pairs if holds(name, law, rounding) else ():
            # Sums of weights round as well, and are not associative: compare values only.
            left, right = (tree.flatten(x["value"] if law == "associative" and rounding else x)[0] for x in pair)
            assert len(left) == len(right)
            for x, y in zip(left, right, strict=True):
                assert x is y is None or (exact.bits(x) == exact.bits(y)).all(), f"{name}: {law}: {x}, {y}"
