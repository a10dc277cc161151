"""The flight recorder: what it writes in each type of step, and the comparison of two logs."""

from __future__ import annotations

import json
import re
import resource
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gradcombine as gc
from gradcombine import GradCombineError
from gradcombine.verify import FlightRecorder
from gradcombine.verify.diff.rules import Rule, Rules
from gradcombine.verify.record.flight import EVERY, read_log
from gradcombine.verify.record.flight_diff import LogReport, diff_logs
from tests.verify.diff.test_command import run

STEPS, REPLICAS = 4, 3
SHAPES = {"w": ((4, 3), "f4"), "b": ((3,), ml_dtypes.bfloat16), "count": ((), "i4"), "wide": ((2,), "f8")}


def state(step: int, replica: int) -> dict[str, Any]:
    """Gradients per replica, and replicated parameters."""
    own, shared = np.random.default_rng((step, replica)), np.random.default_rng(step)
    make = lambda rng: {name: (9 * rng.standard_normal(shape)).astype(dtype) for name, (shape, dtype) in SHAPES.items()}  # noqa: E731
    return {"gradients": make(own), "params": make(shared)}


STATES = {(step, replica): state(step, replica) for step in range(STEPS) for replica in range(REPLICAS)}
CLEAN = {key: gc.digest(value) for key, value in STATES.items()}
LIKE = state(0, 0)


def write(path: Path, rows: dict[tuple[int, int], Any], like: Any = LIKE, twins: Any = ("params",)) -> Path:
    with FlightRecorder(path, like, twins=twins) as recorder:
        for (step, replica), digests in rows.items():
            recorder(step, digests, replica)
    return path


def rows_of(path: Path) -> list[tuple[int, int]]:
    return [(step, replica) for step, replicas in read_log(path).rows.items() for replica in replicas]


def compared(a: Path, b: Path, *rules: Any) -> LogReport:
    return diff_logs(read_log(a), read_log(b), *rules)


@pytest.mark.full
def test_a_thousand_flipped_bits_are_found_and_located(tmp_path: Path) -> None:
    clean, rng = write(tmp_path / "a.log", CLEAN).read_bytes().splitlines(True), np.random.default_rng(0)
    paths = [f"{stage}/{name}" for stage in sorted(LIKE) for name in sorted(SHAPES)]
    found = 0
    for _ in range(1000):
        step, replica, path = int(rng.integers(STEPS)), int(rng.integers(REPLICAS)), str(rng.choice(paths))
        stage, name = path.split("/")
        array = np.atleast_1d(STATES[step, replica][stage][name]).copy()
        bit = int(rng.integers(8 * array.nbytes))
        array.view(np.uint8).reshape(-1)[bit // 8] ^= np.uint8(1 << bit % 8)
        flipped = CLEAN[step, replica].copy()
        flipped[paths.index(path)] = gc.digest(array)[0]
        (tmp_path / "row.log").unlink(missing_ok=True)
        row = write(tmp_path / "row.log", {(step, replica): flipped}).read_bytes().splitlines(True)[-1]
        lines = clean[:]
        lines[1 + REPLICAS * step + replica] = row
        (tmp_path / "b.log").write_bytes(b"".join(lines))
        report = compared(tmp_path / "a.log", tmp_path / "b.log")
        assert report.first is not None and report.parted == {step: 1} and not report.passes
        found += report.first[:3] == (step, replica, path)
        assert report.first.twins == (
            f"the other replicas of B agree with A, replica {replica} of B does not" if stage == "params" else ""
        )
    assert found == 1000


def test_equal_logs_pass_and_the_command_says_what_differs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.log", CLEAN), write(tmp_path / "b.log", CLEAN)
    assert compared(a, b) == LogReport(STEPS * REPLICAS * 8, None, {}, STEPS, ())
    code, output = run(a, b)
    assert (code, "All 96 digests of 4 steps are equal" in output) == (0, True), output
    changed = CLEAN[2, 1].copy()
    changed[3] += np.uint32(1)
    c = write(tmp_path / "c.log", CLEAN | {(2, 1): changed, (3, 0): changed})
    code, output = run(a, c, "--json", tmp_path / "out.json", "--html", tmp_path / "out.html")
    assert code == 1 and "step 2, replica 1, leaf gradients/wide" in " ".join(output.split())
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["passes"], content["first"]["step"], set(content["parted"])) == (False, 2, {"2", "3"})
    assert "gradients/wide" in (tmp_path / "out.html").read_text()


