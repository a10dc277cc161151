"""Traces of eager, compiled and replicated steps, and the first divergence of two traces."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf

import gradcombine as gc
from gradcombine import GradCombineError
from gradcombine.verify import first_divergence, record
from gradcombine.verify.diff.comparing import Allowed
from gradcombine.verify.diff.dumps import open_dump
from gradcombine.verify.diff.rules import Rule, Rules
from gradcombine.verify.record.divergence import CAUSES
from gradcombine.verify.record.trace import STAGES

XS = np.arange(12, dtype=np.float32).reshape(4, 3)
X, Y = (np.full(2, i, np.float32) for i in range(2))


def arrays(path: Path, step: int) -> dict[str, np.ndarray]:
    return {name: entry.whole() for name, entry in open_dump(path / f"step_{step:08}.npz").items()}


def write_runs(path: Path, **runs: dict[int, dict[str, Any]]) -> None:
    """Records each run, given as stages by step, in a directory of its name."""
    for name, steps in runs.items():
        with record(path / name) as recorder:
            for step, stages in steps.items():
                recorder(step, **stages)


def in_numpy(recorder: Any) -> None:
    params = np.zeros(3, np.float32)
    for step, x in enumerate(XS):
        grads = {"w": x * x, "none": None}
        params = params - grads["w"]
        recorder(step, inputs={"x": x}, gradients=grads, params=[params])


def in_jit(recorder: Any) -> None:
    @jax.jit
    def train(step: Any, params: Any, x: Any) -> Any:
        grads = {"w": x * x, "none": None}
        params = params - grads["w"]
        recorder(step, inputs={"x": x}, gradients=grads, params=[params])
        return params

    params = jnp.zeros(3)
    for step, x in enumerate(XS):
        params = train(jnp.int32(step), params, x)


def in_scan(recorder: Any) -> None:
    def train(carry: Any, x: Any) -> Any:
        step, params = carry
        grads = {"w": x * x, "none": None}
        params = params - grads["w"]
        recorder(step, inputs={"x": x}, gradients=grads, params=[params])
        return (step + 1, params), None

    jax.jit(lambda xs: jax.lax.scan(train, (jnp.int32(0), jnp.zeros(3)), xs))(XS)


def in_function(recorder: Any) -> None:
    params = tf.Variable(tf.zeros(3))

    @tf.function
    def train(step: Any, x: Any) -> None:
        grads = {"w": x * x, "none": None}
        params.assign_sub(grads["w"])
        recorder(step, inputs={"x": x}, gradients=grads, params=[params])

    for step, x in enumerate(XS):
        train(tf.constant(step), tf.constant(x))


RUNS = {"numpy": in_numpy, "jit": in_jit, "scan": in_scan, "tf.function": in_function}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_step_is_written_as_it_was(run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every framework writes what NumPy writes."""
    for name, each in (("numpy", in_numpy), ("run", run)):
        with record(tmp_path / name) as recorder:
            each(recorder)
    assert not [x for x in caplog.messages if "AutoGraph" in x]
    assert first_divergence(tmp_path / "numpy", tmp_path / "run") is None
    assert len(list((tmp_path / "run").iterdir())) == 4
    total = np.zeros(3, np.float32)
    for step, x in enumerate(XS):
        total = total - x * x
        found = arrays(tmp_path / "run", step)
        assert set(found) == {"inputs/x", "gradients/w", "params/0"}
        np.testing.assert_array_equal(found["inputs/x"], x)
        np.testing.assert_array_equal(found["gradients/w"], x * x)
        np.testing.assert_array_equal(found["params/0"], total)


def test_chosen_steps_are_written_alone(tmp_path: Path) -> None:
    with record(tmp_path, steps=range(1, 4, 2)) as recorder:
        in_jit(recorder)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_00000001.npz", "step_00000003.npz"]


@pytest.mark.parametrize("steps", [7, "all", iter([0, 1]), [0, np.ones(2)]])
def test_steps_that_do_not_tell_what_is_among_them_are_refused(tmp_path: Path, steps: Any) -> None:
    """Either before the run or at the first lookup."""
    with pytest.raises(GradCombineError, match="record: expected steps such as range"):
        record(tmp_path, steps)(1, params=np.ones(2))


