"""Row-sparse sums and means in every mode and place, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from gradcombine.reductions.rows import row_mean, row_sum
from tests.spec import exact, modes, sparse_data
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS
from tests.spec.programs import LOCAL_PLACES, Combine, rows
from tests.spec.sparse_data import ROWS, contributions, deal

REDUCTIONS = {"sum": row_sum(capacity=ROWS), "mean": row_mean(capacity=ROWS)}
LOCAL = (("sum", "list", "tree"), ("mean", "time", "sequential"))
REPLICATED = (("sum", "list x replicas", "sequential"), ("mean", "time x replicas", "sequential"))


LAW_MODES = [
    "numpy",
    pytest.param("jax_jit", marks=pytest.mark.needs("jax")),
    pytest.param("tf_function", marks=pytest.mark.needs("tensorflow")),
]
"""Every mode runs the places; the algebra itself is the same in all of them."""


def in_places(env: modes.Env, data: Any, places: Any) -> Any:
    values, weights = data["values"], data["weights"]
    return [Combine(place, order).one(env, REDUCTIONS[name], values, weights) for name, place, order in places]


def locally(env: modes.Env, data: Any) -> Any:
    return in_places(env, data, LOCAL)


def over_replicas(env: modes.Env, data: Any) -> Any:
    return in_places(env, data, REPLICATED)


@settings(max_examples=2)
@given(data=contributions(3, FLOATS))
def test_one_replica(mode: modes.Mode, data: Any) -> None:
    (results,) = mode.run(locally, [data])
    for (name, _, order), result in zip(LOCAL, results, strict=True):
        sparse_data.check(result, sparse_data.expected(name, data, order), sparse_data.occurring(data))


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
    # Halves are chains, merged: for four contributions, one tree over two blocks.
    blocks = 2 if place == "merged halves" else 1
    wanted = sparse_data.expected(name, data, "sequential" if blocks == 2 else order, blocks)
    sparse_data.check(result, wanted, sparse_data.occurring(data))


def sides(env: modes.Env, data: Any) -> Any:
    """For each law, the two states that must be equal, and what they finalize to."""
    reduction = REDUCTIONS["mean"]
    values, weights = rows(data["values"]), rows(data["weights"])
    empty = reduction.init(values[0])
    a, b, c = (reduction.update(empty, value, weight) for value, weight in zip(values, weights, strict=True))
    merge, second = reduction.merge, reduction.update(empty, values[1], weights[1])
    pairs = {
        "associative": (merge(merge(a, b), c), merge(a, merge(b, c))),
        "commutative": (merge(a, b), merge(b, a)),
        "update is merge": (reduction.update(a, values[1], weights[1]), merge(a, second)),
        "neutral on the left": (merge(empty, a), a),
        "neutral on the right": (merge(a, empty), a),
        "weight 0, traced": (reduction.update(a, values[1], weights[0] * 0), a),
        "weight 0, known": (reduction.update(a, values[1], 0), a),
        "cleared": (reduction.clear(a), empty),
    }
    return {law: tuple({"state": s, "value": reduction.finalize(s)} for s in pair) for law, pair in pairs.items()}


def _check_laws(laws: Any, left_out: tuple[str, ...] = ()) -> None:
    for law, (left, right) in laws.items():
        if law not in left_out:
            for x, y in zip(_leaves(left), _leaves(right), strict=True):
                np.testing.assert_array_equal(exact.bits(x), exact.bits(y), err_msg=law)


def _leaves(node: Any) -> list[Any]:
    children = node.values() if isinstance(node, dict) else node
    return [leaf for child in children for leaf in _leaves(child)] if isinstance(node, (dict, tuple)) else [node]


@settings(max_examples=5)
@given(data=contributions(3, EXACT, EXACT_WEIGHTS))
@pytest.mark.parametrize("name", LAW_MODES)
def test_all_laws_where_nothing_rounds(name: str, data: Any) -> None:
    for results in modes.get(name).run(sides, deal(data, 1)):
        _check_laws(results)


@settings(max_examples=5)
@given(data=contributions(3, FLOATS))
@pytest.mark.parametrize("name", LAW_MODES)
def test_laws_under_rounding(name: str, data: Any) -> None:
    for results in modes.get(name).run(sides, deal(data, 1)):
        _check_laws(results, left_out=("associative",))