def test_the_first_leaf_is_one_of_the_earliest_stage(tmp_path: Path) -> None:
    like = {stage: np.zeros(2, np.float32) for stage in ("gradients", "inputs", "params", "updates")}
    clean = gc.digest(like)
    a, changed = write(tmp_path / "a.log", {(0, 0): clean}, like, ()), np.array(clean)
    for leaf in ("params", "updates", "gradients", "inputs"):
        changed[sorted(like).index(leaf)] += np.uint32(1)
        report = compared(a, write(tmp_path / f"{leaf}.log", {(0, 0): changed}, like, ()))
        assert report.first is not None and report.first.leaf == leaf


def test_the_odd_replica_is_named_where_all_should_agree(tmp_path: Path) -> None:
    odd = {key: row.copy() for key, row in CLEAN.items()}
    odd[1, 2][5] += np.uint32(7)  # of params/count
    a = write(tmp_path / "a.log", odd)
    report = compared(a, write(tmp_path / "b.log", odd))
    assert report.problems == tuple(
        f"in step 1 of {side}, replica 2 differs from the others in params/count" for side in "AB"
    )
    assert not report.passes and report.first is None


def test_what_was_not_compared_is_said_and_fails(tmp_path: Path) -> None:
    a = write(tmp_path / "a.log", CLEAN)
    fewer = {key: row for key, row in CLEAN.items() if key[0] != 2}
    assert compared(a, write(tmp_path / "steps.log", fewer)).problems == ("only A has steps 2",)
    fewer = {key: row for key, row in CLEAN.items() if key[1] != 1}
    assert compared(write(tmp_path / "replicas.log", fewer), a).problems == ("only B has replica 1, in 4 steps",)
    like = LIKE | {"params": {"w": LIKE["params"]["w"].astype("f2"), "new": np.zeros(2)}}
    rows = {key: gc.digest(like) for key in CLEAN}
    report = compared(a, write(tmp_path / "leaves.log", rows, like))
    assert report.problems == (
        "only A has the leaves params/b, params/count, params/wide",
        "only B has the leaves params/new",
        "params/w is float32 (4, 3) in A, float16 (4, 3) in B",
    )
    other = write(tmp_path / "other.log", {(7, 0): gc.digest({"x": np.ones(2)})}, {"x": np.ones(2)}, ())
    report = compared(a, other)
    assert report.compared == 0 and not report.passes and run(a, other)[0] == 1


@pytest.mark.parametrize(("cut", "lost"), [(1, 0), (2, 1), (30, 1), (200, 2)])
def test_a_log_that_is_cut_off_is_read_up_to_there(tmp_path: Path, cut: int, lost: int) -> None:
    a, b = write(tmp_path / "a.log", CLEAN), write(tmp_path / "b.log", CLEAN)
    b.write_bytes(b.read_bytes()[:-cut])
    kept, line = len(CLEAN) - lost, len(CLEAN) - lost + 2
    assert (rows_of(b), read_log(b).damaged) == (list(CLEAN)[:kept], (line,) if lost else ())
    report = compared(a, b)
    assert report.passes == (lost == 0) and report.first is None
    assert any(f"B is cut off or damaged in line {line}" in problem for problem in report.problems) == (lost > 0)
    # The run continues and every row is present again: the truncated line is still reported.
    write(b, dict(list(CLEAN.items())[kept:]))
    again = compared(a, b)
    assert again.compared == STEPS * REPLICAS * 8 and again.first is None and len(again.problems) == (lost > 0)


