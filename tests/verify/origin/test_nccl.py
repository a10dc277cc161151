"""Reduction orders of PyTorch's process groups against NCCL's chunks worked out by hand and sums of fractions."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gradcombine.verify import explain
from gradcombine.verify.explain.nccl import nvls, pieces, ring_chunk, tree_chunk
from tests.spec import exact

RNG = np.random.default_rng(4)


def parts(ranks: int, dtype: Any = np.float32, size: int = 700) -> list[dict[str, np.ndarray]]:
    return [{"b": RNG.normal(size=50).astype(dtype), "w": RNG.normal(size=size).astype(dtype)} for _ in range(ranks)]


def added(terms: list[Fraction]) -> Fraction:
    """Sums from left to right and rounds each addition."""
    return reduce(lambda a, b: exact.round_to(a + b), terms)


def rounded_once(trees: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The exact sums of float32 trees, each rounded once."""
    return {
        leaf: np.float32([float(exact.round_to(sum(exactly(trees, leaf, i)))) for i in range(x.size)])
        for leaf, x in trees[0].items()
    }


def exactly(trees: list[dict[str, np.ndarray]], leaf: str, i: int) -> list[Fraction]:
    return [Fraction(float(tree[leaf].reshape(-1)[i])) for tree in trees]


@pytest.mark.full
def test_a_ring_is_found_whatever_its_chunks() -> None:
    """Chunk boundaries depend on the number of channels, which depends on the machine."""
    trees = parts(4)
    starts = {"b": np.full(50, 2), "w": np.repeat([2, 3, 0, 1, 3, 2], [11, 200, 64, 300, 100, 25])}
    result = {}
    for leaf, first in starts.items():
        terms = [exactly(trees, leaf, i) for i in range(len(first))]
        chains = [added(x[s:] + x[:s]) for x, s in zip(terms, first, strict=True)]
        result[leaf] = np.float32([float(x) for x in chains])
    found = [str(x.candidate) for x in explain(trees, result).matches]
    assert found == ["sum, added in NCCL's or gloo's ring over 4 ranks, in float32"]
    found = [str(x.candidate) for x in explain(trees[::-1], result).matches]
    assert found == ["sum, added in NCCL's or gloo's ring, backwards, over 4 ranks, in float32"]
    result["w"][300:310] = result["w"][300:310][::-1]
    assert not explain(trees, result).matches


def test_an_order_that_is_no_ring_is_not_taken_for_one() -> None:
    """If each element could have any order of the ring, nearly every sum would match."""
    trees = parts(4, size=3000)
    halves = {leaf: (trees[0][leaf] + trees[3][leaf]) + (trees[1][leaf] + trees[2][leaf]) for leaf in trees[0]}
    assert not explain(trees, halves).matches


@pytest.mark.parametrize(
    ("machines", "second", "expected"),
    [
        (1, False, lambda x: ((x[3] + x[2]) + x[1]) + x[0]),
        (2, False, lambda x: (x[1] + x[0]) + (x[3] + x[2])),
        (4, False, lambda x: x[0] + ((x[2] + x[1]) + x[3])),
        (4, True, lambda x: x[3] + ((x[1] + x[2]) + x[0])),
    ],
)
def test_the_trees_of_four_ranks(machines: int, second: bool, expected: Any) -> None:
    """As drawn in the comments of NCCL's trees.cc."""
    trees = parts(4)
    found = tree_chunk(trees, machines, second)
    for leaf in trees[0]:
        np.testing.assert_array_equal(found[leaf], expected([tree[leaf] for tree in trees]))


def test_a_second_tree_of_an_odd_number_is_shifted() -> None:
    """The tree 0 - (2 - 1), and its copy on the ranks 1, 2, 0."""
    trees = parts(3)
    a, b, c = (tree["w"] for tree in trees)
    np.testing.assert_array_equal(tree_chunk(trees, 3)["w"], a + (c + b))
    np.testing.assert_array_equal(tree_chunk(trees, 3, True)["w"], b + (a + c))


def test_the_mean_of_ddp_is_told_from_others() -> None:
    """Each rank sums two microbatches in .grad and scales by 1 / ranks before the all-reduce."""
    trees = parts(6)
    third = np.float32(1 / 3)
    result = {}
    for leaf in trees[0]:
        x = [tree[leaf] for tree in trees]
        ranks = [(x[i] + x[i + 1]) * third for i in (0, 2, 4)]
        first = {"b": 1, "w": 2}[leaf]
        result[leaf] = (ranks[first] + ranks[(first + 1) % 3]) + ranks[first - 1]
    expected = (
        "mean over ranks, each scaled by 1 / ranks first (DDP), added in NCCL's or gloo's ring over 3 ranks, split in"
    )
    assert str(explain(trees, result).matches[0].candidate).startswith(expected)