def test_a_traced_step_below_zero_is_told_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(GradCombineError, match="a step of 0 or more, received -1"), record(tmp_path) as recorder:
        jax.jit(lambda step: recorder(step, params=X))(jnp.int32(-1))
    assert not list(tmp_path.iterdir())


def test_a_step_may_go_on_after_later_ones(tmp_path: Path) -> None:
    """Callbacks of compiled programs may arrive in any order."""
    with record(tmp_path) as recorder:
        recorder(0, gradients={"w": jnp.ones(2, jnp.bfloat16)})
        for step in (1, 2, 3):
            recorder(step, params=X)
        recorder(0, params=Y)
    found = arrays(tmp_path, 0)
    assert set(found) == {"gradients/w", "params"} and found["gradients/w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["params"], Y)


@pytest.mark.parametrize("other", [np.zeros((1, 2), np.float32), np.zeros(2, np.int32)], ids=["shape", "dtype"])
def test_other_shapes_and_dtypes_of_the_same_bytes_are_other_values(other: Any, tmp_path: Path) -> None:
    recorder = record(tmp_path)
    for value in (np.zeros(2, np.float32), other):
        recorder(0, combined=value)
    with pytest.raises(GradCombineError, match="the same values in all calls"):
        recorder.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_closed_recorder_writes_nothing(compiled: bool, tmp_path: Path) -> None:
    recorder = record(tmp_path)

    def write(i: Any) -> None:
        recorder(i, params=X)

    write = jax.jit(write) if compiled else write

    def step(i: int) -> None:
        write(i)
        jax.effects_barrier()

    step(0)
    recorder.close()
    with pytest.raises(Exception, match="open, received a closed one"):
        step(1)
    assert [x.name for x in tmp_path.iterdir()] == ["step_00000000.npz"]


def test_replicas_must_agree(tmp_path: Path) -> None:
    """The combined gradient is equal on all replicas and written once; gradients per replica are rejected."""
    grads = np.arange(4, dtype=np.float32)

    def step(recorder: Any, combine: bool) -> None:
        def own(g: Any) -> Any:
            total = gc.all_reduce(gc.reductions.sum(), g, gc.jax_axis("data")) if combine else g
            recorder(0, combined=total)
            return total

        jax.pmap(own, axis_name="data", devices=jax.devices()[:4])(grads)

    with record(tmp_path / "same") as recorder:
        step(recorder, combine=True)
    assert arrays(tmp_path / "same", 0)["combined"] == 6
    with pytest.raises(GradCombineError, match="the same values in all calls"), record(tmp_path / "own") as recorder:
        step(recorder, combine=False)


def write(path: Path, changed: str | None = None, at: int = 2) -> Path:
    """A run in which one stage and all that depend on it are wrong from some step on."""
    with record(path) as recorder:
        for step in range(4):
            off = changed is not None and step >= at
            values = {
                stage: {"layer": {"w": np.float32([1, step, 3]), "b": np.float32(2).reshape(())}} for stage in STAGES
            }
            for stage in STAGES[STAGES.index(changed) :] if off and changed else ():
                values[stage]["layer"]["w"] = np.float32([1, step, 3.0001])
            recorder(step, **values)
    return path


GIVEN_BEFORE = {
    "inputs": "",
    "gradients": ", from the same inputs",
    "combined": ", from the same gradients",
    "updates": ", from the same combined gradient",
    "params": ", from the same updates",
}


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_stage_that_parts_is_named(stage: str, tmp_path: Path) -> None:
    found = first_divergence(write(tmp_path / "a"), write(tmp_path / "b", stage))
    assert found is not None and found.row is not None
    assert (found.step, found.stage) == (2, stage)
    assert found.introduced_by == CAUSES[stage] + GIVEN_BEFORE[stage]
    assert found.row.difference.name == f"{stage}/layer/w"
    assert found.unrecorded == ()
    assert f"step 2: introduced by {CAUSES[stage]}" in str(found)


def test_an_allowance_by_stage(tmp_path: Path) -> None:
    """Kernels of two frameworks round differently: gradients may differ, updates may not."""
    a, b = write(tmp_path / "a"), write(tmp_path / "b", "gradients")
    allowed = {"gradients": Allowed(relative=1e-3), "combined": Allowed(relative=1e-3)}
    found = first_divergence(a, b, allowed=allowed)
    assert found is not None and found.stage == "updates"
    assert first_divergence(a, b, allowed=Allowed(relative=1e-3)) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"allowed": {"gradient": Allowed(ulp=4)}}, "stages of inputs, gradients, combined, updates, params, received"),
        ({"allowed": {"gradients": 4}}, r"Allowed\(ulp, relative, absolute\), received 4"),
        ({"allowed": Allowed(ulp=-1)}, "an ulp of 0 or more, received -1"),
        ({"allowed": Allowed(relative=np.nan)}, "a relative difference of 0 or more, received nan"),
        ({"allowed": Allowed(absolute=-1)}, "an absolute difference of 0 or more, received -1"),
        ({"b": "missing"}, "a directory of dumps, received missing"),
        ({"rules": "rules.toml"}, "rules, as read_rules returns them, received 'rules.toml'"),
    ],
)
def test_settings_that_mean_nothing(options: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(gc.GradCombineError, match=f"first_divergence: expected {expected}"):
        first_divergence(**{"a": write(tmp_path / "a"), "b": tmp_path / "a"} | options)


A, B = {"w": X, "b": Y}, {"w": X}
KERNEL = np.random.default_rng(0).normal(size=(4, 4))
DIVERGENT: dict[str, tuple[dict[int, Any], dict[int, Any], int, str | None, str]] = {
    "no stage in common": ({0: {"gradients": A}}, {0: {"params": A}}, 0, "gradients", "gradients/b, gradients/w"),
    "a stage of one run": ({0: {"gradients": A, "params": B}}, {0: {"params": B}}, 0, "gradients", "gradients/b"),
    "a stage without a leaf": ({0: {"combined": A, "params": B}}, {0: {"combined": {"w": None}, "params": B}}, 0,
                               "combined", "combined/b, combined/w"),
    "a leaf of one run": ({0: {"params": A}}, {0: {"params": B}}, 0, "params", "in one run only: params/b"),
    "a step of one run": ({0: {"params": A}, 1: {"params": A}}, {0: {"params": A}}, 1, None, "only one of the runs"),
    "a step in the middle": ({i: {"params": A} for i in range(3)}, {0: {"params": A}, 2: {"params": A}}, 1, None, ""),
    "what differs comes first": (
        {0: {"updates": A, "params": B}, 2: {"params": {"w": X}}}, {0: {"params": B}, 2: {"params": {"w": Y}}}, 2,
        "params", "worst leaf params/w",
    ),
    "stages that no run has": (
        {0: {"inputs": X, "updates": X}}, {0: {"inputs": X, "updates": Y}}, 0,
        "updates", "by the gradients: .*, or by the combine: .*, or by the optimizer: .*, from the same inputs; .*"
        "not recorded before it: gradients, combined$",
    ),
    "another dtype": (
        {0: {"gradients": {"n": np.int32(1)}}}, {0: {"gradients": {"n": np.int64(1)}}}, 0,
        "gradients", "up to 0 ulp, 0.0e\\+00 relative, int.. against int..; not recorded before it: inputs$",
    ),
    "no common measure": (
        {0: {"gradients": {"n": np.int32(1), "w": X}}}, {0: {"gradients": {"n": np.float32(1), "w": X}}}, 0,
        "gradients", r"not compared: gradients/n \w+ against \w+: no common measure",
    ),
    "a transposed kernel": (
        {0: {"gradients": {"w": KERNEL}}}, {0: {"gradients": {"w": KERNEL.T}}}, 0,
        "gradients", r"with its axes in the order \(1, 0\), for which there is no rule",
    ),
    "a kernel that is no transposed weight": (
        {0: {"params": {"fc.weight": KERNEL}}}, {0: {"params": {"fc": {"kernel": KERNEL}}}}, 0,
        "params", r"its axes in the order \(0, 1\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVERGENT)
def test_a_divergence_says_what_differs_or_was_not_compared(name: str, tmp_path: Path) -> None:
    first, second, step, stage, words = DIVERGENT[name]
    write_runs(tmp_path, a=first, b=second)
    for a, b in ("ab", "ba"):
        found = first_divergence(tmp_path / a, tmp_path / b)
        assert found is not None and (found.step, found.stage) == (step, stage)
        assert re.search(words, str(found))


def test_a_stage_that_rules_leave_out_needs_no_counterpart(tmp_path: Path) -> None:
    runs = {"a": {"inputs": A, "params": B}, "b": {"params": B}, "c": {"inputs": {"w": Y}, "params": B}}
    write_runs(tmp_path, **{name: {0: stages} for name, stages in runs.items()})
    rules = Rules((Rule(re.compile("inputs/.*"), None, None),), (re.compile("inputs/.*"),))
    for a, b in ("ab", "ba", "ac"):
        assert first_divergence(tmp_path / a, tmp_path / b, rules=rules) is None


def test_transposed_kernels_agree_by_a_rule_or_by_their_names(tmp_path: Path) -> None:
    """A kernel stores the axes of a weight in reverse order."""
    values = {"a": {"w": KERNEL}, "b": {"w": KERNEL.T}, "c": {"fc.weight": KERNEL}, "d": {"fc": {"kernel": KERNEL.T}}}
    write_runs(tmp_path, **{name: {0: {"params": value}} for name, value in values.items()})
    rule = Rules((Rule(re.compile("params/w"), "params/w", (1, 0)),))
    assert first_divergence(tmp_path / "a", tmp_path / "b", rules=rule) is None
    assert first_divergence(tmp_path / "c", tmp_path / "d") is None


def test_a_step_without_a_gradient_writes_no_file(tmp_path: Path) -> None:
    with record(tmp_path) as recorder:
        recorder(0, gradients={"w": None})
        recorder(1, gradients={"w": np.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001.npz"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(GradCombineError, match="a directory without a trace"):
        record(tmp_path / "a")
    with pytest.raises(GradCombineError, match=r"stages of inputs, gradients, .*, received loss"):
        record(tmp_path / "c")(0, loss=np.ones(1))
    with pytest.raises(GradCombineError, match=r"stages of inputs, .*, received none"):
        record(tmp_path / "c")(0)
    with pytest.raises(GradCombineError, match="a common step"):
        first_divergence(tmp_path / "a", tmp_path / "c")
    with pytest.raises(GradCombineError, match="a directory of dumps"):
        first_divergence(tmp_path / "a", tmp_path / "nowhere")


@pytest.mark.parametrize("other", [{"w": np.ones(2)}, {"params/w": np.ones(2), "loss": np.ones(1)}, {}])
def test_leaves_outside_of_stages_are_refused_as_they_would_not_be_compared(other: Any, tmp_path: Path) -> None:
    write_runs(tmp_path, a={0: {"params": {"w": np.ones(2)}}})
    (tmp_path / "b").mkdir()
    np.savez(tmp_path / "b" / "step_0.npz", **other)
    for pair in (("a", "b"), ("b", "b")):
        with pytest.raises(GradCombineError, match="a trace: leaves whose names begin with inputs"):
            first_divergence(*(tmp_path / x for x in pair))


def test_numpy_arrays_beside_those_of_jax_keep_their_dtypes(tmp_path: Path) -> None:
    tokens = np.arange(3)
    with record(tmp_path) as recorder:
        recorder(0, inputs={"tokens": tokens}, gradients={"w": jnp.ones(2, jnp.float32)})
        jax.jit(lambda w: recorder(1, inputs={"tokens": tokens}, gradients={"w": w}))(jnp.ones(2, jnp.float32))
    for step in range(2):
        content = np.load(tmp_path / f"step_{step:08}.npz")
        assert content["inputs/tokens"].dtype == np.int64 and content["gradients/w"].dtype == np.float32
        np.testing.assert_array_equal(content["inputs/tokens"], tokens)