def test_a_step_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.log", CLEAN), write(tmp_path / "b.log", CLEAN)
    write(b, {(3, 0): CLEAN[3, 0]})
    assert compared(a, b).passes
    write(b, {(3, 0): CLEAN[2, 0]})
    assert (report := compared(a, b)).first is not None and (report.first.step, report.first.replica) == (3, 0)
    at_odds = "B has step 3 of replica 0 3 times, with different digests, of gradients/b first"
    assert at_odds in report.problems
    write(b, {(3, 0): CLEAN[3, 0]})
    assert (report := compared(a, b)).first is None and len(report.problems) == 1


def test_damage_and_other_files_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a.log", CLEAN)
    content = a.read_bytes()
    for name, damaged in {
        "header": content.replace(b'"version": 1', b'"version": 2', 1),
        "later": b'{"gradcombine": "digests", "version": 2} ',
        "half": content[:40],
        "other": b"hello\n",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(damaged)
        assert run(a, tmp_path / name)[0] == 2, name
    assert run(a, tmp_path / "missing.log")[0] == 2
    assert run(a, a, "--rtol", 1)[0] == 2
    # One digit has changed.
    at = content.rindex(b" ") - 5
    (tmp_path / "digit").write_bytes(
        content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :]
    )
    assert compared(a, tmp_path / "digit").problems != ()
    for expected, make in {
        "a log of the same leaves": lambda: FlightRecorder(a, {"x": np.ones(2)}),
        "a log of digests, received .*, which is not a log": lambda: FlightRecorder(tmp_path / "other", LIKE),
        "twins among": lambda: FlightRecorder(tmp_path / "new.log", LIKE, twins=["parms"]),
        "of shape": lambda: write(tmp_path / "new.log", {(0, 0): gc.digest(LIKE)[:2]}),
        "received object of shape": lambda: write(tmp_path / "new.log", {(0, 0): object()}),
        "a step of 0 or more": lambda: write(tmp_path / "new.log", {(-1, 0): gc.digest(LIKE)}),
    }.items():
        with pytest.raises(GradCombineError, match=expected):
            make()


