"""Which part of the product of modes and tests is quick; the rest carries the mark ``full``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, product
from typing import Any

import pytest

from tests.spec import modes

FULL = pytest.mark.full

LOCAL = ("numpy", "jax_jit", "tf_function")
"""Quick modes of a test in which replicas do not communicate."""

COLLECTIVE = ("jax_shard_map", "tf_mirrored")
"""Quick modes of a test in which they do."""

REPLICAS = (pytest.param(1, marks=FULL), 2, pytest.param(4, marks=FULL), pytest.param(8, marks=FULL))
"""Numbers of replicas, for a test that takes one besides `replicated`."""

QUICK_NAMES, OTHER_NAMES = ("mean", "max", "last"), ("sum", "product", "min", "first")
"""Reductions, for a test that takes ``names``; compiled modes leave all but the quick ones to the full suite."""

NAMES = pytest.mark.parametrize("names", [QUICK_NAMES, OTHER_NAMES], ids=" ".join)
"""The elementwise reductions."""


def cases(quick: Iterable[tuple[Any, ...]], *axes: Iterable[Any], pairwise: bool = False) -> list[Any]:
    """Parameters of a test: each combination of the axes; those that are not quick are left to the full suite.

    With ``pairwise``, of three axes, each pair of values in place of each triple, and the quick ones.
    """
    values, quick = [list(axis) for axis in axes], set(quick)
    assert quick <= set(product(*values))  # else a case that was to be quick would have left the test command
    apart = min(map(len, values)) if pairwise else 1
    places = product(*(range(len(axis)) for axis in values))
    known = [
        case for place, case in zip(places, product(*values), strict=True) if case in quick or not sum(place) % apart
    ]
    return [pytest.param(*case, marks=() if case in quick else FULL) for case in known]


def named(quick: Iterable[str], values: Mapping[str, Any]) -> list[Any]:
    """Parameters of a test, each with its name as its id; those that are not quick are left to the full suite."""
    quick = set(quick)
    assert quick <= set(values)
    return [pytest.param(value, id=name, marks=() if name in quick else FULL) for name, value in values.items()]


def among(quick: Iterable[str], names: Iterable[str] | None = None) -> list[Any]:
    """Parameters of a test: all modes, or these; those that are not quick are left to the full suite.

    Args:
      quick: names of modes.
      names: None for all modes.
    """
    quick = set(quick)
    frameworks = {name: framework for framework, group in modes.NAMES.items() for name in group}
    return [_parameter(name, frameworks[name], name in quick) for name in (frameworks if names is None else names)]


def traced_quickly(*quick: tuple[str, ...]) -> Callable[[Any], Any]:
    """Of a test's cases in which something is traced, those are quick whose parameters hold all of one of these."""

    def mark(function: Any) -> Any:
        function.traced_quickly = quick
        return function

    return mark


def pairwise(count: int, *axes: str) -> Callable[[Any], Any]:
    """Of three axes, the last of ``count`` values, each pair of values in place of each triple, and the quick cases.

    Modes with a loop of their own have all cases where an axis is the place: theirs are no full product.
    """

    def mark(function: Any) -> Any:
        function.pairwise = count, axes
        return function

    return mark


def unrolled(function: Any) -> Any:
    """Of a test whose program asks for no loop: modes that have one of their own would run the same program again."""
    function.unrolled = True
    return function


def communicating(function: Any) -> Any:
    """Of a test on one replica whose program asks for the collective all the same."""
    function.communicating = True
    return function


def _parameter(name: str, framework: str, quick: bool) -> Any:
    marks = [] if framework == "numpy" else [pytest.mark.needs(framework)]
    return pytest.param(name, id=name, marks=marks if quick else [*marks, FULL])


def repeats(parameters: dict[str, Any]) -> bool:
    """Whether a mode with a loop of its own would run the program of one without, as this place asks for no loop."""
    return _mode(parameters) in modes.LOOPING and not str(parameters.get("place", "time")).startswith("time")


def is_of_pairs(item: Any) -> bool:
    """Whether a case belongs to its test: all do, unless the test is `pairwise`."""
    count, axes = getattr(getattr(item, "function", None), "pairwise", (1, ()))
    if count == 1 or item.get_closest_marker("full") is None:
        return True
    loops = "place" in axes and _mode(item.callspec.params) in modes.LOOPING
    return loops or sum(_index(item, axis) for axis in axes) % count == 0


def _index(item: Any, axis: str) -> int:
    """Of a case's value among those of the axis; of a mode among all."""
    for names, values in (mark.args for mark in item.iter_markers("parametrize")):
        if axis in names:
            given = item.callspec.params
            own = (given[axis],) if isinstance(names, str) else tuple(given[name] for name in names)
            return [tuple(getattr(x, "values", x if len(own) > 1 else (x,))) for x in values].index(own)
    return list(chain(*modes.NAMES.values())).index(item.callspec.params[axis])


def _mode(parameters: dict[str, Any]) -> Any:
    return next((parameters[name] for name in ("mode", "replicated", "name") if name in parameters), None)


COVERED_PLACES = ("merged halves", "time x replicas")
"""Places whose parts other quick tests trace: the laws merge, and the canonical tree is over time and replicas."""


def is_slow_to_trace(parameters: dict[str, Any], quick: tuple[tuple[str, ...], ...] | None = None) -> bool:
    """Whether a case is left to the full suite: tracing is most of the time, on replica threads with one lock too."""
    if parameters.get("replicated") == "tf_mirrored" and parameters.get("replicas", 0) > 2:
        return True
    if parameters.get("mode", parameters.get("replicated", "numpy")) == "numpy":
        return False
    chosen = {str(value) for value in parameters.values()}
    if quick is not None and not any(chosen.issuperset(case) for case in quick):
        return True
    return parameters.get("names") == OTHER_NAMES or parameters.get("place") in COVERED_PLACES
