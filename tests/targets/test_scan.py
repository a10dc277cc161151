"""Full windows in one call: memory traffic and memory of a microbatch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from tests.targets.programs import ROWS, WIDTH, by_hand, ours, row_of, scan

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_costs_what_one_by_hand_costs(dtype: Any, weighted: bool) -> None:
    mine, theirs = (row_of(scan(of(weighted), dtype, weighted), WIDTH) for of in (ours, by_hand))
    assert mine.turn <= 1.05 * theirs.turn
    assert mine.rest <= 1.25 * theirs.rest
    # XLA chooses where to keep accumulators that are divided at the end, which takes more memory than a sum.
    assert mine.temporary <= 1.25 * theirs.temporary
    assert (mine.rows, mine.copies) == (theirs.rows, theirs.copies) == (ROWS, 0)
