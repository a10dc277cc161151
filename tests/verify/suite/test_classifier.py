"""The classifier in float64 and the weighted mean, against exact fractions and float32, and the bounds of both."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradcombine as gc
from gradcombine.types import Order
from gradcombine.verify.suite import classifier
from gradcombine.verify.suite.classifier import Batch, analyse, analyse_mean, gamma, share, weighted_mean
from gradcombine.verify.suite.frameworks import NUMPY

BATCHES = classifier.batches(classifier.SIZES[:4])
PARAMETERS = classifier.initial_parameters()


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    direction = np.random.default_rng(0).choice([-1.0, 1.0], PARAMETERS[name].shape)
    moved = ({**PARAMETERS, name: PARAMETERS[name] + step * direction} for step in (0.5, -0.5))
    up, down = (analyse(parameters, BATCHES[0])[0]["loss"] for parameters in moved)
    # Central differences of a quadratic function are exact.
    assert up - down == pytest.approx((analyse(PARAMETERS, BATCHES[0])[0][name] * direction).sum(), rel=1e-12)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_float32_keeps_to_the_bounds(batch: Batch, scale: float) -> None:
    parameters = {name: np.float32(scale) * leaf for name, leaf in PARAMETERS.items()}
    assert 0 < share(NUMPY.measure(parameters, batch), *analyse(parameters, batch)) <= 1


def test_the_bounds_are_far_below_one_example() -> None:
    batch = BATCHES[1]
    values, bounds = analyse(PARAMETERS, batch)
    without, _ = analyse(PARAMETERS, Batch(*(array[1:] for array in batch)))
    for name in values:
        assert np.max(np.abs(values[name] - without[name])) > 100 * np.max(bounds[name]), name


def test_the_mean_over_batches_is_the_whole_batch() -> None:
    means, bounds = analyse_mean(PARAMETERS, BATCHES)
    (batch,) = classifier.batches([sum(classifier.SIZES[:4])])
    values, whole = analyse(PARAMETERS, batch)
    for name, value in values.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-9, atol=1e-13)
        assert bounds[name].shape == whole[name].shape


NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
TERMS = st.lists(st.tuples(NUMBERS, st.integers(1, 1000)), min_size=1, max_size=24)
"""Contributions: pairs of a number and its weight."""


@pytest.mark.parametrize("order", ["sequential", "tree"])
@given(TERMS, st.randoms(use_true_random=False))
def test_float32_means_keep_to_the_bound(order: Order, terms: list[tuple[float, int]], random) -> None:
    """The bound of a chain holds in any order; that of the tree is tighter."""
    exact = sum((Fraction(x) * w for x, w in terms), Fraction(0)) / sum(w for _, w in terms)
    shuffled = random.sample(terms, len(terms))
    values, weights = [{"w": np.float32([x])} for x, _ in shuffled], [w for _, w in shuffled]
    additions = len(terms) - 1 if order == "sequential" else (len(terms) - 1).bit_length()
    mean, bound = (tree["w"][0] for tree in weighted_mean(values, weights, additions))
    result = gc.combine(gc.reductions.mean(), values, weights, order=order)["w"][0]
    assert abs(Fraction(float(result)) - exact) <= Fraction(float(bound))
    assert abs(Fraction(float(mean)) - exact) <= Fraction(float(bound)) / 2**20


def test_the_bound_is_the_sum_of_roundings() -> None:
    _, bound = weighted_mean([{"w": np.float32([3])}, {"w": np.float32([-1])}], [1, 3], additions=1)
    unit = (3 + 3) / 4 / 2**24
    assert 3 * unit < bound["w"][0] < 3 * unit * (1 + 2**-19)


def test_gamma_covers_the_product_of_its_factors() -> None:
    for roundings in range(1, 40):
        assert (1 + Fraction(1, 2**24)) ** roundings - 1 <= Fraction(gamma(roundings))


@pytest.mark.parametrize(
    ("result", "worst"), [([0.5, 3, 0], 1.5), ([0.5, 0, 1e-30], np.inf), ([np.nan, 0, 0], np.inf), ([0, 0, 0], 0)]
)
def test_share_is_the_worst_element(result: list[float], worst: float) -> None:
    assert share({"w": np.array(result)}, {"w": np.zeros(3)}, {"w": np.array([1.0, 2.0, 0.0])}) == worst