def test_an_nvlink_switch_adds_float32_exactly() -> None:
    trees = parts(4, size=200)
    for leaf in trees[0]:  # two of four terms cancel, at varying positions: no order in float32 or float64 is right
        terms = np.stack([trees[0][leaf] * 2.0**40, trees[0][leaf] * -(2.0**40), trees[1][leaf], trees[2][leaf]])
        for tree, x in zip(trees, RNG.permuted(terms.astype(np.float32), axis=0), strict=True):
            tree[leaf] = x
    result = rounded_once(trees)
    found = {match.candidate.order for match in explain(trees, result).matches}
    assert "in any order, by NVLS over 4 ranks" in found
    assert not [order for order in found if "ring" in order or "tree" in order]
    trees = parts(3, size=300)
    scaled = [{k: x * np.float32(1 / 3) for k, x in tree.items()} for tree in trees]
    result = rounded_once(scaled)
    expected = "sum of each * (1 / n), added in any order, by NVLS over 3 ranks, in float32"
    assert expected in [str(match.candidate) for match in explain(trees, result).matches]


def test_an_nvlink_switch_truncates_bfloat16() -> None:
    """Rounds towards zero, even if rounding to float32 first would reach a bfloat16 number from below."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    trees = [
        {"w": np.concatenate([RNG.normal(size=300), [1, -1, 1, 0, np.inf, 3]]).astype(bfloat16)},
        {"w": np.concatenate([RNG.normal(size=300), [-(2.0**-60), 2.0**-60, 1, 0, 1, -3]]).astype(bfloat16)},
        {"w": np.concatenate([RNG.normal(size=300), [0, 0, 2.0**-60, 0, 1, 0]]).astype(bfloat16)},
    ]
    found = nvls(trees)["w"]
    assert np.isinf(found[304])
    for i in [*range(304), 305]:
        total = sum(exactly(trees, "w", i))
        magnitude = abs(Fraction(float(found[i])))
        above = np.nextafter(np.abs(found[i]), bfloat16.type(np.inf))
        assert magnitude <= abs(total) < Fraction(float(above)) and total * Fraction(float(found[i])) >= 0
    result = {"w": found}
    (first, *_) = explain(trees, result).matches
    assert str(first.candidate) == "sum, added in any order, by NVLS over 3 ranks, in bfloat16"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize(("leaf", "place"), [("w", -1), ("w", 0), ("w", -9), ("b", 2), ("one", 0)])
def test_one_order_with_errors_is_no_ring(seed: int, ranks: int, leaf: str, place: int) -> None:
    """Another starting rank often differs by one ulp, yet a one-ulp error in an order or a ring is no match."""
    rng = np.random.default_rng(seed)
    sizes = {"b": 5, "one": 1, "w": 200}
    trees = [{k: rng.normal(size=n).astype(np.float32) for k, n in sizes.items()} for _ in range(ranks)]
    for upper in (np.inf, -np.inf):
        chain = ring_chunk(trees, 0)
        chain[leaf][place] = np.nextafter(chain[leaf][place], np.float32(upper))
        found = explain(trees, chain)
        assert not found.matches and found.verdicts[0].candidate.order == "one after another"
        first, second = ring_chunk(trees, 1), ring_chunk(trees, 2)
        ring = {k: np.concatenate([first[k][: x.size // 2], second[k][x.size // 2 :]]) for k, x in chain.items()}
        if leaf == "w":
            ring["w"][place] = np.nextafter(ring["w"][place], np.float32(upper))
            assert not explain(trees, ring).matches


def test_pieces_are_long_or_at_an_end_and_told_apart() -> None:
    same = np.zeros((2, 100), bool)
    same[0, :10] = same[1, 10:50] = same[0, 48:] = True
    expected = [0] * 10 + [1] * 40 + [0] * 50
    assert pieces(same).tolist() == expected
    same[1, :7] = True  # the three elements that only the first order explains may be errors
    assert pieces(same).tolist() == [1] * 50 + [0] * 50
    same[1, 53:] = True
    assert pieces(same).tolist() == [1] * 100
    same[1, [6, 20]] = False  # 10 elements in the middle are too few for a chunk
    assert pieces(same).tolist() == [0] * 100
