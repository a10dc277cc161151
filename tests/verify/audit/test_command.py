"""The command `gradcombine audit`: inputs, errors and exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gradcombine.audit import OutOfMemoryError, audit, find_target
from gradcombine.audit import audit_report as report
from gradcombine.audit import auditing as step_module
from gradcombine.audit.auditing import audit_file, audit_named
from gradcombine.audit.rules import RULES
from gradcombine.audit.target import Published, Target
from gradcombine.errors import GradCombineError
from gradcombine.verify.command import app
from gradcombine.verify.plan import plan_named

STEPS = """
import jax, jax.numpy as jnp

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)

def clean():
    return jax.jit(lambda w, x: w + x, donate_argnums=0), (X, X)

def lost():
    step = jax.jit(lambda w, x: (w.astype(jnp.float32) + x), donate_argnums=0)
    return step, (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), X)

def until():
    def step(w):
        return jax.lax.while_loop(lambda w: jnp.sum(w) > 1, lambda w: w @ w, w)
    return jax.jit(step).lower(X)

def on(devices):
    return jax.jit(lambda x: x * len(devices)), (X,)

def traced():
    step, arguments = clean()
    return step.trace(*arguments)

def number():
    return 3

def unjitted():
    return (lambda x: x), (X,)

def shapes():
    return jax.jit(lambda a, b: a @ b), (X, jax.ShapeDtypeStruct((3, 3), jnp.float32))

def fails():
    raise RuntimeError("no data")

def leaves():
    raise SystemExit(0)

def leaves_while_traced():
    def step(x):
        raise SystemExit(0)
    return jax.jit(step), (X,)

def option(*, layers=1):
    return jax.jit(lambda x: x * layers), (X,)

def default(layers=1):
    return jax.jit(lambda x: x * layers), (X,)

def static():
    return jax.jit(lambda x, n, name: x * n, static_argnums=(1, 2)), (X, 3, "sum")

def scalars():
    return jax.jit(lambda x, n: x * n), (X, 3)

def required(*, layers):
    return default(layers)

def several(devices, layers):
    return default(layers)

def yields():
    yield default()

def flat():
    return jax.jit(lambda x: x), X

def triple():
    return jax.jit(lambda x: x), (X,), {}

def words():
    return jax.jit(lambda x: x), ("rows",)

def few():
    return jax.jit(lambda x: x), ()

jitted = jax.jit(lambda x: x)

NOTHING = None
"""


GRAPHS = """
import tensorflow as tf

X = tf.TensorSpec([8, 8])

def clean():
    return tf.function(lambda x: x + 1), (X,)

def until():
    def step(x):
        for _ in tf.range(tf.cast(x[0, 0], tf.int32)):
            x = x @ x @ x @ x @ x @ x
        return x
    return tf.function(step).get_concrete_function(X)

def traced():
    return tf.function(lambda x: x).get_concrete_function(X), (X,)

def fails():
    return tf.function(lambda x: x @ tf.zeros([3, 3])), (X,)

