"""Each seeded defect is found under its name, and nothing in its clean twin, nor in our own steps."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from gradcombine.verify.audit import audit
from tests.verify.audit.seeded import CASES, OURS


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


QUICK = {"reduced in a shard_map", "batch gathered", "decided by select"}


@pytest.mark.parametrize("defect", [True, False], ids=["defect", "clean"])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in CASES])
def test_a_defect_is_found_and_its_twin_is_clean(name: str, defect: bool) -> None:
    make, expected = CASES[name]
    case = make(jax.devices(), defect)
    report = audit(case.step, *case.args)
    assert {x.name for x in report.findings} == (expected if defect else set()), report.findings


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_our_own_steps_are_clean(name: str) -> None:
    case = OURS[name](jax.devices())
    assert audit(case.step, *case.args).findings == []
