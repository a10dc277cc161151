"""The ring order has the bits of MirroredStrategy's default operations on 3 and 8 CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gradcombine import GradCombineError, foreign_orders
from tests.foreign_orders import mirrored
from tests.foreign_orders.data import assert_same_sum, normal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[3, pytest.param(8, marks=pytest.mark.full)])
def reduced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, bytes]]:
    """The results of a run on this number of ranks."""
    path = tmp_path_factory.mktemp("ring") / "results.npz"
    command = [sys.executable, "-m", "tests.foreign_orders.mirrored", str(request.param), str(path)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    with np.load(path) as results:
        return request.param, {name: results[name].tobytes() for name in results.files}


@pytest.mark.full
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("case", mirrored.CASES)
def test_all_reduce_is_the_ring(reduced: tuple[int, dict[str, bytes]], case: str, mode: str) -> None:
    ranks, results = reduced
    expected = foreign_orders.ring(mirrored.trees(case, ranks), packed=mode == "graph")
    assert [results[f"{case} {mode} {i}"] for i in range(len(expected))] == [leaf.tobytes() for leaf in expected]


@pytest.mark.full
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("reduced", [3], indirect=True)
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_large_chunks_are_not_subdivided(reduced: tuple[int, dict[str, bytes]], mode: str) -> None:
    (expected,) = foreign_orders.ring(mirrored.trees("large chunks", 3))
    assert reduced[1][f"large chunks {mode} 0"] == expected.tobytes()


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("case", mirrored.CASES)
def test_reduce_is_addn(reduced: tuple[int, dict[str, bytes]], case: str) -> None:
    ranks, results = reduced
    expected = foreign_orders.addn_blocks([leaves[0] for leaves in mirrored.trees(case, ranks)])
    assert results[f"{case} reduce"] == expected.tobytes()


def test_the_data_tell_a_pack_from_single_leaves() -> None:
    values = mirrored.trees("several leaves", 8)
    packed, single = foreign_orders.ring(values), foreign_orders.ring(values, packed=False)
    assert (packed[0] != single[0]).any()


def test_a_pack_may_lack_gradients() -> None:
    values = [{"a": a, "b": None, "c": c} for a, c in zip(normal(4), normal(4, seed=1), strict=True)]
    received = foreign_orders.ring(values)
    assert received["b"] is None
    for name in "ac":
        alone = foreign_orders.ring([{name: value[name]} for value in values], packed=False)
        assert (received[name] != alone[name]).any()
        assert_same_sum(received[name], alone[name], [value[name] for value in values])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"w": np.complex64([1])}] * 2, r"ring: leaf \['w'\]: expected a dtype of float16, .*, received complex64"),
        (
            [[np.float32([1]), np.int32([1])]] * 2,
            "ring: expected leaves of one dtype in a pack, received float32, int32",
        ),
    ],
)
def test_what_the_ring_refuses(values: list[object], message: str) -> None:
    with pytest.raises(GradCombineError, match=message):
        foreign_orders.ring(values)
