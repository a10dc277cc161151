"""Comparison of two leaves: distances, counts and elements, at once and in pieces."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcombine.verify.compare.meter import Element, LeafDifference, Meter
from gradcombine.verify.compare.ulp import NAN_DISTANCE, ulp_distance
from gradcombine.verify.diff.comparing import Allowed

FLOATS = st.floats(width=32)


def measured(a: Any, b: Any, pieces: int = 1) -> LeafDifference:
    a, b = np.asarray(a), np.asarray(b)
    meter = Meter("leaf", a.shape, a.dtype, b.dtype)
    for x, y in zip(np.array_split(a.reshape(-1), pieces), np.array_split(b.reshape(-1), pieces), strict=True):
        meter.add(x, y)
    return meter.result()


@given(pairs=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40), pieces=st.integers(1, 7))
def test_pieces_give_what_the_whole_gives(pairs: list[tuple[float, float]], pieces: int) -> None:
    a, b = (np.float32(side) for side in zip(*pairs, strict=True))
    found, whole = measured(a, b, pieces), measured(a, b)
    ulps = ulp_distance(a, b)
    assert found.max_ulp == whole.max_ulp == int(ulps.max())
    assert found.ulp_counts == whole.ulp_counts == lengths(ulps)
    assert found.median_ulp == whole.median_ulp == rounded(int(np.sort(ulps)[(len(ulps) - 1) // 2]))
    assert (found.nans, found.infs) == tuple(
        tuple(int(count(side).sum()) for side in (a, b)) for count in (np.isnan, np.isinf)
    )
    different = a.view(np.uint32) != b.view(np.uint32)
    assert found.equal_bits == (not different.any())
    if different.any():
        assert found.first is not None and found.worst is not None
        assert found.first.at == int(np.argmax(different))
        assert int(ulps[found.worst.at]) == found.max_ulp


def lengths(ulps: np.ndarray) -> tuple[int, ...]:
    nans = [ulps.dtype == np.uint64 and x == NAN_DISTANCE for x in ulps]
    known = [int(x).bit_length() for x, nan in zip(ulps, nans, strict=True) if not nan]
    return (*(known.count(n) for n in range(max(known, default=0) + 1)), sum(nans))


def rounded(ulp: int) -> int:
    return ulp if ulp < 1024 or ulp == NAN_DISTANCE else 1 << (ulp.bit_length() - 1)


def test_relative_difference_and_cosine() -> None:
    found = measured(np.float32([3, 4, np.inf]), np.float32([4, 3, 1]))
    assert found.relative == 1 / 4
    assert found.cosine == 24 / 25
    assert measured(np.zeros(3), np.zeros(3)).cosine == 1
    assert math.isnan(measured(np.zeros(3), np.ones(3)).cosine)
    assert measured(np.ones(3), np.zeros(3)).relative == math.inf


def test_the_signs_of_zeros_are_different_bits_but_no_distance() -> None:
    found = measured(np.float32([0, 1]), np.float32([-0.0, 1]))
    assert (found.equal_bits, found.max_ulp) == (False, 0)
    assert found.first == found.worst == Element(0, 0.0, -0.0)


@pytest.mark.parametrize(
    ("a", "b", "ulp"),
    [
        (np.float32([1.0]), np.array([1.0078125], ml_dtypes.bfloat16), 1),
        (np.float64([1.0]), np.float32([1.0000001]), 1),
        (np.int64([2**63 - 1]), np.int64([-(2**63)]), 2**64 - 1),
        (np.bool_([True]), np.bool_([False]), 1),
        (np.complex64([1 + 2j]), np.complex64([1 + 2.0000005j]), 2),
        (np.array([1.0], ml_dtypes.float8_e4m3fn), np.array([1.0], ml_dtypes.float8_e4m3fn), 0),
        (np.array([1.0], ml_dtypes.float8_e4m3fn), np.array([1.25], ml_dtypes.float8_e4m3fn), 2),
        (np.array([0.5, 1.0], ml_dtypes.float8_e8m0fnu), np.array([0.5, 4.0], ml_dtypes.float8_e8m0fnu), 2),
        (np.array([-8], ml_dtypes.int4), np.array([7], ml_dtypes.int4), 15),
        (np.array([1.0], ">f4"), np.array([1.0000001], "<f4"), 1),
        (np.array([256], ">i4"), np.array([1], ">i4"), 255),
        (np.uint64([2**60 + 1]), np.int64([2**60]), 1),
        (np.uint64([2**64 - 1]), np.int64([-1]), 2**64),
        (np.uint64([2**64 - 1, 0]), np.int64([-(2**63), -1]), 2**64 - 1 + 2**63),
        (np.int8([-1]), np.uint8([255]), 256),
        (np.float32([1e30]), np.float16([np.inf]), NAN_DISTANCE),
    ],
)
def test_every_kind_of_number_has_a_distance(a: Any, b: Any, ulp: int) -> None:
    assert measured(a, b).max_ulp == ulp


@pytest.mark.parametrize("dtype", ["f4", "c8", "i8", "u2"])
def test_byte_order_is_no_difference(dtype: str) -> None:
    found = measured(np.array([1, 256], f">{dtype}"), np.array([1, 256], f"<{dtype}"))
    assert found.equal_bits and found.same_dtype and found.relative == 0


@given(pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=20))
def test_integers_are_measured_exactly(pairs: list[tuple[int, int]]) -> None:
    unsigned, signed = (list(side) for side in zip(*pairs, strict=True))
    apart = [abs(x - y) for x, y in pairs]
    found = measured(np.uint64(unsigned), np.int64(signed))
    assert found.max_ulp == max(apart)
    assert found.equal_bits == (max(apart) == 0)
    assert found.ulp_counts == (
        *([x.bit_length() for x in apart].count(n) for n in range(max(apart).bit_length() + 1)),
        0,
    )
    largest = max(map(abs, signed))
    assert found.relative == (max(apart) / largest if largest else math.inf if max(apart) else 0)
    assert measured(np.int64(signed), np.uint64(unsigned)).max_ulp == max(apart)


INF, NAN = np.inf, np.nan


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([INF, 1], [INF, 1.5], True),
        ([INF, 1], [-INF, 1], False),
        ([INF, 1], [1, INF], False),
        ([INF, NAN], [NAN, INF], False),
        ([NAN, 1], [NAN, 2], True),
        ([complex(INF, 1)], [complex(INF, 1)], True),
        ([complex(INF, 1)], [complex(INF, 2)], False),
    ],
)
def test_an_allowance_in_proportion_is_for_finite_numbers(a: Any, b: Any, same: bool) -> None:
    found = measured(np.array(a), np.array(b))
    assert found.same_specials == same
    assert Allowed(relative=10).passes(found) == same


def test_integers_beyond_float64_are_told_apart_by_an_allowance_in_proportion() -> None:
    found = measured(np.int64([2**60]), np.int64([2**60 + 1]))
    assert found.relative == 1 / (2**60 + 1)
    assert not Allowed(relative=0).passes(found) and Allowed(relative=1e-15).passes(found)


def test_an_empty_leaf_is_equal() -> None:
    assert measured(np.zeros((0, 3)), np.zeros((0, 3))).equal_bits
