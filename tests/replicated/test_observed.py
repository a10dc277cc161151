"""Every observed case, on the model: the same values, an error where TensorFlow raises, or a listed difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replicated import places
from tests.replicated.differences import DIFFERENCES, Difference, expected
from tests.replicated.observed import CASES, Case

PAGE = Path(__file__).parents[2] / "docs" / "replicated.md"

LEFT_OUT_OF_SELECTION = ("replica_const", "cross_no_scope", "update_api_const")
"""Contexts that another one stands for: the same calls with other numbers."""

SELECTED = [case for case in CASES if case.synchronization != "AUTO" and case.context not in LEFT_OUT_OF_SELECTION]
"""What TensorFlow and the modes of JAX that compile run: all rules, under each of the policies."""

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
    """One of those that ask the same method of the same kind of variable, in whatever context."""
    return list({(case.synchronization, case.aggregation, case.op): case for case in cases}.values())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_numpy(case: Case) -> None:
    assert places.numpy_stacked(case) == expected(case)


def quick(chosen: list[Case], of: list[Case]) -> pytest.MarkDecorator:
    """Of these cases the chosen ones; the rest, which traces the same functions, is left to the full suite."""
    return pytest.mark.parametrize(
        "case", [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in of], ids=str
    )


@pytest.mark.needs("jax")
@quick(one_a_rule(SELECTED), CASES)
def test_jax_vmap(case: Case) -> None:
    assert places.jax_vmap(case) == expected(case)


@pytest.mark.needs("jax")
@quick(one_a_rule(MAPPED), SHARDED)
def test_jax_shard_map(case: Case) -> None:
    assert places.jax_shard_map(case) == expected(case)


@pytest.mark.needs("jax")
@quick(MAPPED[::4], MAPPED)
def test_jax_pmap(case: Case) -> None:
    assert places.jax_pmap(case) == expected(case)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("case", [case for case in SELECTED if case not in MERGE_IN_COND], ids=str)
def test_tensorflow(case: Case) -> None:
    assert places.tf_mirrored(case) == expected(case)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("case", MERGE_IN_COND, ids=str)
def test_tensorflow_has_no_collective_inside_cond(case: Case) -> None:
    """MirroredStrategy's own limit, whoever asks."""
    with pytest.raises(RuntimeError, match="merge_call"):
        places.tf_mirrored(case)


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
