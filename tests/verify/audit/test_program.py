"""Costs counted in a program, and the devices that hold equal values, against numbers worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gradcombine.audit import audit
from gradcombine.audit.flow import Flow
from gradcombine.audit.program import Program
from gradcombine.audit.rules import MANY, RULES, find

HEADER = "HloModule m, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8\n\n"
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def program(body: str, before: str = "") -> Program:
    lines = "".join(f"  {line.strip()}\n" for line in body.strip().splitlines())
    return Program(f"{HEADER}{ADD}{before}ENTRY %main () -> f32[] {{\n{lines}}}\n")


def classes(found: Program) -> dict[str, int]:
    """Number of distinct values of each array over the devices."""
    flow = Flow(found)
    return {place.x.name: flow.equality.classes(node) for node, place in enumerate(flow.places)}


ROWS = "%rows = f32[4] parameter(0), sharding={devices=[4,2]<=[8] last_tile_dim_replicate}"
MIXED = "{{0,2},{3,1},{4,6},{5,7}}"
COLUMNS = "%columns = f32[4] parameter(1), sharding={devices=[2,4]<=[4,2]T(1,0) last_tile_dim_replicate}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (ROWS, 4),
        (COLUMNS, 2),
        ("%p = f32[4] parameter(0), sharding={replicated}", 1),
        ("%p = f32[4] parameter(0), sharding={devices=[8]<=[8]}", 8),
        ("%p = f32[4] parameter(0)", 8),
        ("%p = f32[4] parameter(0), sharding={manual}", 8),
        ("%p = f32[4] constant({1,2,3,4})", 1),
        ("%p = u32[] partition-id()", 8),
        (f"{ROWS}\n{COLUMNS}\n%both = f32[4] add(%rows, %columns)", 8),
        (f"{ROWS}\n%twice = f32[4] multiply(%rows, %rows)", 4),
        # Devices 2 i and 2 i + 1 hold row i: the sums over even and over odd devices are equal.
        (f"{ROWS}\n%r = f32[4] all-reduce(%rows), replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, to_apply=%add", 1),
        (f"{ROWS}\n%r = f32[4] all-reduce(%rows), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add", 2),
        (
            f"{ROWS}\n%r = f32[4] all-reduce(%rows), replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, to_apply=%add",
            4,
        ),
        # The same rows in another order are a different array but have the same sum.
        (f"{ROWS}\n%g = f32[8] all-gather(%rows), replica_groups={MIXED}, dimensions={{0}}", 3),
        (
            f"{ROWS}\n%r = f32[4] all-reduce(%rows), replica_groups={MIXED}, to_apply=%add",
            2,
        ),
        (f"{ROWS}\n%s = f32[1] reduce-scatter(%rows), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add", 4),
        (f"{ROWS}\n%c = f32[4] collective-permute(%rows), source_target_pairs={{{{0,1}},{{1,2}}}}", 2),
    ],
)
def test_which_devices_hold_the_same(lines: str, expected: int) -> None:
    found = program(lines + "\nROOT %out = f32[] constant(0)")
    assert list(classes(found).values())[-2] == expected


LOOP = """%body (p: (s32[], f32[4], f32[4])) -> (s32[], f32[4], f32[4]) {
  %p = (s32[], f32[4], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %a = f32[4] get-tuple-element(%p), index=1
  %b = f32[4] get-tuple-element(%p), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %sum = f32[4] add(%a, %b)
  ROOT %t = (s32[], f32[4], f32[4]) tuple(%next, %sum, %b)
}

%cond (q: (s32[], f32[4], f32[4])) -> pred[] {
  %q = (s32[], f32[4], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %end = s32[] constant(5)
  ROOT %lt = pred[] compare(%j, %end), direction=LT
}

"""


def test_a_loop_makes_different_what_it_adds_to() -> None:
    found = program(
        f"""{ROWS}
        %zero = s32[] constant(0)
        %zeros = f32[4] constant({{0,0,0,0}})
        %init = (s32[], f32[4], f32[4]) tuple(%zero, %zeros, %rows)
        %loop = (s32[], f32[4], f32[4]) while(%init), condition=%cond, body=%body
        %count = s32[] get-tuple-element(%loop), index=0
        %added = f32[4] get-tuple-element(%loop), index=1
        ROOT %out = f32[] constant(0)""",
        LOOP,
    )
    held = classes(found)
    assert (held["count"], held["added"], held["zeros"], held["b"], held["lt"]) == (1, 4, 1, 4, 1)
    # An iteration reads and writes 4 bytes of index and 16 of each array; the condition's reads are counted apart.
    moved = {
        name: sum(found.traffic(of, x) for of, x, _ in found.executed() if x.name == name) for name in ("sum", "next")
    }
    assert moved == {"sum": 48, "next": 12}


@pytest.mark.parametrize(
    ("line", "sent", "away"),
    [
        ("all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add", Fraction(7, 4) * 4096, Fraction(2, 2) * 4096 / 4),
        ("all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", Fraction(3, 2) * 4096, 0),
        (
            "all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}",
            Fraction(7, 8) * 32768,
            Fraction(1, 2) * 32768 / 4,
        ),
        (
            "reduce-scatter(%p), replica_groups=[1,8]<=[8], to_apply=%add",
            Fraction(7, 8) * 4096,
            Fraction(1, 2) * 4096 / 4,
        ),
        ("collective-permute(%p), source_target_pairs={{0,1},{1,0}}", 4096, 0),
        ("all-to-all(%p), replica_groups=[4,2]<=[2,4]T(1,0)", Fraction(1, 2) * 4096, Fraction(1, 2) * 4096),
        ("all-to-all(%p), replica_groups=[1,8]<=[8]", Fraction(7, 8) * 4096, Fraction(4, 8) * 4096),
        ("all-reduce(%p), replica_groups=[8,1]<=[8], to_apply=%add", 0, 0),
    ],
)
def test_what_a_collective_sends(line: str, sent: Fraction, away: Fraction) -> None:
    """With 8 devices, 4 per host."""
    result = {"all-gather": "f32[8192]", "reduce-scatter": "f32[128]"}.get(line.split("(")[0], "f32[1024]")
    found = program(f"%p = f32[1024] parameter(0)\nROOT %x = {result} {line}")
    (exchange,) = found.exchanges
    assert (exchange.sent(), exchange.leaves_host(lambda device: device // 4)[1]) == (sent, away)


IMAGE, KERNEL, OUTPUT = "f32[1,7,7,3]", "f32[3,3,3,7]", "f32[1,5,5,7]"


@pytest.mark.parametrize(
    ("lines", "flops"),
    [
        ("%a = f32[8,16] parameter(0)\n%b = f32[16,4] parameter(1)\nROOT %x = f32[8,4] dot(%a, %b), "
         "lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 4 * 16),
        ("%a = f32[2,8,16] parameter(0)\n%b = f32[2,16,4] parameter(1)\nROOT %x = f32[2,8,4] dot(%a, %b), "
         "lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}", 4 * 8 * 4 * 16),
        # 5 x 5 outputs with 7 features, each from 3 x 3 taps of 3 features.
        ("%a = f32[1,7,7,3] parameter(0)\n%b = f32[3,3,3,7] parameter(1)\nROOT %x = f32[1,5,5,7] convolution(%a, %b), "
         "window={size=3x3}, dim_labels=b01f_01io->b01f", 2 * 25 * 7 * 27),
        *((f"%x = {x} parameter(0)\n%y = {y} parameter(1)\nROOT %z = ({z}, u8[0]) custom-call(%x, %y), "
           f'window={{size=3x3}}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{kind}"', 2 * 25 * 7 * 27)
          for kind, x, y, z in [("Forward", IMAGE, KERNEL, OUTPUT), ("BackwardInput", OUTPUT, KERNEL, IMAGE),
                                ("BackwardFilter", IMAGE, OUTPUT, KERNEL)]),
        ("%a = f32[8,16] parameter(0)\nROOT %x = f32[8,16] tanh(%a)", 0),
    ],
)  # fmt: skip
def test_operations_of_products(lines: str, flops: int) -> None:
    found = program(lines)
    counted = [count for of, x, _ in found.executed() for _, _, count, _ in found.products(of, x)]
    assert sum(counted) == flops


FUSED = """%fused (s: f32[8,64], i: s32[], u: f32[1,64]) -> f32[8,64] {
  %s = f32[8,64] parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,64] parameter(2)
  %z = s32[] constant(0)
  %row = f32[1,64] dynamic-slice(%s, %i, %z), dynamic_slice_sizes={1,64}
  %new = f32[1,64] add(%row, %u)
  ROOT %updated = f32[8,64] dynamic-update-slice(%s, %new, %i, %z)
}

"""


def test_a_fusion_moves_the_rows_that_it_uses() -> None:
    found = program(
        """%s = f32[8,64] parameter(0)
        %i = s32[] parameter(1)
        %u = f32[1,64] parameter(2)
        ROOT %x = f32[8,64] fusion(%s, %i, %u), kind=kLoop, calls=%fused""",
        FUSED,
    )
    (moved,) = (found.traffic(of, x) for of, x, _ in found.executed() if x.opcode == "fusion")
    # Reads a row, an update row and an index; writes a row.
    assert moved == 256 + 256 + 4 + 256


def test_values_that_devices_pass_round_in_a_loop_are_told_apart() -> None:
    """Each iteration passes a device's value to the next device, so a device may hold any of the initial values."""
    ring = ",".join(f"{{{i},{(i + 1) % 8}}}" for i in range(8))
    permute = f"%sum = f32[4] collective-permute(%a), source_target_pairs={{{ring}}}"
    body = LOOP.replace("%sum = f32[4] add(%a, %b)", permute)
    found = program(
        f"""{ROWS}
        %zero = s32[] constant(0)
        %init = (s32[], f32[4], f32[4]) tuple(%zero, %rows, %rows)
        %loop = (s32[], f32[4], f32[4]) while(%init), condition=%cond, body=%body
        %passed = f32[4] get-tuple-element(%loop), index=1
        %kept = f32[4] get-tuple-element(%loop), index=2
        ROOT %out = f32[] constant(0)""",
        body,
    )
    held = classes(found)
    assert (held["passed"], held["kept"]) == (8, 4)
    assert [str(x) for x in found.exchanges] == ["collective-permute of 16 B between pairs of devices"]


def test_a_permutation_without_pairs_sends_nothing() -> None:
    """For instance along an axis of one device; its result is zero on all devices."""
    found = program(f"""{ROWS}
    %zero = f32[4] collective-permute(%rows), source_target_pairs={{}}
    ROOT %out = f32[] constant(0)""")
    assert (found.exchanges, classes(found)["zero"]) == ([], 1)


def test_a_collective_without_a_line_has_that_of_what_takes_its_result() -> None:
    """XLA gives no source line to a collective that it merged from several."""
    found = program("""%x = f32[8] parameter(0)
    %begun = f32[8] all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add
    %done = f32[8] all-reduce-done(%begun)
    ROOT %part = f32[4] slice(%done), slice={[0:4]}, metadata={source_file="step.py" source_line=7}""")
    (exchange,) = found.exchanges
    assert found.source(exchange.x) == "step.py:7"


@pytest.mark.needs("flax", "equinox")
def test_a_step_that_a_library_has_wrapped() -> None:
    """Lowered and compiled stages of the libraries work like JAX's; donation is known."""
    import equinox
    from flax import nnx

    x = jnp.zeros((64, 64))
    steps: list[Any] = [
        nnx.jit(lambda x: x + 1.0, donate_argnums=0),
        equinox.filter_jit(lambda x: x + 1.0, donate="all"),
    ]
    for report in (
        audit(stage, *args) for step in steps for stage, args in ((step, [x]), (step.lower(x).compile(), []))
    ):
        assert report.findings == [] and report.memory is not None and report.memory.aliased == x.nbytes


SCALED = """%fused (z: f32[64]) -> f32[64] {
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
    """All-reduces that depend on each other, even through a fusion, cannot be merged; on CPU, XLA never merges."""
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
    assert [x.name for x in find(program("\n".join(lines), SCALED))] == found


@pytest.mark.parametrize(("reduction", "found"), [("add", ["repeated-collective"]), ("maximum", [])])
def test_a_sum_and_a_maximum_of_one_array_are_two_exchanges(reduction: str, found: list[str]) -> None:
    lines = """%p = f32[64] parameter(0), sharding={devices=[8]<=[8]}
    %a = f32[64] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
    %b = f32[64] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%other
    ROOT %out = (f32[64], f32[64]) tuple(%a, %b)"""
    other = ADD.replace("%add", "%other").replace("add(", f"{reduction}(")
    assert [x.name for x in find(program(lines, other))] == found


def test_a_flag_whose_zero_is_reshaped() -> None:
    lines = """%n = s32[] parameter(0)
    %g = f32[64] parameter(1), sharding={devices=[8]<=[8]}
    %r = f32[64] all-reduce(%g), replica_groups=[1,8]<=[8], to_apply=%add
    %every = s32[] constant(4)
    %due = pred[] compare(%n, %every), direction=EQ
    %zeros = f32[1] constant({0})
    %zero = f32[] reshape(%zeros)
    %one = f32[] constant(1)
    %flag = f32[] select(%due, %one, %zero)
    %flags = f32[64] broadcast(%flag), dimensions={}
    ROOT %out = f32[64] multiply(%r, %flags)"""
    assert find(program(lines)) == []


@pytest.mark.parametrize(("count", "found"), [(MANY // 2, True), (MANY // 2 - 1, False)])
def test_a_loop_of_unknown_length_turns_at_least_twice(count: int, found: bool) -> None:
    of = "(pred[], f32[256], f32[32])"
    gathered = "".join(
        f"  %g{i} = f32[256] all-gather(%b), replica_groups=[1,8]<=[8], dimensions={{0}}\n"
        f"  %s{i + 1} = f32[256] add(%s{i}, %g{i})\n"
        for i in range(count)
    )
    loop = f"""%body (p: {of}) -> {of} {{
  %p = {of} parameter(0)
  %on = pred[] get-tuple-element(%p), index=0
  %s0 = f32[256] get-tuple-element(%p), index=1
  %b = f32[32] get-tuple-element(%p), index=2
  %more = pred[] not(%on)
{gathered}  ROOT %t = {of} tuple(%more, %s{count}, %b)
}}

%cond (q: {of}) -> pred[] {{
  %q = {of} parameter(0)
  ROOT %asked = pred[] get-tuple-element(%q), index=0
}}

"""
    main = f"""%init = {of} parameter(0)
    %loop = {of} while(%init), condition=%cond, body=%body
    ROOT %out = f32[256] get-tuple-element(%loop), index=1"""
    assert ("many-small-collectives" in {x.name for x in find(program(main, loop))}) is found


@pytest.mark.parametrize("host", [True, False])
def test_what_a_tpu_receives_from_its_host_is_not_read(host: bool) -> None:
    found = program(f"""
    %t = token[] after-all()
    %r = (f32[4], u32[], token[]) recv(%t), channel_id=1, is_host_transfer={str(host).lower()}
    ROOT %out = f32[] constant(0)""")
    assert ("code" in found.unknown) is host


@pytest.mark.parametrize("has_result", [True, False])
def test_code_of_the_host_is_not_read_unless_it_has_no_result(has_result: bool) -> None:
    def step(x: Any) -> Any:
        if has_result:
            return jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        jax.debug.print("{}", x[0])
        return x * 2

    found = audit(jax.jit(step), jnp.ones(10))
    assert found.undecided == (list(RULES) if has_result else [])
    assert [text for text in found.unread if "pure_callback is not read" in text] == found.unread


@pytest.mark.parametrize(("second", "found"), [("m", ["optimizer-every-microbatch"]), ("g", [])])
def test_state_that_a_tpu_prefetches_in_slices(second: str, found: list[str]) -> None:
    """Slices that TPUs join to the array that they come from are this array; slices of two arrays are another one."""
    lines = f"""%n = s32[] parameter(0)
    %g = f32[256] parameter(1)
    %m = f32[256] parameter(2)
    %start0 = ((f32[256]), f32[128], s32[]) slice-start(%m), slice={{[0:128]}}
    %start1 = ((f32[256]), f32[128], s32[]) slice-start(%{second}), slice={{[128:256]}}
    %done0 = f32[128] slice-done(%start0)
    %done1 = f32[128] slice-done(%start1)
    %old = f32[256] custom-call(%done0, %done1), custom_call_target="ConcatBitcast"
    %every = s32[] constant(4)
    %due = pred[] compare(%n, %every), direction=EQ
    %sum = f32[256] add(%old, %g)
    %new = f32[256] multiply(%sum, %sum)
    ROOT %kept = f32[256] select(%due, %new, %old)"""
    assert [x.name for x in find(program(lines))] == found


def test_slices_that_are_joined_in_a_cycle_or_from_nothing() -> None:
    joined = 'custom_call_target="ConcatBitcast"'
    lines = f"""%x = f32[4] slice(%x), slice={{[0:4]}}
    %all = f32[4] custom-call(%x), {joined}
    %none = f32[4] custom-call(), {joined}
    ROOT %sum = f32[4] add(%all, %none)"""
    assert find(program(lines)) == []


def test_a_part_of_a_concatenated_exchange_is_repeated() -> None:
    """On GPUs, XLA concatenates small arrays before it exchanges them together."""
    every = "replica_groups=[1,8]<=[8], to_apply=%add"
    found = program(
        f"""%p = f32[64] parameter(0), sharding={{devices=[8]<=[8]}}
        %q = f32[192] parameter(1), sharding={{devices=[8]<=[8]}}
        %once = f32[64] all-reduce(%p), {every}
        %both = f32[256] concatenate(%once, %q), dimensions={{0}}
        %again = f32[256] all-reduce(%both), {every}
        ROOT %out = f32[] constant(0)"""
    )
    (finding,) = find(found)
    assert (finding.name, finding.sent) == ("repeated-collective", 7 / 4 * 64 * 4)
