"""Steps under plain jit on a mesh: the rows that a device computes, and where replicas exchange."""

from __future__ import annotations

from collections import Counter

import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.audit.program import Program
from tests.targets.programs import FEW_SCALARS, MACHINES, MESH_ROWS, MESH_WIDTH, K, Placed, on_mesh, row_of

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def between(replicas: int, program: Program) -> tuple[Counter[str], Counter[str]]:
    """Exchanges of more than a few scalars between so many devices: on every call, and at the end of a window."""
    found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for computation, x, _ in program.executed():
        if x.collective and x.bytes >= FEW_SCALARS and {len(group) for group in program.groups(x)} == {replicas}:
            found[computation != program.entry][x.collective] += 1
    return found


@KINDS
@pytest.mark.parametrize("machine", ["8 H100", "8 H100, data 4 x model 2", "TPU v5e:4x4"])
def test_a_window_over_calls_is_exchanged_in_the_branch_at_its_end(machine: str, kind: AxisType) -> None:
    made = MACHINES[machine]
    program = on_mesh(made, Placed(kind), every=K).program
    assert between(made.data, program) == ({}, {"all-reduce": 1})
    assert program.conditionals() == 0


@KINDS
@pytest.mark.parametrize("machine", ["8 H100", "TPU v5e:4x4"])
def test_a_window_of_split_parameters_is_scattered_in_the_branch_at_its_end(machine: str, kind: AxisType) -> None:
    """Parameters are gathered for the loss on every call.

    The TPU compiler turns a reduce-scatter of this size into an all-reduce, even an explicit one.
    """
    made = MACHINES[machine]
    calls, end = between(made.data, on_mesh(made, Placed(kind, P("data")), every=K).program)
    assert set(calls) == {"all-gather"}
    assert end == ({"all-reduce": 1} if "TPU" in machine else {"reduce-scatter": 1})


@KINDS
@pytest.mark.parametrize("machine", [name for name in MACHINES if "model" not in name])
def test_replicas_of_a_mesh_exchange_once_a_window(machine: str, kind: AxisType) -> None:
    row = row_of(on_mesh(MACHINES[machine], Placed(kind)), MESH_WIDTH)
    assert (row.inside, row.outside, row.rows) == ({}, {"all-reduce": 1}, MESH_ROWS)


@KINDS
@pytest.mark.parametrize("machine", ["8 H100", "TPU v5e:4x4"])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["rows", "columns"])
def test_split_parameters_are_gathered_and_their_gradients_scattered_once_a_window(
    machine: str, kind: AxisType, spec: P
) -> None:
    """Except on TPUs, as above."""
    row = row_of(on_mesh(MACHINES[machine], Placed(kind, spec)), MESH_WIDTH)
    assert (row.inside, row.rows) == ({}, MESH_ROWS)
    assert set(row.outside) == {"all-gather", "all-reduce" if "TPU" in machine else "reduce-scatter"}


@KINDS
@pytest.mark.parametrize("machine", ["8 H100", "TPU v5e:4x4"])
def test_a_batch_is_divided_where_it_lies(machine: str, kind: AxisType) -> None:
    """XLA moves the exchange of values that are only added out of the loop."""
    row = row_of(on_mesh(MACHINES[machine], Placed(kind, over=gc.LOCAL)), MESH_WIDTH)
    assert (row.inside, set(row.outside), row.rows) == ({}, {"all-reduce"}, MESH_ROWS)


@KINDS
def test_the_compiler_keeps_other_axes(kind: AxisType) -> None:
    row = row_of(on_mesh(MACHINES["8 H100, data 4 x model 2"], Placed(kind)), MESH_WIDTH)
    assert row.outside["all-reduce"] >= 1
    assert row.rows == MESH_ROWS
