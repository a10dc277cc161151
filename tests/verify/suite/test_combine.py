"""Each row's claim holds, and a violation is detected."""

from collections.abc import Callable

import numpy as np
import pytest

import gradcombine as gc
from gradcombine.places.lists import combine
from gradcombine.types import Order
from gradcombine.verify.suite.classifier import Arrays, Batch, batches
from gradcombine.verify.suite.combine import (
    LIST,
    MEAN,
    ORDERS,
    REPLICAS,
    TIME,
    TIME_AND_REPLICAS,
    Case,
    Contributions,
    combined,
    flip_lowest_bit,
)
from gradcombine.verify.suite.frameworks import NUMPY
from gradcombine.verify.suite.outcomes import BITS, BOUND
from gradcombine.verify.suite.run import checked

RANDOM = np.random.default_rng(0)
GIVEN = Contributions(
    [{"w": RANDOM.normal(size=(3, 4)).astype(np.float32)} for _ in range(8)],
    [np.float32(weight) for weight in (3, 1, 7, 2, 2, 5, 1, 4)],
)


def _case(framework: str = "jax", place: str = LIST, order: Order = "tree", replicas: int = 1) -> Case:
    return Case(NUMPY._replace(name=framework), "eager", place, replicas, order)


@pytest.mark.parametrize(
    ("framework", "place", "order", "promise"),
    [
        ("numpy", LIST, "tree", BOUND),
        ("numpy", TIME, "sequential", BITS),
        ("jax", LIST, "sequential", BITS),
        ("jax", TIME, "sequential", BITS),
        ("jax", REPLICAS, "sequential", BOUND),
        ("tensorflow", TIME_AND_REPLICAS, "sequential", BOUND),
        ("tensorflow", REPLICAS, "tree", BITS),
        ("jax", TIME_AND_REPLICAS, "tree", BITS),
    ],
)
def test_promises(framework: str, place: str, order: Order, promise: str) -> None:
    assert _case(framework, place, order).promise == promise


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", [LIST, TIME, REPLICAS, TIME_AND_REPLICAS])
def test_the_reference_itself_holds(place: str, order: Order) -> None:
    (finding,) = combined([_case(place=place, order=order)], GIVEN, inject_fault=False, progress=lambda name: None)
    assert finding.holds and finding.equal and finding.ulps == 0


@pytest.mark.parametrize("order", ORDERS)
def test_a_fault_is_one_bit_and_shows(order: Order) -> None:
    faulty = flip_lowest_bit(GIVEN, order)
    before, after = (np.stack([value["w"] for value in given.values]).view(np.uint32) for given in (GIVEN, faulty))
    assert np.bitwise_count(before ^ after).sum() == 1
    rows = list(combined([_case(order=order)] * 2, GIVEN, inject_fault=True, progress=lambda name: None))
    assert not rows[-1].holds


@pytest.mark.parametrize(
    ("defect", "within"),
    [
        (lambda values, weights: combine(MEAN, values, weights, "sequential"), True),
        (lambda values, weights: combine(MEAN, values[1:] + values[:1], weights[1:] + weights[:1], "tree"), True),
        (lambda values, weights: combine(MEAN, values, [*weights[:-1], weights[-1] - 1], "tree"), False),
        (lambda values, weights: combine(MEAN, values[:-1], weights[:-1], "tree"), False),
        (lambda values, weights: gc.mean(values), False),
    ],
    ids=["another order", "rotated", "a weight", "a contribution lost", "mean of means"],
)
def test_defects_are_detected(defect: Callable[..., Arrays], within: bool) -> None:
    """Results of another order are within the bound of a chain, without equal bits; the others exceed every bound."""
    result = [defect(*GIVEN)]
    assert not _case().judged(result, GIVEN).holds
    assert _case("jax", TIME_AND_REPLICAS, "sequential").judged(result, GIVEN).holds is within


def _changed(change: float) -> list[Arrays]:
    """Results of two replicas; one element of the second is changed."""
    result = combine(MEAN, *GIVEN, order="tree")
    corrupted = result["w"].copy()
    corrupted[1, 2] = change if np.isnan(change) else corrupted[1, 2] * np.float32(1 + change)
    return [result, {"w": corrupted}]


@pytest.mark.parametrize(("change", "within"), [(2.0**-23, True), (0.1, False), (np.nan, False)])
def test_one_changed_element_of_one_replica_is_detected(change: float, within: bool) -> None:
    """It breaks equal bits; a bound allows rounding alone."""
    finding = _case(place=TIME_AND_REPLICAS, replicas=2).judged(_changed(change), GIVEN)
    assert not finding.holds and not finding.equal
    bound = _case(place=TIME_AND_REPLICAS, order="sequential", replicas=2).judged(_changed(change), GIVEN)
    assert bound.holds is within


def test_zeros_of_other_signs_are_not_equal_bits() -> None:
    given = Contributions([{"w": np.float32([0, 1])}], [np.float32(1)])
    finding = _case().judged([{"w": np.float32([-0.0, 1])}], given)
    assert (finding.ulps, finding.equal, finding.holds, finding.measured) == (0, False, False, "sign of 0")


@pytest.mark.needs("jax")
def test_the_defect_is_named_and_the_repaired_step_is_not_accused() -> None:
    (batch,) = batches([10])
    averaged, weighted = checked(batch)
    assert averaged.labels["answer"] == "mean of means" and averaged.holds
    assert weighted.labels["answer"] == "no defect" and weighted.holds
    alike, _ = checked(Batch(np.tile(batch.images[:1], (10, 1)), np.tile(batch.targets[:1], (10, 1))))
    assert not alike.holds  # all microbatches have the same mean: no defect to name
