"""The HLO reader on programs as XLA prints them for CPU, GPU and TPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradcombine.audit.compiling import read as read_all
from gradcombine.audit.hlo import groups
from gradcombine.audit.program import Program
from gradcombine.audit.subject import Frame, Shape
from gradcombine.errors import GradCombineError

CPU = """HloModule jit_f, is_scheduled=true, \
input_output_alias={ {0}: (1, {}, may-alias), {1, 0}: (0, {}, may-alias) }, \
buffer_donor={ (2, {}) }, entry_computation_layout={(f32[4]{0}, f32[4]{0}, f32[4]{0})->(f32[4]{0}, (f32[4]{0}))}, \
replica_count=2, num_partitions=4

FileNames
1 "model.py"
2 "train.py"

FunctionNames
1 "loss"
2 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=15 end_line=15 column=11 end_column=50}
2 {file_name_id=2 function_name_id=2 line=40 end_line=40 column=2 end_column=61}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=1}


%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[4]{0} get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %reduced = f32[4]{0} all-reduce(%v), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, \
metadata={op_name="jit(f)/while/body/params[\\'w\\']/psum" stack_frame_id=2}
  ROOT %t = (s32[], /*index=1*/f32[4]{0}) tuple(%next, %reduced)
}

%cond (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %end = s32[] constant(8)
  ROOT %lt = pred[] compare(%i.1, %end), direction=LT
}

ENTRY %main (a: f32[4], b: f32[4], c: f32[4]) -> (f32[4], (f32[4])) {
  %a = f32[4]{0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %c = f32[4]{0} parameter(2)
  %b = f32[4]{0} parameter(1)
  %start = s32[] constant(3)
  %copied = s32[] copy(%start)
  %init = (s32[], f32[4]{0}) tuple(%copied, %a)
  %loop = (s32[], f32[4]{0}) while(%init), condition=%cond, body=%bodyWITH
  %out = f32[4]{0} get-tuple-element(%loop), index=1, metadata={op_name="x" source_file="old.py" source_line=7}
  %inner = (f32[4]{0}) tuple(%b)
  ROOT %all = (f32[4]{0}, (f32[4]{0})) tuple(%out, %inner)
}
"""
"""A loop whose trip count has to be derived, unless ``WITH`` says it."""


def module(known: str = "") -> Program:
    return Program(CPU.replace("WITH", known))


def test_the_header() -> None:
    found = module()
    assert (found.name, found.devices) == ("jit_f", 8)
    assert found.aliases == {0: 1, 1: 0}
    assert found.donors == [2]
    assert [x.name for x in found.parameters] == ["a", "b", "c"]
    assert found.results == (Shape("f32", (4,), "{0}"),) * 2


def test_an_operation() -> None:
    found = module()
    x = found.computations["body"]["reduced"]
    assert (x.collective, x.bytes, x.operands, x.called("to_apply")) == ("all-reduce", 16, ("v",), ["add"])
    assert x.op_name == "jit(f)/while/body/params['w']/psum"
    assert found.groups(x) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert found.frames(x) == [Frame("model.py", 15, "loss"), Frame("train.py", 40, "main")]
    assert found.frames(found.computations["main"]["out"]) == [Frame("old.py", 7, "")]
    assert found.computations["body"]["t"].shapes == (Shape("s32", ()), Shape("f32", (4,), "{0}"))


@pytest.mark.parametrize(
    ("known", "trips"), [("", 5), (', backend_config={"known_trip_count":{"n":"6"},"known_init_step":{}}', 6)]
)
def test_a_loop_of_known_length(known: str, trips: int) -> None:
    found = module(known)
    loop = found.computations["main"]["loop"]
    assert found.trips("main", loop) == trips
    assert found.repeats("main", loop) and not found.runs_at_most_once(loop)
    reduced = [(x.name, [loop.trips for loop in loops]) for _, x, loops in found.executed() if x.collective]
    assert reduced == [("reduced", [trips])]
    assert list(found.controls()) == [("loop", str(trips), "")]


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("%start = s32[] constant(3)", "%start = s32[] bitcast(%c)"),
        ("%end = s32[] constant(8)", "%end = s32[] get-tuple-element(%p.1), index=1"),
        ("%next = s32[] add(%i, %one)", "%next = s32[] multiply(%i, %one)"),
        ("%one = s32[] constant(1)", "%one = s32[] constant(2)"),
        ("direction=LT", "direction=NE"),
    ],
)
def test_a_loop_of_unknown_length(line: str, instead: str) -> None:
    assert line in CPU
    found = Program(CPU.replace(line, instead).replace("WITH", ""))
    loop = found.computations["main"]["loop"]
    assert found.trips("main", loop) is None
    assert found.repeats("main", loop)


ONCE = """HloModule jit_g, entry_computation_layout={(pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)})->\
bf16[8,128]{1,0:T(8,128)(2,1)}}

%run (p: (pred[], bf16[8,128])) -> (pred[], bf16[8,128]) {
  %p = (pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %v = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%p), index=1
  %no = pred[]{:T(512)} constant(false)
  ROOT %t = (pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) tuple(%no, %v)
}

%due (p.1: (pred[], bf16[8,128])) -> pred[] {
  %p.1 = (pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) parameter(0)
  ROOT %flag = pred[]{:T(512)} get-tuple-element(%p.1), index=0
}

