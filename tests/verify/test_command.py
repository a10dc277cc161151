"""The command line in a subprocess, as a user runs it."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import gradcombine
from gradcombine.verify.command import app
from gradcombine.verify.main import main

COUNTS = {1, 2, 4, 8}
ALONE = [
    ("jax", "eager"),
    ("jax", "jit"),
    ("tensorflow", "eager"),
    ("tensorflow", "tf.function"),
    ("tensorflow", "XLA"),
]
OVER_REPLICAS = [
    ("jax", "pmap"),
    ("jax", "shard_map"),
    ("jax", "shard_map, no vma"),
    ("tensorflow", "MirroredStrategy"),
]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gradcombine", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def _rows(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["section"] == section]


@pytest.mark.slow
@pytest.mark.needs("jax", "tensorflow")
def test_every_row_is_there_and_holds(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    page = tmp_path / "out.html"
    done = _run("verify", "--full", "--json", str(path), "--html", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = json.loads(path.read_text())
    assert report["failed"] == []
    assert f"All {len(report['rows'])} rows" in page.read_text()
    assert all(row["holds"] for row in report["rows"])

    replicas: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    orders: set[str] = set()
    for row in _rows(report, "combine"):
        labels = row["labels"]
        replicas[labels["framework"], labels["mode"], labels["place"]].add(labels["replicas"])
        assert row["equal"] or row["promise"] == "bound"
        orders.add(labels["order"])
    assert orders == {"sequential", "tree"}
    expected = {(*mode, place): {1} for mode in ALONE for place in ("list", "time")}
    expected |= {(*mode, place): COUNTS for mode in OVER_REPLICAS for place in ("replicas", "time x replicas")}
    expected |= {("numpy", "eager", place): {1} for place in ("list", "time", "replicas", "time x replicas")}
    expected |= {("jax", "scan", "time"): {1}}
    assert replicas == expected

    full = {tuple(row["labels"].values()): row for row in _rows(report, "full batch")}
    for framework in ("jax", "tensorflow"):
        assert full[framework, "weighted mean"]["share"] <= 1
        assert full[framework, "mean of means"]["relative"] > 1000 * full[framework, "weighted mean"]["relative"]
    answers = [tuple(row["labels"].values())[::2] for row in _rows(report, "defects")]
    assert answers == [("check", "mean of means"), ("check", "no defect"), ("audit", "optimizer-every-microbatch")]
    assert {row["labels"]["leaf"] for row in _rows(report, "kernels")} == {"b", "loss", "w"}
    assert report["curves"]["jax"] == pytest.approx(report["curves"]["tensorflow"], rel=1e-5)
    assert set(report["settings"]["versions"]) == {"gradcombine", "numpy", "jax", "tensorflow"}


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow")
def test_an_injected_fault_fails_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = _run("verify", "--inject-fault", "--replicas", "2", "--json", str(path))
    row = "combine: tensorflow / MirroredStrategy / time x replicas / 2 / tree"
    assert done.returncode == 1, done.stderr
    assert row in " ".join(done.stdout.split())
    combine, audit = json.loads(path.read_text())["failed"]
    assert combine == row
    assert audit.startswith("audit: ") and audit.endswith(" / accumulate: optimizer-every-microbatch")


def test_the_version() -> None:
    done = _run("--version")
    assert (done.returncode, done.stdout) == (0, f"gradcombine {gradcombine.__version__}\n")


def test_the_help_leads_to_a_verb_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are listed in the order in which users need them; paragraphs of help texts are reflowed."""
    monkeypatch.setenv("COLUMNS", "80")
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert max(map(len, text.splitlines())) <= 80
    verbs = [line.split()[1] for line in text.partition("Commands")[2].splitlines()[1:] if line[2:3].isalpha()]
    assert verbs == ["check", "diff", "explain", "audit", "plan", "verify"]
    for verb in verbs:
        _, found, rest = CliRunner().invoke(app, [verb, "--help"]).stdout.partition("Exit status")
        status, example, line = rest.partition("╭")[0].partition("Example: ")
        paragraph = f"{found}{status}".strip().splitlines()
        assert paragraph and all(len(line.strip()) > 60 for line in paragraph[:-1])
        assert example and line.startswith(f"gradcombine {verb} ")


@pytest.mark.parametrize(
    ("arguments", "absent", "extra"),
    [
        ("diff a.npz b.npz --html page.html", "matplotlib", "verify"),
        ("diff a.h5 b.h5", "h5py", "cli"),
        ("explain a.h5 b.h5 --result c.h5", "h5py", "cli"),
        ("audit module:step", "jax", "jax"),
        ("plan module:run", "optax", "optax"),
        ("verify", "optax", "verify"),
    ],
)
def test_a_missing_package_is_named_in_one_line_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, absent: str, extra: str
) -> None:
    (tmp_path / "a.h5").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, absent, None)
    done = CliRunner().invoke(app, arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.endswith(f"pip install 'gradcombine[{extra}]' installs, received no module {absent}\n")
    assert done.stderr.count("\n") == 1


def test_without_its_own_packages_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match="2"):
        main()
    expected = "gradcombine: expected what pip install 'gradcombine[cli]' installs, received no module typer\n"
    assert capsys.readouterr().err == expected


def test_importing_the_package_loads_no_framework() -> None:
    code = (
        "import sys, gradcombine.verify; print(*{'jax', 'tensorflow', 'rich', 'typer', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