def test_names_of_two_frameworks_and_rules(tmp_path: Path) -> None:
    x, y = np.float32([1, 2]), np.float32([[3]])
    a, b = (
        write(tmp_path / name, {(0, 0): gc.digest(like)}, like, ())
        for name, like in {
            "a.log": {"params": {"Dense_0": {"kernel": x}, "odd": y}},
            "b.log": {"model": {"dense.0": {"weight": x}}, "strange": y},
        }.items()
    )
    assert compared(a, b).compared == 1
    rules = Rules((Rule(re.compile("params/odd"), "strange", None),))
    assert (compared(a, b, rules).compared, compared(a, b, rules).passes) == (2, True)


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow")
def test_logs_of_every_kind_of_step_are_the_same(tmp_path: Path) -> None:
    """jit on one and four devices, shard_map, tf.function, MirroredStrategy, and callbacks."""
    import jax
    import tensorflow as tf
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    values = [{"w": np.random.default_rng(step).standard_normal((8, 2)).astype("f4")} for step in range(3)]
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("data"))
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())

    def one(recorder: Any) -> None:
        for step, value in enumerate(values):
            recorder(step, jax.jit(gc.digest)(value))

    def four(recorder: Any) -> None:
        for step, value in enumerate(values):
            recorder(step, jax.jit(gc.digest)(jax.device_put(value, split)))

    def manual(recorder: Any) -> None:
        block = jax.shard_map(lambda x: gc.digest(x)[None], mesh=mesh, in_specs=P(), out_specs=P("data"))
        for step, value in enumerate(values):
            recorder(step, jax.jit(block)(value))

    def called(recorder: Any) -> None:
        @jax.jit
        def step_of(step: Any, value: Any) -> Any:
            recorder(step, gc.digest(value))
            return step + 1

        for step, value in enumerate(values):
            step_of(step, value)

    def function(recorder: Any) -> None:
        compiled = tf.function(gc.digest)
        for step, value in enumerate(values):
            recorder(tf.constant(step), compiled({"w": tf.constant(value["w"])}))

    def called_tf(recorder: Any) -> None:
        @tf.function
        def step_of(step: Any, value: Any) -> None:
            recorder(step, gc.digest(value))

        for step, value in enumerate(values):
            step_of(tf.constant(step), {"w": tf.constant(value["w"])})

    def mirrored(recorder: Any) -> None:
        run_all = tf.function(lambda value: strategy.run(gc.digest, (value,)))
        for step, value in enumerate(values):
            recorder(step, run_all({"w": tf.constant(value["w"])}))

    expected = None
    for kind in (one, four, manual, called, function, called_tf, mirrored):
        with FlightRecorder(tmp_path / f"{kind.__name__}.log", values[0]) as recorder:
            kind(recorder)
        content = (tmp_path / f"{kind.__name__}.log").read_bytes()
        expected = expected or content
        assert content == expected, kind.__name__
    assert rows_of(tmp_path / "one.log") == [(step, EVERY) for step in range(3)]

    # Differing copies are recorded separately, and compared with a single row for all replicas.
    digest = jax.jit(gc.digest)(jax.device_put(values[0], NamedSharding(mesh, P())))
    copies = [np.asarray(shard.data) + np.uint32(shard.device.id == 2) for shard in digest.addressable_shards]
    placed = [jax.device_put(copy, device) for copy, device in zip(copies, mesh.devices, strict=True)]
    torn = jax.make_array_from_single_device_arrays((1, 2), NamedSharding(mesh, P()), placed)
    with FlightRecorder(tmp_path / "torn.log", values[0], twins=["w"]) as recorder:
        recorder(0, torn)
    report = compared(tmp_path / "one.log", tmp_path / "torn.log")
    assert report.first is not None and report.first.replica == 2 and "replica 2 differs" in report.problems[0]


@pytest.mark.needs("jax")
def test_a_traced_step_below_zero_is_told_at_the_end_and_not_written(tmp_path: Path) -> None:
    import jax

    value, path = {"w": np.ones(2, np.float32)}, tmp_path / "a.log"
    recorder = FlightRecorder(path, value)
    for step in (-1, 3):
        jax.jit(lambda step: recorder(step, gc.digest(value)))(np.int32(step))
    with pytest.raises(GradCombineError, match="FlightRecorder: expected a step of 0 or more, received -1"):
        recorder.close()
    assert rows_of(path) == [(3, EVERY)]


ONE = {"w": np.float32([1])}
P, Q = (np.asarray(gc.digest({"w": np.float32([x])})) for x in (1, 2))


def repeated(path: Path, *runs: Any) -> Path:
    """A log of one step, recorded by several runs."""
    for digests in runs:
        with FlightRecorder(path, ONE) as recorder:
            recorder(0, digests)
    return path


def test_a_row_of_all_replicas_and_rows_of_each_replace_one_another(tmp_path: Path) -> None:
    both, apart = np.stack([P, P]), np.stack([P, Q])
    first = repeated(tmp_path / "a", apart, both)
    assert compared(first, repeated(tmp_path / "b", apart)).first is not None
    report = compared(first, repeated(tmp_path / "c", both))
    assert report.first is None
    assert report.problems == ("A has step 0 of replica 1 2 times, with different digests, of w first",)
    assert not compared(repeated(tmp_path / "d", both, apart[::-1]), repeated(tmp_path / "e", apart[::-1])).passes


