"""Correct steps of many kinds pass: `check_step` has no false positives on them."""

from __future__ import annotations

import pytest

from gradcombine.verify import Verdict, check_step
from tests.verify.steps.right_forms import NOT_COMPARED, RIGHT

pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("jax", "optax", "flax", "equinox", "tensorflow"),
    pytest.mark.usefixtures("as_users_do"),
]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_accused(name: str) -> None:
    make_step, params, batch, options = RIGHT[name]
    report = check_step(make_step, params, batch, **({"microbatches": (4,)} | options))
    assert report.faults == (), report
    reason = NOT_COMPARED.get(name)
    if reason is None:
        assert report.passes, report
    else:
        assert report.verdict is Verdict.CANNOT_TELL, report
        assert reason in report.not_checked[0]


def test_there_are_sixty() -> None:
    assert len(RIGHT) >= 60
