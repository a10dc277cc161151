"""NumPy: the reference, which has one replica."""

from __future__ import annotations

from collections.abc import Iterator

import gradcombine as gc
from gradcombine.types import Order, Tree
from gradcombine.verify.suite import places
from gradcombine.verify.suite.places import Case, Contributions


def cases() -> Iterator[Case]:
    for order in places.ORDERS:
        for place, run in _PLACES.items():
            yield Case("numpy", "eager", place, 1, order, lambda given, run=run, order=order: [run(given, order)])


def combined(given: Contributions, order: Order) -> Tree:
    """The list's result, which every other row is measured against."""
    return places.over_list(given.values, given.weights, order)


def _over_time(given: Contributions, order: Order) -> Tree:
    accumulator, state = places.over_time(given.values, given.weights, order)
    return accumulator.value(state)


def _over_replicas(given: Contributions, order: Order) -> Tree:
    return places.over_replicas(given.values[0], given.weights[0], gc.LOCAL, order)


def _over_time_and_replicas(given: Contributions, order: Order) -> Tree:
    return places.merged(places.over_time(given.values, given.weights, order), gc.LOCAL, order)


_PLACES = {
    places.LIST: combined,
    places.TIME: _over_time,
    places.REPLICAS: _over_replicas,
    places.TIME_AND_REPLICAS: _over_time_and_replicas,
}
