"""The central law: contributions combined in a list, over time, over replicas or mixtures give the same result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.spec import exact, modes
from tests.spec.data import EXACT, EXACT_WEIGHTS, FLOATS, SHAPES, contributions, deal, first
from tests.spec.programs import Combine
from tests.spec.selection import FULL, NAMES, OTHER_NAMES, REPLICAS, pairwise, traced_quickly, unrolled


def check(results: Any, data: Any, order: str, blocks: int = 1) -> None:
    """Asserts that every reduction and leaf of one replica's result has the exact value; None stays None."""
    for name, value in results.items():
        assert value["none"] is None
        for leaf in SHAPES:
            expected = exact.elementwise(name, data["values"][leaf], data["weights"], order, blocks)
            received = value[leaf]
            assert received.dtype == np.float32
            assert received.shape == SHAPES[leaf]
            np.testing.assert_array_equal(received, expected, err_msg=f"{name} of leaf {leaf!r}", strict=True)


@pairwise(2, "mode", "place", "names")
@traced_quickly(("list",))  # test_canonical_tree covers time
@pytest.mark.parametrize(
    ("place", "order"),
    [
        ("list", "sequential"),
        ("time", "tree"),
        ("merged halves", "sequential"),
        pytest.param("list", "tree", marks=FULL),
        pytest.param("time", "sequential", marks=FULL),
    ],
)
@NAMES
@settings(max_examples=8)
@given(data=contributions(7, FLOATS))
def test_one_replica(mode: modes.Mode, place: str, order: str, names: tuple[str, ...], data: Any) -> None:
    """List and time give the rounded chain or tree bit for bit, also on replicas that do not communicate."""
    if place == "merged halves":
        # Two chains of 3 and 4 terms: an empty first contribution makes them two blocks of 4.
        data = _pad_first_half(data)
    blocks = 2 if place == "merged halves" else 1
    count = mode.replicas[-1] if len(mode.replicas) == 1 else 2
    per_replica = [_roll(data, rank) if place != "merged halves" else data for rank in range(count)]
    program = Combine(place, order, names)
    for local, result in zip(per_replica, mode.run(program, per_replica), strict=True):
        check(result, local, order, blocks)


def _roll(data: Any, by: int) -> Any:
    # A different order of the contributions, so that replicas hold different data.
    values = {name: None if x is None else np.roll(x, by, axis=0) for name, x in data["values"].items()}
    return {"values": values, "weights": np.roll(data["weights"], by)}


def _pad_first_half(data: Any) -> Any:
    def pad(x: Any) -> Any:
        return None if x is None else np.concatenate([np.zeros_like(x[:1]), x])

    return {"values": {name: pad(x) for name, x in data["values"].items()}, "weights": pad(data["weights"])}


@pairwise(2, "replicated", "place", "names")
@pytest.mark.parametrize(
    ("place", "replicas"),
    [
        *((place, 2) for place in ("replicas", "time x replicas", "list x replicas")),
        *(pytest.param("replicas", n, marks=FULL) for n in (1, 4, 8)),
        pytest.param("time x replicas", 8, marks=FULL),
        pytest.param("list x replicas", 4, marks=FULL),
    ],
)
@NAMES
@settings(max_examples=4)
@given(data=contributions(8, EXACT, EXACT_WEIGHTS))
def test_replicas_any_order(
    replicated: modes.Mode, replicas: int, place: str, names: tuple[str, ...], data: Any
) -> None:
    """Without rounding, the framework's all-reduce gives every replica the exact result."""
    data = first(data, replicas if place == "replicas" else max(4, replicas))
    results = replicated.run(Combine(place, "sequential", names), deal(data, replicas))
    assert len(results) == replicas
    for result in results:
        check(result, data, "sequential", replicas)


@pairwise(3, "replicated", "replicas", "names")
@traced_quickly(("jax_shard_map", "8"), ("tf_mirrored", "2", "('mean',)"))
@pytest.mark.parametrize("replicas", [*REPLICAS[:-1], 8])
@pytest.mark.parametrize("names", [("mean",), ("max", "last"), OTHER_NAMES], ids=" ".join)
@settings(max_examples=6)
@given(data=contributions(8, FLOATS))
def test_canonical_tree(replicated: modes.Mode, replicas: int, names: tuple[str, ...], data: Any) -> None:
    """Microbatches over 1, 2, 4 or 8 replicas have the bits of one list in tree order, including signs of zeros."""
    data = data if replicas in (1, 8) else first(data, 4)
    results = replicated.run(Combine("time x replicas", "tree", names), deal(data, replicas))
    (reference,) = modes.get("numpy").run(Combine("list", "tree", names), [data])
    for result in results:
        check(result, data, "tree")
        for name in result:
            for leaf in SHAPES:
                np.testing.assert_array_equal(exact.bits(result[name][leaf]), exact.bits(reference[name][leaf]))


@unrolled
@NAMES
@settings(max_examples=6)
@given(data=contributions(2, FLOATS))
def test_two_terms_have_one_order(replicated: modes.Mode, names: tuple[str, ...], data: Any) -> None:
    """With one contribution on each of two replicas, even the framework's all-reduce has only one possible result."""
    for result in replicated.run(Combine("replicas", "sequential", names), deal(data, 2)):
        check(result, data, "sequential")
