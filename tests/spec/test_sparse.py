"""Row-sparse sums and means, bit for bit, in every mode and place."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from gradcombine.reductions import row_mean, row_sum
from tests.spec import laws, modes, sparse_data
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS
from tests.spec.programs import LOCAL_PLACES, Combine, rows
from tests.spec.selection import FULL, traced_quickly
from tests.spec.sparse_data import ROWS, contributions, deal

REDUCTIONS = {"sum": row_sum(capacity=ROWS), "mean": row_mean(capacity=ROWS)}
LOCAL = (("sum", "list", "tree"), ("mean", "time", "sequential"))
REPLICATED = (("sum", "list x replicas", "sequential"), ("mean", "time x replicas", "sequential"))


LAW_MODES = [
    "numpy",
    pytest.param("jax_jit", marks=pytest.mark.needs("jax")),
    pytest.param("tf_function", marks=[pytest.mark.needs("tensorflow"), FULL]),
]
"""Modes in which the laws are checked; the algebra is shared, and every framework runs the places."""


def in_places(env: modes.Env, data: Any, places: Any) -> Any:
    values, weights = data["values"], data["weights"]
    return [Combine(place, order).one(env, REDUCTIONS[name], values, weights) for name, place, order in places]


def locally(env: modes.Env, data: Any) -> Any:
    return in_places(env, data, LOCAL)


def over_replicas(env: modes.Env, data: Any) -> Any:
    return in_places(env, data, REPLICATED)


@pytest.mark.sampled
@traced_quickly(("tf_function",))  # the laws are compiled in JAX
@settings(max_examples=2)
@given(data=contributions(3, FLOATS))
def test_one_replica(mode: modes.Mode, data: Any) -> None:
    (results,) = mode.run(locally, [data])
    for (name, _, order), result in zip(LOCAL, results, strict=True):
        sparse_data.check(result, sparse_data.expected(name, data, order), sparse_data.occurring(data))


@pytest.mark.full
@settings(max_examples=2)
@given(data=contributions(4, FLOATS))
def test_replicas_with_different_data(replicated: modes.Mode, data: Any) -> None:
    for results in replicated.run(over_replicas, deal(data, 2)):
        for (name, _, order), result in zip(REPLICATED, results, strict=True):
            wanted = sparse_data.expected(name, data, order, blocks=2)
            sparse_data.check(result, wanted, sparse_data.occurring(data))


@settings(max_examples=5)
@given(data=contributions(4, FLOATS))
@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("place", LOCAL_PLACES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_place_and_order(name: str, place: str, order: str, data: Any) -> None:
    env = modes.get("numpy").env
    result = Combine(place, order).one(env, REDUCTIONS[name], data["values"], data["weights"])
    # Each half is a chain; merged, four contributions form a tree over two blocks.
    blocks = 2 if place == "merged halves" else 1
    wanted = sparse_data.expected(name, data, "sequential" if blocks == 2 else order, blocks)
    sparse_data.check(result, wanted, sparse_data.occurring(data))


def sides(env: modes.Env, data: Any) -> Any:
    values = [{"w": x, "none": None} for x in rows(data["values"])]
    return laws.sides(REDUCTIONS["mean"], values, rows(data["weights"]))


@pytest.mark.sampled
@settings(max_examples=5)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS), rounded=contributions(3, FLOATS))
@pytest.mark.parametrize("name", LAW_MODES)
def test_all_laws(name: str, data: Any, rounded: Any) -> None:
    for drawn, rounding in ((data, False), (rounded, True)):
        for result in modes.get(name).run(sides, [drawn]):
            laws.check("row mean", result, rounding)
