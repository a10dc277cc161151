"""Each seeded defect is found under its name; its defect-free twin and the library's steps have no findings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine.audit import audit, audit_file
from gradcombine.audit.compiling import parameter_shardings
from gradcombine.audit.program import Program
from gradcombine.audit.rules import find
from gradcombine.audit.target import PUBLISHED, Target
from tests.verify.audit.seeded import CALLS, CASES, CLEARED, OURS, cleared, window_over_calls

pytestmark = pytest.mark.usefixtures("standard_promotion")

QUICK = {
    "reduced in a shard_map",
    "reduced at the end",
    "reduced beside a loss",
    "reduced in turn",
    "reduced and stacked",
    "reduced to maxima",
    "accumulated in bfloat16 over calls",
    "batch gathered",
    "decided by select",
    "decided, or cleared",
}


@pytest.mark.parametrize("defect", [True, False], ids=["defect", "clean"])
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in CASES])
def test_a_defect_is_found_and_its_twin_is_clean(name: str, defect: bool) -> None:
    make, expected = CASES[name]
    case = make(jax.devices(), defect)
    report = audit(case.step, *case.args)
    assert {x.name for x in report.findings} == (expected if defect else set()), report.findings


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("name", CLEARED)
def test_an_accumulator_that_is_cleared_is_no_optimizer(name: str, donated: bool) -> None:
    case = cleared(CLEARED[name], donated)
    assert audit(case.step, *case.args).findings == []


@pytest.mark.parametrize("name", CLEARED)
def test_a_narrow_accumulator_that_is_cleared_is_found(name: str) -> None:
    case = cleared(CLEARED[name], True)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim else x, case.args)
    assert {x.name for x in audit(case.step, *narrow).findings} == {"narrow-accumulator"}


@pytest.mark.parametrize(
    "tx", [optax.adam(0.1), optax.MultiSteps(optax.sgd(0.1), 4), optax.apply_if_finite(optax.sgd(0.1), 3)]
)
def test_narrow_parameters_are_no_accumulators(tx: Any) -> None:
    leaves = [jnp.ones((64, 64), jnp.bfloat16)] * 3

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    report = audit(jax.jit(step, donate_argnums=(0, 1)), leaves, tx.init(leaves), leaves)
    assert "narrow-accumulator" not in {x.name for x in report.findings}


@pytest.mark.parametrize("by_branch", [True, False], ids=["by a branch", "by selects"])
@pytest.mark.parametrize("name", CALLS)
def test_what_each_call_exchanges_may_wait_if_it_is_only_added_up(name: str, by_branch: bool) -> None:
    each, whole, waits = CALLS[name]
    case = window_over_calls(jax.devices(), each, whole, by_branch)
    found = {x.name for x in audit(case.step, *case.args).findings}
    assert ("reduced-in-loop" in found) is waits


@pytest.mark.parametrize(("axes", "metric"), [("a", True), (("a", "b"), False)], ids=["beside a metric", "over fewer"])
def test_a_second_mean_is_found_in_part_and_over_fewer_devices(axes: Any, metric: bool) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b"))

    def step(w: Any, x: Any) -> Any:
        grads = jax.lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), axes)
        return jax.lax.pmean((grads, x) if metric else grads, "a")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("a", "b"))), out_specs=P(), check_vma=False)
    (found,) = audit(jax.jit(mapped), jnp.zeros((64, 64)), jnp.zeros((512, 64))).findings
    assert (found.name, found.sent) == ("repeated-collective", 64 * 64 * 4)
    assert ("16.0 KiB of all-reduce of 32.0 KiB" in found.what) is metric


@pytest.mark.parametrize("chained", [True, False])
def test_gathers_in_a_loop_that_need_each_other_are_no_finding(chained: bool) -> None:
    """Although each of them also depends on all of the iteration before."""

    def layers(x: Any, _: Any) -> Any:
        out = x
        for n in range(20):
            out = out + jnp.tanh(jax.lax.all_gather(out if chained else n * x, "data").sum(0))
        return out, None

    mesh = Mesh(np.array(jax.devices()), ("data",))
    steps = jax.shard_map(
        lambda x: jax.lax.scan(layers, x, None, 3)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    found = audit(jax.jit(steps), jnp.ones((len(jax.devices()), 64))).findings
    assert [x.name for x in found] == ["many-small-collectives"] * (not chained)


@pytest.mark.slow
@pytest.mark.parametrize("name", OURS)
def test_our_own_steps_are_clean(name: str) -> None:
    case = OURS[name](jax.devices())
    assert audit(case.step, *case.args).findings == []


def test_hlo_that_does_not_tell_how_arguments_are_split(tmp_path: Path) -> None:
    """As written by the XLA of JAX 0.12; a compiled step still has the information."""
    case = CASES["batch gathered"][0](jax.devices(), True)
    compiled = case.step.lower(*case.args).compile()
    text = re.sub(r", sharding=\{.*?\}(?=,|$| )", "", compiled.as_text())
    (tmp_path / "step.txt").write_text(text)
    (report,) = audit_file(tmp_path / "step.txt")
    assert "how arguments are sharded, and hence which work devices repeat" in report.unread
    assert "repeated-work" not in {x.name for x in report.findings}
    assert "repeated-work" in {x.name for x in find(Program(text, shardings=parameter_shardings(compiled)), ())}


@pytest.mark.parametrize("name", ["batch gathered", "reduced in a shard_map"])
def test_protos_of_several_devices(name: str, tmp_path: Path) -> None:
    """As text; of a folder that XLA dumped, programs before the optimization are left out."""
    compiled = (case := CASES[name][0](jax.devices(), True)).step.lower(*case.args).compile()
    (tmp_path / "step.txt").write_text(compiled.as_text())
    (module,) = compiled.runtime_executable().hlo_modules()
    (tmp_path / "module_1.jit_step.cpu_after_optimizations.hlo.pb").write_bytes(module.as_serialized_hlo_module_proto())
    (tmp_path / "module_1.jit_step.before_optimizations.hlo.pb").write_bytes(b"not read")
    (tmp_path / "module_1.jit_step.cpu_after_optimizations-memory-usage-report.pb").write_bytes(b"not read")
    (text,), (proto,) = audit_file(tmp_path / "step.txt"), audit_file(tmp_path)
    assert proto.program.devices == text.program.devices == len(jax.devices())
    assert {x.name for x in proto.findings} == {x.name for x in text.findings} >= {"reduced-in-loop"}
    assert proto.undecided == text.undecided


@pytest.mark.parametrize("across", [True, False], ids=["across", "within"])
def test_exchanges_cross_the_hosts_of_a_meshs_devices(across: bool) -> None:
    """Two hosts of four devices; a program numbers its devices in the order of the mesh."""
    target = Target("two hosts", tuple(jax.devices()), 4, PUBLISHED["h100"])
    devices = np.array(target.devices).reshape(2, 4)
    mesh = Mesh(devices.T if across else devices, ("a", "b"))
    step = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "b"), mesh=mesh, in_specs=P("a", "b"), out_specs=P("a")))
    x = jax.ShapeDtypeStruct((8, 1000), np.float32, sharding=NamedSharding(mesh, P("a", "b")))
    bound = audit(step, x, target=target).bounds["exchange"]
    assert bound.seconds is not None and bound.seconds > 0
    assert ("to other hosts" in bound.arithmetic) is across
    assert ("to its host" in bound.arithmetic) is not across


@pytest.mark.parametrize("split", [P("data", "model"), P(("data", "model"))], ids=["features", "rows"])
def test_what_is_gathered_over_a_model_axis_repeats_no_work(split: P) -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    columns = NamedSharding(mesh, P(None, "model"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    step = jax.jit(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), out_shardings=columns)
    w = jax.ShapeDtypeStruct((512, 1024), jnp.float32, sharding=columns)
    x = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=NamedSharding(mesh, split))
    report = audit(step, w, x)
    assert "all-gather" in {exchange.kind for exchange in report.exchanges}
    assert report.findings == []


@pytest.mark.parametrize("split", [P(), P("data")], ids=["replicated", "sharded"])
def test_gathered_rows_of_a_step_without_products(split: P) -> None:
    """With a replicated table all devices look up all rows; rows of a sharded one are looked up where they are."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def step(table: jax.Array, words: jax.Array) -> jax.Array:
        def add(total: jax.Array, part: jax.Array) -> tuple[jax.Array, None]:
            return total + jax.grad(lambda table: jnp.mean(jnp.tanh(table[part])))(table), None

        return jax.lax.scan(add, jnp.zeros_like(table), words.reshape(4, -1, words.shape[1]))[0]

    sharding = NamedSharding(mesh, split)
    table = jax.ShapeDtypeStruct((1024, 128), jnp.float32, sharding=sharding)
    words = jax.ShapeDtypeStruct((1024, 128), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    report = audit(jax.jit(step, out_shardings=sharding), table, words)
    assert "all-gather" in {exchange.kind for exchange in report.exchanges}
    assert ("batch-gathered" in {x.name for x in report.findings}) is (split == P())