ENTRY %main (f: pred[], x: bf16[8,128]) -> bf16[8,128] {
  %f = pred[]{:T(512)} parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(1)
  %copy-start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  %copy-done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %init = (pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) tuple(%f, %copy-done)
  %loop = (pred[]{:T(512)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}) while(%init), condition=%due, body=%run
  ROOT %out = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""
"""A branch written as a loop of at most one iteration, for a TPU."""


def test_a_loop_that_is_a_branch() -> None:
    found = Program(ONCE)
    loop = found.computations["main"]["loop"]
    assert found.runs_at_most_once(loop) and not found.repeats("main", loop)
    assert found.trips("main", loop) is None
    assert list(found.controls()) == [("branch, as a loop of at most one iteration", "1", "")]
    assert (found.for_tpu, module().for_tpu) == (True, False)
    assert [shape.space for shape in found.computations["main"]["copy-start"].shapes] == [1, 0, 2]
    assert found.origin(found.computations["main"], "copy-done").name == "x"
    assert found.results[0].bytes == 2048


FUSED = """HloModule fused, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%all-reduce-scatter (p: f32[1024,8]) -> f32[128,8] {
  %p = f32[1024,8]{1,0} parameter(0)
  %ar = f32[1024,8]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
  %id = u32[] partition-id()
  %rows = u32[] constant(128)
  %start = u32[] multiply(%id, %rows)
  %zero = u32[] constant(0)
  ROOT %ds = f32[128,8]{1,0} dynamic-slice(%ar, %start, %zero), dynamic_slice_sizes={128,8}
}

ENTRY %main (x: f32[1024,8]) -> f32[128,8] {
  %x = f32[1024,8]{1,0} parameter(0), sharding={replicated}
  ROOT %f = f32[128,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501


def test_a_tpu_fuses_an_all_reduce_and_a_slice_into_a_reduce_scatter() -> None:
    (exchange,) = Program(FUSED).exchanges
    assert (exchange.kind, exchange.groups, exchange.times) == ("reduce-scatter", [tuple(range(8))], 1)
    assert exchange.sent() == 7 / 8 * 4 * 1024 * 8


def test_a_gpu_names_its_groups_in_any_form() -> None:
    assert groups("replica_groups={{0,2},{1,3}}, use_global_device_ids=true") == [(0, 2), (1, 3)]
    assert groups("replica_groups=[4,2]<=[8]") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups("replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}") == [(0, 1, 2, 3)]
    assert groups("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert groups("channel_id=1, to_apply=%add") == []


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ("['a'=8] {'a':(4)2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("['a'=8] {'a':(1)2}, dimensions={0}", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("['a'=4,'b'=2] {'b','a':(2)2}", [(0, 2, 1, 3), (4, 6, 5, 7)]),
        ("['a'=8] {'a':(4)2,'a':(1)2}", [(0, 4, 1, 5), (2, 6, 3, 7)]),
        ("['a'=8], device_ids=([4,2]T(1,0)) {'a':(2)2}", [(0, 4), (2, 6), (1, 5), (3, 7)]),
    ],
)
def test_a_group_along_a_part_of_an_axis(mesh: str, expected: list[tuple[int, ...]]) -> None:
    assert groups(f"replica_groups=mesh{mesh}") == expected


@pytest.mark.parametrize(
    "text",
    [
        "replica_groups=[1,9999999999]<=[9999999999]",
        "replica_groups=mesh['a'=9999999999] {'a'}",
        "replica_groups=mesh['a'=8] {'a:(1)2'}, dimensions={0}",
        *(f"replica_groups=mesh['a'=8] {{{x}}}" for x in ("'b'", "'a':(3)2", "'a':(0)2", "'a':(4)4", "'a','a':(1)2")),
    ],
)
def test_groups_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(GradCombineError, match="expected groups of"):
        groups(text)


@pytest.mark.parametrize("text", ["", "module @jit_f {", "HloModule x\n", CPU[: CPU.index("ROOT %all")]])
def test_what_is_no_whole_program_is_refused(text: str) -> None:
    with pytest.raises(GradCombineError, match="expected"):
        Program(text)


@pytest.fixture(scope="module")
def compiled() -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda x: jnp.sin(x) + 1).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()


def read(path: Path) -> str:
    (text,) = read_all([path])
    return text


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "module", "dump"])
def test_files(kind: str, compiled: Any, tmp_path: Path) -> None:
    """Complete files of all types give the same program; truncated ones raise."""
    proto = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    size, prefix = len(proto), b"\x0a"
    while size > 127:
        prefix, size = prefix + bytes([size & 127 | 128]), size >> 7
    content = {"text": compiled.as_text().encode(), "module": proto, "dump": prefix + bytes([size]) + proto}[kind]
    path = tmp_path / "x"
    path.write_bytes(content)
    assert [str(shape) for shape in Program(read(path)).results] == ["f32[4]"]
    # A proto cut at a field boundary is valid, so cut within the last field, which takes at least two bytes.
    for length in (0, 3, len(content) // 2, len(content) - (5 if kind == "text" else 1)):
        path.write_bytes(content[:length])
        with pytest.raises(GradCombineError, match="expected HLO that the installed jaxlib reads"):
            Program(read(path))


@pytest.mark.full
def test_a_file_that_ends_the_parser(compiled: Any, tmp_path: Path) -> None:
    """An invalid parameter number aborts the process that parses the file, which is a subprocess."""
    text = compiled.as_text()
    (path := tmp_path / "x").write_text(text.replace("parameter(0)", "parameter(9)"))
    for _ in range(2):
        with pytest.raises(GradCombineError, match=r"XLA's parser ended with status"):
            read(path)
    path.write_text(text)
    assert "sine" in read(path)
