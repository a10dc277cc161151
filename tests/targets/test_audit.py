"""Audits of seeded defects and of the library's steps for GPUs and TPUs that this machine does not have."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine import GradCombineError
from gradcombine.audit import OutOfMemoryError, audit, find_target
from tests.recorded_steps import recording, shapes
from tests.verify.audit.seeded import CASES, OURS

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]

MENDED = {
    "reduced by explicit axes": set[str](),
    "batch gathered": {"batch-gathered", "repeated-work"},
    "exchanged leaf by leaf": set[str](),
    "reshaped and constrained": set[str](),
    "reduced in turn": set[str](),
    "accumulated in bfloat16 over calls": {"narrow-accumulator", "copies-at-boundary"},
}
"""Exceptions by compiler: it may move sums before an exchange, combine collectives, and copy what a branch carries."""


LEFT_OUT = "reduced in a pmap", "read after the loop", "reduced at the end"
"""Not on GPUs: the branch of the last one is copied, with the defect and without."""

ON_TPU = (
    "reduced in nested scans",
    "reduced by explicit axes",
    "batch gathered",
    "optax.MultiSteps",
    "averaged twice",
    "until converged",
)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "h100:8") for name in CASES if name not in LEFT_OUT),
        *((name, "v5e:2x4") for name in ON_TPU),
    ],
)
def test_a_defect_is_found_and_its_twin_is_clean(name: str, target: str) -> None:
    make, expected = CASES[name]
    for defect, wanted in ((True, MENDED.get(name, expected)), (False, set[str]())):
        case = make(find_target(target).devices, defect)
        report = audit(case.step, *case.args, target=find_target(target))
        assert {x.name for x in report.findings} == wanted, report.findings
        assert all(report.seconds(x) is not None for x in report.findings if x.sent or x.flops or x.moved)


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x4"])
@pytest.mark.parametrize("name", OURS)
def test_our_own_steps_are_clean(name: str, target: str) -> None:
    case = OURS[name](find_target(target).devices)
    report = audit(case.step, *case.args, target=find_target(target))
    # On GPUs, XLA turns elementwise branches into selects.
    selected = {"optimizer-every-microbatch"} if (name, target) == ("accumulate", "h100:8") else set[str]()
    assert {x.name for x in report.findings} == selected, report.findings
    assert min(bound.seconds for bound in report.bounds.values() if bound.seconds is not None) >= 0


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x2"])
def test_a_step_that_does_not_fit(target: str) -> None:
    # An argument of 90 GB and its result.
    step = jax.jit(lambda x: x @ x)
    with pytest.raises(OutOfMemoryError, match=r"audit: expected .* on a device of|audit: expected a step that fits"):
        audit(step, jax.ShapeDtypeStruct((150_000, 150_000), jax.numpy.float32), target=target)


def test_several_processes_compile_for_tpus_at_once() -> None:
    code = "from gradcombine.audit import find_target; print(len(find_target('v5e:2x2').devices))"
    assert len(find_target("v5e:2x2").devices) == 4  # from now on, this process has loaded the compiler
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["4"]


ROWS = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.mark.parametrize(
    ("axes", "static"), [(True, 3), (True, "rows"), (False, 3)], ids=["mesh", "mesh and a word", "shard_map"]
)
def test_arguments_that_are_nowhere_go_where_the_step_runs(axes: bool, static: Any) -> None:
    """Arrays of this machine, specs and static arguments, with arguments on a mesh or a step that holds a mesh."""
    found = find_target("h100:8")
    mesh = Mesh(np.array(found.devices), ("data",))

    def step(x: Any, scale: Any, n: Any) -> Any:
        return x * scale * len(str(n))

    abstract = NamedSharding(AbstractMesh((8,), ("data",)), P("data"))
    rows = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype, sharding=abstract) if axes else ROWS
    split = jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    of = step if axes else lambda x, scale, n: split(x) * scale * n
    report = audit(jax.jit(of, static_argnums=2), rows, jnp.float32(2), static, target=found)
    assert report.program.devices == 8
    assert {x.kind for x in report.exchanges} == (set() if axes else {"all-reduce"})


def test_a_step_on_devices_of_this_machine_is_no_step_of_a_target() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    held = jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    for step in (held, held.lower(ROWS).compile()):
        with pytest.raises(GradCombineError, match=r"expected a step on devices of h100:8 \(.*\), received one on cpu"):
            audit(step, *([ROWS] if step is held else []), target=find_target("h100:8"))


AUDITED: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "jax_multi_process": (),
    "optax_chain": (),
    "port_tf_to_jax": ("tensorflow", "keras"),
    "port_torch_to_flax": ("torch", "flax"),
    "resume_across_frameworks": ("tensorflow",),
    "scan_text": (),
    "several_denominators": ("tensorflow",),
    "survive_faults": (),
    "migrate_jax": (),
}
"""Examples that compile a step in JAX, and the further packages that each imports."""


def test_all_examples_that_compile_a_step_in_jax_are_named() -> None:
    found = {
        path.stem for path in EXAMPLES.glob("*.py") if re.search(r"jax\.jit|jax import .*train_step", path.read_text())
    }
    assert found == set(AUDITED)


@pytest.mark.parametrize("target", ["h100:8", "v5e:4x4"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(*needs)) for name, needs in AUDITED.items()]
)
def test_what_an_example_compiles_is_clean(
    name: str, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spec: Any = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, example)
    spec.loader.exec_module(example)
    with recording(jax, "jit", shapes) as jitted:
        if name == "jax_multi_process":
            example.train(1, 0)
        elif name == "survive_faults":
            example.train(tmp_path, 1, 0, [0])
        elif name == "grpo":  # its replicas are a mesh of this machine's devices
            updated = example.updated
            monkeypatch.setattr(example, "updated", lambda batch, k, *_: updated(jax.device_get(batch), k))
            example.main()
        else:
            example.main()
    steps = [(x.function, x.args) for x in jitted if x.args is not None]
    if hasattr(example, "make_merge"):  # objects that hold a mesh are created for the target's mesh
        steps = [x for x in steps if x[0].__name__ != "merge"]
        steps.append(example.make_merge(find_target(target).devices))
    reports = [audit(function, *args, target=target) for function, args in steps]
    assert len(reports) > hasattr(example, "make_merge") * 2
    assert [finding for report in reports for finding in report.findings] == []


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("target", ["h100:1", "v5e:2x2"])
def test_a_step_that_tensorflow_gives_to_xla(target: str) -> None:
    """Compiles for one device of the target; variables become arguments that are updated in place."""
    import tensorflow as tf

    rows, width = 32, 128  # a TPU pads less
    w, x = tf.Variable(tf.zeros([width, width])), tf.zeros([rows, width])

    @tf.function(jit_compile=True)
    def step(x: Any, *, rate: float = 0.1) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        w.assign_sub(rate * tape.gradient(loss, w))

    @tf.function(jit_compile=True)
    def narrow(x: Any) -> Any:
        total = tf.zeros([width, width], tf.bfloat16)
        for _ in tf.range(4):
            total += tf.cast(tf.matmul(x, x, transpose_a=True), tf.bfloat16)
        return total

    found, defect = (audit(function, x, target=target) for function in (step, narrow))
    assert found.findings == [] and found.memory is not None and found.memory.aliased == 4 * width * width
    assert sum((found.flops or {}).values()) == 2 * 2 * rows * width * width
    (finding,) = defect.findings
    assert finding.name == "narrow-accumulator" and finding.source.startswith(f"{__file__}:")
