"""The exact mean against scalar fractions, and the rounding bound against float32 in many orders."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine.verify.suite import classifier as problem

NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
TERMS = st.lists(st.tuples(NUMBERS, st.integers(1, 1000)), min_size=1, max_size=24)
"""Contributions: pairs of a number and its weight."""


def _expected(terms: list[tuple[float, int]]) -> Fraction:
    return sum((Fraction(x) * w for x, w in terms), Fraction(0)) / sum(w for _, w in terms)


def _columns(terms: list[tuple[float, int]]) -> tuple[list[np.ndarray], list[int]]:
    return [np.float32([x]) for x, _ in terms], [w for _, w in terms]


@given(TERMS)
def test_weighted_mean(terms: list[tuple[float, int]]) -> None:
    assert problem.weighted_mean(*_columns(terms)).tolist() == [_expected(terms)]


@given(TERMS, st.randoms(use_true_random=False))
def test_a_chain_in_any_order_keeps_to_the_bound(terms: list[tuple[float, int]], random) -> None:
    shuffled = random.sample(terms, len(terms))
    result = gc.combine(gc.reductions.mean(), *_columns(shuffled))
    bound = problem.rounding_bound(*_columns(terms), additions=len(terms) - 1)
    assert abs(Fraction(float(result[0])) - _expected(terms)) <= bound[0]


@given(TERMS)
def test_the_tree_keeps_to_its_tighter_bound(terms: list[tuple[float, int]]) -> None:
    result = gc.combine(gc.reductions.mean(), *_columns(terms), order="tree")
    bound = problem.rounding_bound(*_columns(terms), additions=(len(terms) - 1).bit_length())
    assert abs(Fraction(float(result[0])) - _expected(terms)) <= bound[0]


def test_the_bound_is_the_sum_of_roundings() -> None:
    values, weights = [np.float32([3]), np.float32([-1])], [1, 3]
    bound = problem.rounding_bound(values, weights, additions=1)
    unit = Fraction(3 + 3, 4) / 2**24
    assert 3 * unit < bound[0] < 3 * unit * (1 + Fraction(1, 2**20))


def test_gamma_covers_the_product_of_its_factors() -> None:
    for roundings in range(1, 40):
        assert (1 + problem.U) ** roundings - 1 <= problem.gamma(roundings)


def test_share_names_the_worst() -> None:
    bound = problem.fractions(np.array([1.0, 2.0, 0.0]))
    assert problem.share(problem.fractions(np.array([0.5, 3.0, 0.0])), bound) == 1.5
    assert problem.share(problem.fractions(np.array([0.5, 0.0, 1e-30])), bound) == float("inf")
    assert problem.share(np.array([np.nan, 0.0, 0.0]), bound) == float("inf")
