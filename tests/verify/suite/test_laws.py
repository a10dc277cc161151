"""Each row's claim holds, and a violation is detected."""

import numpy as np
import pytest

from gradcombine.verify.suite import places
from gradcombine.verify.suite.outcomes import BITS, BOUND, LIST, REPLICAS, TIME, TIME_AND_REPLICAS
from gradcombine.verify.suite.places import Case, Contributions, Judge, flip_lowest_bit, promised

RANDOM = np.random.default_rng(0)
GIVEN = Contributions(
    [{"w": RANDOM.normal(size=(3, 4)).astype(np.float32)} for _ in range(8)], [3, 1, 7, 2, 2, 5, 1, 4]
)


def _case(framework: str = "jax", place: str = LIST, order: str = "tree", replicas: int = 1) -> Case:
    return Case(framework, "eager", place, replicas, order, lambda given: [places.over_list(*given, order)])


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
def test_promises(framework: str, place: str, order: str, promise: str) -> None:
    assert promised(_case(framework, place, order)) == promise


@pytest.mark.parametrize("order", ["sequential", "tree"])
@pytest.mark.parametrize("place", [LIST, REPLICAS])
def test_the_reference_itself_holds(place: str, order: str) -> None:
    case = _case(place=place, order=order, replicas=4)
    finding = Judge(GIVEN).finding(case, case.run(case.contributions(GIVEN)))
    assert finding.holds and finding.equal and finding.ulps == 0


def _changed(change: float) -> list[dict[str, np.ndarray]]:
    """Results of two replicas; one element of the second is changed."""
    result = places.over_list(*GIVEN, "tree")
    corrupted = result["w"].copy()
    corrupted[1, 2] = change if np.isnan(change) else corrupted[1, 2] * np.float32(1 + change)
    return [result, {"w": corrupted}]


@pytest.mark.parametrize("change", [2.0**-23, 0.1, np.nan])
def test_one_changed_element_of_one_replica_breaks_equal_bits(change: float) -> None:
    finding = Judge(GIVEN).finding(_case(), _changed(change))
    assert not finding.holds and not finding.equal


@pytest.mark.parametrize(("change", "holds"), [(2.0**-23, True), (0.1, False), (np.nan, False)])
def test_a_bound_allows_rounding_alone(change: float, holds: bool) -> None:
    finding = Judge(GIVEN).finding(_case("numpy"), _changed(change))
    assert finding.holds is holds


def test_zeros_of_other_signs_are_not_equal_bits() -> None:
    given = Contributions([{"w": np.float32([0, 1])}], [1])
    finding = Judge(given).finding(_case(), [{"w": np.float32([-0.0, 1])}])
    assert (finding.ulps, finding.equal, finding.holds) == (0, False, False)


@pytest.mark.parametrize("order", ["sequential", "tree"])
def test_a_fault_is_one_bit_and_shows(order: str) -> None:
    corrupted = flip_lowest_bit(_case(order=order), GIVEN)
    before, after = (np.stack([value["w"] for value in given.values]).view(np.uint32) for given in (GIVEN, corrupted))
    assert np.bitwise_count(before ^ after).sum() == 1
    finding = Judge(GIVEN).finding(_case(order=order), [places.over_list(*corrupted, order)])
    assert not finding.holds
