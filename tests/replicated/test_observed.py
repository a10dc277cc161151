"""In every observed case, the model has TensorFlow's values, raises as TensorFlow does, or a difference is listed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.replicated import places
from tests.replicated.differences import DIFFERENCES, Difference, expected
from tests.replicated.observed import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "replicated.md"

LEFT_OUT_OF_SELECTION = ("replica_const", "cross_no_scope", "update_api_const")
"""Contexts that repeat another context's calls with different numbers."""

SELECTED = [case for case in CASES if case.synchronization != "AUTO" and case.context not in LEFT_OUT_OF_SELECTION]
"""Cases for TensorFlow and compiled JAX: all rules under each policy."""

MERGE_IN_COND = [
    case
    for case in SELECTED
    if case.column == "tf_function" and case.op == "assign_add" and case.on_write and case.aggregation != "NONE"
]

SHARDED = [
    case
    for case in SELECTED
    if case.column != "tf_function" and case.op != "assign_sub" and (case.op, case.context) != ("assign", "replica_dep")
]

MAPPED = [case for case in SHARDED if case.context in ("", "replica_dep", "replica_pyfloat", "cross_in_scope")]


def one_a_rule(cases: list[Case]) -> list[Case]:
    """Keeps one case per method and type of variable, from any context."""
    return list({(case.synchronization, case.aggregation, case.op): case for case in cases}.values())


def outcomes(cases: list[Case]) -> places.Outcomes:
    return {str(case): expected(case) for case in cases}


def by_policy(cases: list[Case]) -> dict[str, list[Case]]:
    """Groups the cases by type of variable; a group is one program."""
    policies: dict[str, list[Case]] = {}
    for case in cases:
        policies.setdefault(f"{case.synchronization}-{case.aggregation}", []).append(case)
    return policies


def quick(place: Any, chosen: list[Case], of: list[Case]) -> list[Any]:
    """Test parameters: the chosen cases are quick; the others trace the same functions and run in the full suite."""
    rest = by_policy([case for case in of if case not in chosen])
    programs = {"one a rule": (chosen, ()), **{name: (cases, pytest.mark.full) for name, cases in rest.items()}}
    return [
        pytest.param(place, cases, id=f"{place.__name__}-{name}", marks=marks)
        for name, (cases, marks) in programs.items()
    ]


@pytest.mark.parametrize("cases", by_policy(CASES).values(), ids=by_policy(CASES))
def test_numpy(cases: list[Case]) -> None:
    assert places.numpy_stacked(cases) == outcomes(cases)


@pytest.mark.needs("jax")
@pytest.mark.parametrize(
    ("place", "cases"),
    [
        *quick(places.jax_vmap, one_a_rule(SELECTED), CASES),
        *quick(places.jax_shard_map, one_a_rule(MAPPED), SHARDED),
        *quick(places.jax_pmap, MAPPED[::4], MAPPED),
    ],
)
def test_jax(place: Callable[[list[Case]], places.Outcomes], cases: list[Case]) -> None:
    assert place(cases) == outcomes(cases)


COMPILED = [case for case in SELECTED if case.column == "tf_function" and case not in MERGE_IN_COND]
EAGER = by_policy([case for case in SELECTED if case.column != "tf_function"])


@pytest.mark.sampled
@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("cases", [*EAGER.values(), COMPILED], ids=[*EAGER, "tf_function"])
def test_tensorflow(cases: list[Case]) -> None:
    """Runs as the cases were observed: eagerly or in a tf.function."""
    assert places.tf_mirrored(cases, compiled=cases is COMPILED) == outcomes(cases)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("case", MERGE_IN_COND, ids=str)
def test_tensorflow_has_no_collective_inside_cond(case: Case) -> None:
    """A limit of MirroredStrategy, not of the model."""
    with pytest.raises(RuntimeError, match="merge_call"):
        places.tf_mirrored([case], compiled=True)


def test_every_case_is_there() -> None:
    assert len({case.key for case in CASES}) == 320


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_every_difference_is_needed(difference: Difference) -> None:
    covered = [case for case in CASES if difference.covers(case)]
    assert covered
    assert [case.key for case in covered if difference.ours(case) == case.outcome] == []


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_every_difference_is_documented(difference: Difference) -> None:
    assert f"| {difference.name} |" in PAGE.read_text()
