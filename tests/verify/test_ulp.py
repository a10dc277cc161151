"""Distances in ulp against the enumeration of all float16 values and against exact steps."""

from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcombine.verify import compare
from gradcombine.verify.compare.ulp import NAN_DISTANCE, equal_bits, ulp_distance

DTYPES = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)

HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
NUMBERS = sorted({Fraction(float(x)) for x in HALVES if np.isfinite(x)})


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_counts_the_representable_numbers_between(first: int, second: int) -> None:
    a, b = HALVES[first], HALVES[second]
    if not (np.isfinite(a) and np.isfinite(b)):
        return
    ranks = [bisect_left(NUMBERS, Fraction(float(x))) for x in (a, b)]
    assert ulp_distance(a, b) == abs(ranks[0] - ranks[1])


@pytest.mark.parametrize("dtype", DTYPES)
@given(start=st.floats(-1e4, 1e4, width=16), steps=st.integers(0, 50))
def test_counts_steps_to_the_next_number(dtype: type, start: float, steps: int) -> None:
    first = last = np.asarray(start, dtype)
    for _ in range(steps):
        last = np.nextafter(last, np.asarray(np.inf, dtype))
    assert ulp_distance(first, last) == ulp_distance(last, first) == steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(dtype: type) -> None:
    finfo = ml_dtypes.finfo(dtype)
    a = np.asarray([0.0, finfo.max, np.nan, np.nan, np.inf, -np.inf], dtype)
    b = np.asarray([-0.0, np.inf, np.nan, 1.0, np.nan, -np.inf], dtype)
    assert ulp_distance(a, b).tolist() == [0, 1, 0, NAN_DISTANCE, NAN_DISTANCE, 0]


def test_the_widest_distance_fits() -> None:
    largest = np.finfo(np.float64).max
    assert int(ulp_distance(-largest, largest)) == 2 * int(np.float64(largest).view(np.int64))


@pytest.mark.parametrize(("a", "b", "equal"), [(0.0, 0.0, True), (0.0, -0.0, False), (np.nan, np.nan, True)])
def test_equal_bits_sees_the_sign_of_a_zero(a: float, b: float, equal: bool) -> None:
    assert equal_bits(np.float32([1, a]), np.float32([1, b])) is equal
    assert not equal_bits(np.float32([1, a]), np.float32([[1, a]])) and not equal_bits(np.float32(0), np.int32(0))


def test_narrow_floats_that_no_cast_joins_are_compared() -> None:
    """There is no cast from float8_e5m2 to float8_e8m0fnu."""
    a, b = np.ones(2, ml_dtypes.float8_e8m0fnu), np.array([1, 2], ml_dtypes.float8_e5m2)
    assert not compare(a, b).equal_bits and not compare(b, a).equal_bits
