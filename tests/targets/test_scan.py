"""Whole windows in one call: what a microbatch moves and computes, and where replicas exchange."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from tests.targets.programs import (
    MACHINES,
    MESH_ROWS,
    MESH_WIDTH,
    ROWS,
    WIDTH,
    Placed,
    by_hand,
    on_mesh,
    ours,
    row_of,
    scan,
)

pytestmark = pytest.mark.targets


@pytest.fixture(autouse=True)
def standard_promotion() -> Any:
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("weighted", [False, True], ids=["even", "weighted"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_costs_what_one_by_hand_costs(dtype: Any, weighted: bool) -> None:
    mine, theirs = (row_of(scan(of(weighted), dtype, weighted), WIDTH) for of in (ours, by_hand))
    assert mine.turn <= 1.05 * theirs.turn
    assert mine.rest <= 1.25 * theirs.rest
    # Where accumulators that are divided at the end lie is XLA's choice, and makes it more than that of a sum.
    assert mine.temporary <= 1.25 * theirs.temporary
    assert (mine.rows, mine.copies) == (theirs.rows, theirs.copies) == (ROWS, 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("machine", [name for name in MACHINES if "model" not in name])
def test_replicas_of_a_mesh_exchange_once_a_window(machine: str, kind: AxisType) -> None:
    row = row_of(on_mesh(MACHINES[machine], Placed(kind)), MESH_WIDTH)
    assert (row.inside, row.outside, row.rows) == ({}, {"all-reduce": 1}, MESH_ROWS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("machine", ["8 H100", "TPU v5e:4x4"])
def test_parameters_that_are_split_over_the_replicas_are_gathered_once_a_window(machine: str, kind: AxisType) -> None:
    row = row_of(on_mesh(MACHINES[machine], Placed(kind, P("data"))), MESH_WIDTH)
    assert (row.inside, row.rows) == ({}, MESH_ROWS)
    assert set(row.outside) <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("machine", ["8 H100", "TPU v5e:4x4"])
def test_a_batch_is_divided_where_it_lies(machine: str, kind: AxisType) -> None:
    """And XLA moves the exchange of what is only added out of the loop."""
    row = row_of(on_mesh(MACHINES[machine], Placed(kind, over=gc.LOCAL)), MESH_WIDTH)
    assert (row.inside, set(row.outside), row.rows) == ({}, {"all-reduce"}, MESH_ROWS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_compiler_keeps_other_axes(kind: AxisType) -> None:
    row = row_of(on_mesh(MACHINES["8 H100, data 4 x model 2"], Placed(kind)), MESH_WIDTH)
    assert row.outside["all-reduce"] >= 1
    assert row.rows == MESH_ROWS