def test_a_buffer_may_be_overwritten_after_the_call(tmp_path: Path) -> None:
    buffer = P.copy()
    with FlightRecorder(tmp_path / "log", ONE) as recorder:
        for step, digests in enumerate((P, Q, P)):
            buffer[...] = digests
            recorder(step, buffer)
    log = read_log(tmp_path / "log")
    assert [log.at(step)[EVERY] for step in range(3)] == [[x.astype(">u4").tobytes().hex()] for x in (P, Q, P)]


@pytest.mark.parametrize("digests", [{"w": P}, {-1: P}, {}, [], np.zeros((0, 1, 2), np.uint32)], ids=str)
def test_digests_of_another_form_are_refused(tmp_path: Path, digests: Any) -> None:
    with FlightRecorder(tmp_path / "log", ONE, behind=0) as recorder:
        recorder(0, P)
        with pytest.raises(GradCombineError, match=r"^FlightRecorder: "):
            recorder(1, digests)
    assert rows_of(tmp_path / "log") == [(0, EVERY)]


def test_only_a_log_is_continued(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file of something else\n")
    with pytest.raises(GradCombineError, match=r"^FlightRecorder: expected a log of digests, received .*not a log$"):
        FlightRecorder(tmp_path / "log", ONE)


@pytest.mark.parametrize("replica", [-2, -1])
def test_a_traced_replica_below_zero_is_told_at_the_end_and_not_written(tmp_path: Path, replica: int) -> None:
    import jax

    recorder = FlightRecorder(tmp_path / "log", ONE)
    jax.jit(lambda i: recorder(1, gc.digest({"w": jax.numpy.ones(1)}), replica=i))(replica)
    with pytest.raises(GradCombineError, match=f"number of a replica, received {replica}"):
        recorder.close()
    assert rows_of(tmp_path / "log") == []


def test_a_step_beyond_64_bits_and_a_closed_recorder(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "log", ONE, behind=0)
    with pytest.raises(GradCombineError, match=r"below 2\*\*63"):
        recorder(np.uint64(2**64 - 1), P)
    recorder.close()
    recorder.close()
    with pytest.raises(GradCombineError, match="open, received a closed one"):
        recorder(0, P)


def test_a_write_that_is_cut_short_loses_no_other_step(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path / "log", ONE, behind=0)
    recorder(0, P)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log").stat().st_size + 7, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            recorder(1, P)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    recorder(2, P)
    recorder.close()
    assert rows_of(tmp_path / "log") == [(0, EVERY), (2, EVERY)]


@pytest.mark.parametrize("kept", [3, 24, 25, 40])
def test_a_recorder_killed_in_its_first_line_is_resumed(tmp_path: Path, kept: int) -> None:
    path = repeated(tmp_path / "log", P)
    path.write_bytes(path.read_bytes()[:kept])
    assert rows_of(repeated(path, Q)) == [(0, EVERY)]


def test_many_twins_are_matched(tmp_path: Path) -> None:
    like = {f"l{i}": np.float32([0]) for i in range(20_000)}
    names = [leaf.name for leaf in read_log(write(tmp_path / "a", {}, like, ())).leaves]
    lines = (tmp_path / "a").read_bytes().splitlines()
    header = json.dumps({**json.loads(lines[0][:-9]), "twins": names}).encode()
    (tmp_path / "b").write_bytes(b"%s %08x\n" % (header, zlib.crc32(header)))
    assert all(read_log(tmp_path / "b").twins)


def test_a_log_that_is_continued_without_twins_still_compares_them(tmp_path: Path) -> None:
    first, second = ({"w": np.float32([1, x])} for x in (2, 3))
    path = tmp_path / "log"
    with FlightRecorder(path, first, twins=["w"]) as recorder:
        recorder(0, [gc.digest(first), gc.digest(second)])
    with FlightRecorder(path, first) as recorder:
        recorder(1, gc.digest(first))
    assert not diff_logs(read_log(path), read_log(path)).passes