step = tf.function(lambda: tf.print("it runs"))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes the working directory to a folder with a module of steps."""
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "graphs.py").write_text(GRAPHS)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "old.json").write_text('{"version": 0}')
    program = '{"name": "jit_f", "target": "this machine", "findings": []}'
    (tmp_path / "part.json").write_text(f'{{"version": 1, "programs": [{program}]}}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("steps", "graphs", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    sys.modules.pop("steps", None)


def run(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["audit", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("steps:clean",), 0),
        (("steps:on",), 0),
        (("steps:traced",), 0),
        (("steps:option",), 0),
        (("steps:default",), 0),
        (("steps:static",), 0),
        (("steps:scalars",), 0),
        (("steps:lost",), 1),
        (("steps:until",), 1),
        (("steps:until", "--fail-on", "donation-lost,narrow-accumulator"), 0),
        (("steps:until", "--fail-on", "unknown-trip-count"), 1),
    ],
)
def test_exit_statuses(here: Path, arguments: tuple[str, ...], status: int) -> None:
    done = run(*arguments)
    assert done.exit_code == status, done.output
    assert max(map(len, done.output.splitlines())) <= 80
    last = done.output.splitlines()[-1]
    assert ("clean" in last) is (status == 0 and len(arguments) == 1)
    # A compiled program is read completely.
    assert "cannot tell" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("steps:number",), "a jitted function and a tuple of arguments"),
        (
            ("steps:unjitted",),
            "wrap any other in jax.jit or tf.function; for a Keras model, pass tf.function(model.train_step)",
        ),
        (("steps:jitted",), "that returns what to audit"),
        (("steps:required",), "argument: 'layers'"),
        (("steps:several",), "argument: 'layers'"),
        (("builtins:int",), "no signature found"),
        (("builtins:print",), "received None"),
        (("steps:yields",), "generator object"),
        (("steps:flat",), "received (PjitFunction, ShapeDtypeStruct)"),
        (("steps:triple",), "received (PjitFunction, tuple, dict)"),
        (("steps:words",), "a step that compiles for this machine"),
        (("steps:few",), "a step that compiles for this machine"),
        (("steps:leaves_while_traced",), "SystemExit"),
        (("steps:shapes",), "a step that compiles for this machine"),
        (("steps:fails",), "RuntimeError: no data"),
        (("steps:leaves",), "SystemExit"),
        (("steps:NOTHING",), "a callable NOTHING in steps"),
        (("broken:step",), "No module named 'nothing_of_this_name'"),
        (("nowhere",), "module:callable, or a file or a folder that exists"),
        (("steps:clean", "--target", "h1000:8"), "a target: h100:8"),
        (("steps:clean", "--target", "h100:0"), "a target: h100:8"),
        (("steps:clean", "--target", "v5e:4"), "a slice such as v5e:4x4"),
        (("steps:clean", "--fail-on", "slow"), "names of findings: reduced-in-loop"),
        (("steps:clean", "--json", "no/such/folder.json"), "a path in an existing folder"),
        (("steps:clean", "--json", "."), "a path in an existing folder"),
        (("steps:clean", "--json", "a", "--html", "./a"), "different files for --json and --html"),
        (("steps:clean", "--html", "no/such/page.html"), "a path in an existing folder for --html"),
        (("steps:clean", "--baseline", "steps.py"), "a baseline written by --json"),
        (("steps:clean", "--baseline", "missing.json"), "missing.json"),
        (("steps:fails", "--baseline", "list.json"), "list.json: TypeError"),
        (("steps:fails", "--baseline", "part.json"), "KeyError: 'moved'"),
        (("steps:fails", "--baseline", "old.json"), "a baseline of version 1, received 0"),
        (("steps:clean", "--target", "steps.py:0x8"), "a target: h100:8"),
        (("steps:clean", "--target", "binary:8"), "a GpuTargetConfigProto in text form"),
        (("steps:clean", "--target", "steps.py:8"), "a GpuTargetConfigProto with memory_bandwidth"),
        (("binary",), "HLO that the installed jaxlib reads"),
        (("steps.py",), "HLO that the installed jaxlib reads"),
        ((".",), "a folder with files *after_optimizations.txt"),
    ],
)
def test_bad_input_is_an_error_of_one_line(here: Path, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert words in done.stderr and "Traceback" not in done.output
    assert "clean" not in done.stdout


@pytest.mark.parametrize("what", [None, 3, b"steps:clean", "a" * 5000, "\0"])
def test_what_is_no_name_is_refused(what: Any) -> None:
    for call in (audit_named, plan_named):
        with pytest.raises(GradCombineError, match="expected module:callable"):
            call(what)


def test_a_target_that_is_no_name_of_a_file() -> None:
    with pytest.raises(GradCombineError, match=r"expected a target: h100:8.*: File name too long"):
        find_target("a" * 300 + ":8")


@pytest.mark.parametrize("target", ["h100:8", "v5e:2x2"])
def test_a_compiler_that_is_not_here_is_named_with_its_command(
    here: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GradCombineError, match=r"in a separate environment: pip install .*jax.*==\d"):
        find_target(target)


@pytest.mark.full
def test_a_baseline(here: Path) -> None:
    """Known findings pass; new or more expensive ones fail; different programs cannot be compared."""
    assert run("steps:until", "--json", "before.json").exit_code == 1
    done = run("steps:until", "--baseline", "before.json", "--html", "page.html")
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "no worse than before")
    assert '<p class="verdict good">no worse than before; jit_step: 1 finding' in (here / "page.html").read_text()
    before: Any = json.loads((here / "before.json").read_text())
    (program,) = before["programs"]
    assert [x["name"] for x in program["findings"]] == ["unknown-trip-count"]
    for change, words in (
        ({"findings": []}, "unknown-trip-count, 0 findings"),
        ({"flops": program["flops"] - 1}, "flops 524,287 -> 524,288"),
        ({"temporary": -1}, "temporary -1 -> "),
    ):
        (here / "less.json").write_text(json.dumps(before | {"programs": [program | change]}))
        done = run("steps:until", "--baseline", "less.json")
        assert done.exit_code == 1 and words in done.output, done.output
    # The report is written even if it cannot be compared.
    done = run("steps:clean", "--baseline", "before.json", "--json", "now.json")
    assert done.exit_code == 2 and "a baseline of jit__lambda" in done.stderr
    assert json.loads((here / "now.json").read_text())["programs"][0]["name"] == "jit__lambda"


@pytest.mark.full
def test_programs_of_one_name_are_compared_each_with_its_own(here: Path) -> None:
    """E.g. in a folder: a small program does not hide a larger one of the same name."""
    import jax
    import jax.numpy as jnp

    for i, n in enumerate((64, 128)):
        text = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((n, n), jnp.float32)).compile().as_text()
        (here / f"module_{i}.cpu_after_optimizations.txt").write_text(text or "")
    # HLO alone does not show which arguments are donated.
    assert run(".", "--json", "before.json").exit_code == 2
    assert run(".", "--fail-on", "narrow-accumulator").exit_code == 0
    assert run(".", "--baseline", "before.json").exit_code == 0
    (here / "module_0.cpu_after_optimizations.txt").write_text(
        (here / "module_1.cpu_after_optimizations.txt").read_text()
    )
    done = run(".", "--baseline", "before.json")
    assert done.exit_code == 1 and f"flops {2 * 64**3:,} -> {2 * 128**3:,}" in done.output


@pytest.mark.needs("tensorflow")
def test_a_defect_that_is_no_longer_decided_is_worse(here: Path) -> None:
    assert run("graphs:clean", "--json", "before.json").exit_code == 2
    before = json.loads((here / "before.json").read_text())
    (program,) = before["programs"]
    (here / "less.json").write_text(json.dumps(before | {"programs": [program | {"undecided": ["repeated-work"]}]}))
    done = run("graphs:clean", "--baseline", "less.json")
    words = "no longer decided: batch-gathered, copies-at-boundary, donation-lost"
    assert done.exit_code == 1 and words in " ".join(done.output.split())
    assert run("graphs:clean", "--baseline", "less.json", "--fail-on", "repeated-work").exit_code == 0


@pytest.mark.full
def test_files_of_other_tools(here: Path) -> None:
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda w: jax.lax.while_loop(lambda w: jnp.sum(w) > 1, lambda w: w @ w, w))
    lowered = step.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    text = lowered.compile().as_text()
    assert text is not None
    for i in range(2):
        (here / f"module_{i}.jit_f.cpu_after_optimizations.txt").write_text(text)
    (here / "module_0.jit_f.cpu_after_optimizations-buffer-assignment.txt").write_text("no HLO")
    assert run(str(here), "--target", "h100:8").exit_code == 1
    (one,) = audit_file(here / "module_1.jit_f.cpu_after_optimizations.txt", "h100:8")
    # The operations outside the loop and one iteration of it.
    product, values = 2 * 64**3, 4 * 64**2
    assert one.flops == {32: product}
    assert [x.name for x in one.findings] == ["unknown-trip-count"]
    assert one.turns >= 3 * values and one.memory is None
    assert one.bounds["compute"].seconds == product / 494.7e12
    assert one.bounds["exchange"].seconds == 0
    before = lowered.compiler_ir("hlo").as_hlo_text()
    (here / "before.txt").write_text(before)
    done = run("before.txt")
    assert done.exit_code == 2 and "optimized HLO" in done.stderr
    (here / "module_1.jit_f.cpu_after_optimizations.txt").write_text(text[:-40])
    assert run(str(here)).exit_code == 2


def test_a_step_that_does_not_fit(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import jax.numpy as jnp

    small = Target("a small card", tuple(jax.devices()[:1]), 1, Published({}, 1e12, 10_000))
    with pytest.raises(OutOfMemoryError, match=r"at most 10,000 bytes .* received 32,768, 22,768 too many"):
        audit(jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((64, 64), jnp.float32), target=small)
    monkeypatch.setattr(step_module, "find_target", lambda name: small)
    assert run("steps:clean").exit_code == 3


def test_names_of_findings() -> None:
    assert report.names(None) == set(RULES)
    assert report.names(" donation-lost , ") == {"donation-lost"}


def test_every_finding_has_a_section_of_the_documentation() -> None:
    assert list(report.explanations()) == list(RULES)
    text = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
    assert sorted(re.findall(r"findings\.md#([\w-]+)", text)) == sorted(RULES)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("clean", 2, "nothing found; 7 of 11 defects looked for; cannot tell of batch-gathered, repeated-work"),
        ("until", 1, "unknown-trip-count"),
        ("traced", 2, "a ConcreteFunction without arguments"),
        ("fails", 2, "for its arguments, received <lambda>: ValueError: in user code"),
        ("step", 2, "a callable step in graphs"),
    ],
)
def test_the_command_of_a_graph(here: Path, name: str, status: int, words: str) -> None:
    done = run(f"graphs:{name}", "--json", "found.json")
    assert done.exit_code == status, done.output
    assert words in " ".join(done.output.split()) and "it runs" not in done.output
    if name in ("clean", "until"):
        (one,) = json.loads((here / "found.json").read_text())["programs"]
        assert (one["moved"], one["flops"], one["temporary"]) == (None, None, None)
        assert len(one["looked_for"]) == 7 and len(one["undecided"]) == 4 and one["unread"]
        # Only the defects that were looked for can fail.
        judged = run(f"graphs:{name}", "--fail-on", ",".join(one["looked_for"]))
        assert judged.exit_code == (name == "until"), judged.output
        # The name does not depend on how often the function was traced.
        again = run(f"graphs:{name}", "--baseline", "found.json")
        assert again.exit_code == 0, again.output
