"""Collectives that no one could join are no finding."""

from __future__ import annotations

import pytest

from gradcombine.audit.program import Program
from gradcombine.audit.rules import MANY, find

HEADER = "HloModule m, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8\n\n"
BEFORE = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused (z: f32[64]) -> f32[64] {
  %z = f32[64] parameter(0)
  ROOT %scaled = f32[64] multiply(%z, %z)
}

"""
GPU = ', backend_config={"operation_queue_id":"0"}'


@pytest.mark.parametrize(
    ("chained", "machine", "found"),
    [(False, GPU, ["many-small-collectives"]), (True, GPU, []), (False, "", [])],
    ids=["side by side", "each of what the one before gave", "side by side, for CPUs"],
)
def test_small_sums(chained: bool, machine: str, found: list[str]) -> None:
    """Those that wait for each other, through a fusion, cannot be joined; those on CPUs XLA never joins."""
    lines = ["%p = f32[64] parameter(0), sharding={devices=[8]<=[8]}"]
    for i in range(MANY):
        taken = f"%g{i - 1}" if chained and i else "%p"
        lines += [
            f"%f{i} = f32[64] fusion({taken}), kind=kLoop, calls=%fused{machine}",
            f"%r{i} = f32[64] all-reduce(%f{i}), replica_groups=[1,8]<=[8], to_apply=%add{machine}",
            f"%g{i} = f32[64] add(%r{i}, %p)",
        ]
    given = ", ".join(f"%g{i}" for i in range(MANY))
    lines.append(f"ROOT %out = ({', '.join(['f32[64]'] * MANY)}) tuple({given})")
    entry = "".join(f"  {line}\n" for line in lines)
    program = Program(f"{HEADER}{BEFORE}ENTRY %main () -> () {{\n{entry}}}\n")
    assert [x.name for x in find(program)] == found
