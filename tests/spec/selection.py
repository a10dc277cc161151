"""Selects the quick cases from the product of modes and tests; all others get the mark ``full``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain, product
from typing import Any

import pytest

from tests.spec import modes

FULL = pytest.mark.full

LOCAL = ("numpy", "jax_jit", "tf_function")
"""Quick modes of tests without communication."""

COLLECTIVE = ("jax_shard_map", "tf_mirrored")
"""Quick modes of tests with communication between replicas."""

REPLICAS = (pytest.param(1, marks=FULL), 2, pytest.param(4, marks=FULL), pytest.param(8, marks=FULL))
"""Numbers of replicas, for a test with the parameters ``replicated`` and ``replicas``."""

QUICK_NAMES, OTHER_NAMES = ("mean", "max", "last"), ("sum", "product", "min", "first")
"""Reductions, for a test with the parameter ``names``; compiled modes run `OTHER_NAMES` in the full suite only."""

NAMES = pytest.mark.parametrize("names", [QUICK_NAMES, OTHER_NAMES], ids=" ".join)
"""The elementwise reductions."""


def cases(quick: Iterable[tuple[Any, ...]], *axes: Iterable[Any], pairwise: bool = False) -> list[Any]:
    """Test parameters: the product of the axes. Cases not in ``quick`` run in the full suite only.

    With ``pairwise`` (three axes), the quick cases and a subset of the product in which each pair of values occurs.
    """
    values, quick = [list(axis) for axis in axes], set(quick)
    assert quick <= set(product(*values))  # otherwise a misspelt quick case would be dropped silently
    modulus = min(map(len, values)) if pairwise else 1
    indices = product(*(range(len(axis)) for axis in values))
    chosen = [
        case for index, case in zip(indices, product(*values), strict=True) if case in quick or not sum(index) % modulus
    ]
    return [pytest.param(*case, marks=() if case in quick else FULL) for case in chosen]


def named(quick: Iterable[str], values: Mapping[str, Any]) -> list[Any]:
    """Test parameters with their names as ids. Cases not in ``quick`` run in the full suite only."""
    quick = set(quick)
    assert quick <= set(values)
    return [pytest.param(value, id=name, marks=() if name in quick else FULL) for name, value in values.items()]


def among(quick: Iterable[str], names: Iterable[str] | None = None) -> list[Any]:
    """Test parameters: the named modes, by default all. Modes not in ``quick`` run in the full suite only."""
    quick = set(quick)
    frameworks = {name: framework for framework, group in modes.NAMES.items() for name in group}
    return [_parameter(name, frameworks[name], name in quick) for name in (frameworks if names is None else names)]


def in_modes(quick: Mapping[Any, Iterable[str]], names: Iterable[str] | None = None) -> list[Any]:
    """Test parameters: each key (a value, or a tuple of several) of ``quick`` in the named modes, by default in all.

    Modes that are not among a key's values run in the full suite only.
    """
    return [
        pytest.param(
            *values,
            *mode.values,
            id="-".join([*(getattr(x, "__name__", x) for x in values), mode.id]),
            marks=mode.marks,
        )
        for key, chosen in quick.items()
        for values in [key if isinstance(key, tuple) else (key,)]
        for mode in among(chosen, names)
    ]


def traced_quickly(*quick: tuple[str, ...]) -> Callable[[Any], Any]:
    """Decorator: a case that traces is quick only if its parameters contain all values of one of these tuples."""

    def mark(function: Any) -> Any:
        function.traced_quickly = quick
        return function

    return mark


def pairwise(count: int, *axes: str) -> Callable[[Any], Any]:
    """Decorator for three axes, the last of ``count`` values: runs each pair of values, not each triple.

    Quick cases always run, as do all cases of `modes.LOOPING` if an axis is ``place``: they have no full product.
    """

    def mark(function: Any) -> Any:
        function.pairwise = count, axes
        return function

    return mark


def unrolled(function: Any) -> Any:
    """Decorator for a test whose program has no loop: omits the modes that differ in their loop only."""
    function.unrolled = True
    return function


def communicating(function: Any) -> Any:
    """Decorator for a test on one replica whose program uses the collective."""
    function.communicating = True
    return function


def _parameter(name: str, framework: str, quick: bool) -> Any:
    marks = [] if framework == "numpy" else [pytest.mark.needs(framework)]
    return pytest.param(name, id=name, marks=marks if quick else [*marks, FULL])


def repeats(parameters: dict[str, Any]) -> bool:
    """Whether this case repeats another mode's program, as the mode differs in its loop only and the place has none."""
    return _mode(parameters) in modes.LOOPING and not str(parameters.get("place", "time")).startswith("time")


def is_of_pairs(item: Any) -> bool:
    """Whether a case is selected: always, unless the test is `pairwise`."""
    count, axes = getattr(getattr(item, "function", None), "pairwise", (1, ()))
    if count == 1 or item.get_closest_marker("full") is None:
        return True
    loops = "place" in axes and _mode(item.callspec.params) in modes.LOOPING
    return loops or sum(_index(item, axis) for axis in axes) % count == 0


def _index(item: Any, axis: str) -> int:
    """Index of a case's value on an axis; a mode's index among all modes."""
    for names, values in (mark.args for mark in item.iter_markers("parametrize")):
        if axis in names:
            params = item.callspec.params
            value = (params[axis],) if isinstance(names, str) else tuple(params[name] for name in names)
            return [tuple(getattr(x, "values", x if len(value) > 1 else (x,))) for x in values].index(value)
    return list(chain(*modes.NAMES.values())).index(item.callspec.params[axis])


def _mode(parameters: dict[str, Any]) -> Any:
    return next((parameters[name] for name in ("mode", "replicated", "name") if name in parameters), None)


COVERED_PLACES = ("merged halves", "time x replicas")
"""Places that other quick tests trace: `test_laws` merges, and the canonical tree spans time and replicas."""


def is_slow_to_trace(parameters: dict[str, Any], quick: tuple[tuple[str, ...], ...] | None = None) -> bool:
    """Whether tracing makes a case too slow for the quick suite; MirroredStrategy traces replicas under one lock."""
    if parameters.get("replicated") == "tf_mirrored" and parameters.get("replicas", 0) > 2:
        return True
    if parameters.get("mode", parameters.get("replicated", "numpy")) == "numpy":
        return False
    chosen = {str(value) for value in parameters.values()}
    if quick is not None and not any(chosen.issuperset(case) for case in quick):
        return True
    return parameters.get("names") == OTHER_NAMES or parameters.get("place") in COVERED_PLACES
