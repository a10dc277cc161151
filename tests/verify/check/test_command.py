"""`gradcombine check` and the pytest fixtures on a user's module."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradcombine.verify import Cause
from gradcombine.verify.check.step_report import REMEDIES
from gradcombine.verify.command import app

pytest_plugins = ["pytester"]

STEPS = """
import time
import numpy as np

rng = np.random.default_rng(0)
PARAMS = {"w": np.ones(3, np.float32)}
BATCH = {"x": rng.normal(size=(8, 3)).astype(np.float32), "mask": (np.arange(8) % 3 > 0).astype(np.float32)}

def sums(p, x, mask):
    return ((x @ p["w"])[:, None] * x * mask[:, None]).sum(0), mask.sum()

def parts(batch, k):
    return zip(np.array_split(batch["x"], k), np.array_split(batch["mask"], k))

def right(k):
    def step(p, batch):
        found = [sums(p, x, m) for x, m in parts(batch, k)]
        return {"w": sum(g for g, _ in found) / sum(n for _, n in found)}
    return step

def wrong(k):
    def step(p, batch):
        return {"w": sum(g / n for g, n in (sums(p, x, m) for x, m in parts(batch, k))) / np.float32(k)}
    return step

def pinned(k):
    def step(p, batch):
        return right(k)({"w": np.asarray(p["w"], np.float32)}, batch)
    return step

def centred(k):
    def step(p, batch):
        return {"w": sum(((x - x.mean(0)) * (x @ p["w"])[:, None]).mean(0) for x, m in parts(batch, k)) / np.float32(k)}
    return step

def each_term(p, batch):
    gradient, count = sums(p, batch["x"], batch["mask"])
    return {"loss": ({"w": gradient}, count)}

def slow(k):
    def step(p, batch):
        time.sleep(0.05)
        return right(1)(p, batch)
    return step

random = np.random.default_rng()
calls, before = [], []

def unseeded(k):
    return lambda p, batch: {"w": right(k)(p, batch)["w"] * random.normal(size=3).astype(np.float32)}

def counting(k):
    def step(p, batch):
        calls.append(k)
        return {"w": right(k)(p, batch)["w"] * np.float32(len(calls))}
    return step

def of_the_last_batch(k):
    def step(p, batch):
        now = batch["x"][:1].sum()
        before.append(now)
        return {"w": right(k)(p, batch)["w"] + before[-2 if len(before) > 1 else -1]}
    return step

def unseeded_case(): return unseeded, PARAMS, BATCH
def counting_case(): return counting, PARAMS, BATCH
def of_the_last_batch_case(): return of_the_last_batch, PARAMS, BATCH
def right_case(): return right, PARAMS, BATCH
def wrong_case(): return {"make_step": wrong, "params": PARAMS, "batch": BATCH, "microbatches": (4,)}
def pinned_case(): return pinned, PARAMS, BATCH
def centred_case(): return centred, PARAMS, BATCH
def slow_case(): return slow, PARAMS, BATCH
def stuck_case():
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass
def two(): return right, PARAMS
def misspelt(): return {"make_step": right, "params": PARAMS, "batch": BATCH, "microbatch": 2}
def raising(*arguments): raise KeyError("no data")
def raising_reference_case(): return {"make_step": right, "params": PARAMS, "batch": BATCH, "reference": raising}
def raising_pad_case(): return {"make_step": right, "params": PARAMS, "batch": BATCH, "pad": raising}
def leaving(*arguments): raise SystemExit(0)
def leaving_case(): return leaving, PARAMS, BATCH
def leaving_step_case(): return (lambda k: leaving), PARAMS, BATCH
def leaving_reference_case(): return {"make_step": right, "params": PARAMS, "batch": BATCH, "reference": leaving}
def uneven(): return right, PARAMS, {"x": BATCH["x"], "mask": BATCH["mask"][:3]}
"""


CENTRED = "affect each other, by design or not"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "steps_to_check.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def run(name: str, *options: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["check", f"steps_to_check:{name}", *map(str, options)], env={"COLUMNS": "160"})
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_step_that_is_right(here: Path) -> None:
    code, output = run("right_case", "--microbatches", "2,3")
    assert code == 0 and "the same: 2 microbatches and 3 microbatches give the result of one batch" in output


def test_a_mean_of_means_is_named_with_what_to_write(here: Path) -> None:
    code, output = run("wrong_case", "--json", "a.json", "--html", "a.html")
    assert code == 1 and "not the same: 4 microbatches: mean of means" in output
    assert "steps_to_check.py:" in output  # the line where the step is defined
    content = json.loads((here / "a.json").read_text())
    assert content["verdict"] == "fails" and content["causes"][0]["cause"] == "MEAN_OF_MEANS"
    assert content["causes"][0]["instead"] == REMEDIES[Cause.MEAN_OF_MEANS]
    assert content["divisions"][1]["shares"].keys() == {"['w']"}
    page = (here / "a.html").read_text()
    assert "mean of means" in page and "Heat map of the distance of each leaf" in page


@pytest.mark.full
def test_a_cause_that_is_known_already_does_not_fail_again(here: Path) -> None:
    run("wrong_case", "--json", "before.json")
    assert run("wrong_case", "--baseline", "before.json")[0] == 0
    code, output = run("wrong_case", "--baseline", "before.json", "--microbatches", "2,4")
    assert code == 1 and "new causes:" in output


@pytest.mark.full
def test_what_is_by_design_is_allowed_by_name(here: Path) -> None:
    status, text = run("centred_case")
    assert (status, CENTRED in text, "of one batch's norm away" in text) == (1, True, True), text
    status, text = run("centred_case", "--allow", "statistics", "--json", here / "found.json")
    assert (status, "the same: 2 microbatches and 4 microbatches" in text, "allowed:" in text) == (0, True, True), text
    found = json.loads((here / "found.json").read_text())
    assert (found["verdict"], found["causes"], found["allowed"][0]["cause"]) == ("passes", [], "STATISTICS")
    assert run("wrong_case", "--allow", "statistics")[0] == 1
    status, text = run("wrong_case", "--allow", "sum")
    assert (status, "causes among statistics, state to allow, received 'sum'" in text) == (2, True), text


def test_terms_are_named_on_the_command_line(here: Path) -> None:
    status, text = run("wrong_case", "--terms", "steps_to_check:each_term")
    assert (status, "has the wrong denominator" in text) == (1, True), text
    assert run("wrong_case", "--terms", "steps_to_check:no_term")[0] == 2


def test_what_cannot_be_compared_does_not_pass(here: Path) -> None:
    code, output = run("pinned_case", "--html", "a.html")
    assert code == 2 and "cannot tell" in output
    assert '<p class="verdict unknown">cannot tell' in (here / "a.html").read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none_of_this_name", (), "a callable none_of_this_name in steps_to_check"),
        ("two", (), r"to return \(make_step, params, batch\)"),
        ("misspelt", (), "also microbatch"),
        ("raising", (), "KeyError"),
        ("raising_reference_case", (), r"reference\(params, batch\) -> tree, received KeyError"),
        ("raising_pad_case", (), r"pad\(batch, rows\) -> batch, received KeyError"),
        ("right_case", ("--terms", "steps_to_check:raising"), "terms.* -> .*, received KeyError"),
        *((f"leaving{part}", (), "SystemExit: 0") for part in ("", "_case", "_step_case", "_reference_case")),
        ("right_case", ("--terms", "steps_to_check:leaving"), "SystemExit: 0"),
        ("uneven", (), "3 examples along the first axis"),
        ("right_case", ("--microbatches", "9"), "at least as many examples as parts"),
        ("right_case", ("--microbatches", "two"), "--microbatches as whole numbers"),
        ("right_case", ("--returns", "updates"), "returns to be 'gradients' or 'params'"),
        ("right_case", ("--baseline", "none.json"), "a baseline written by --json"),
        ("right_case", ("--json", "no/such/file.json"), "a path in an existing folder for --json"),
        ("unseeded_case", (), "seed random numbers in each call.*received .?different results for one batch"),
        ("counting_case", (), "pass state in as an argument.*received .?different results for one batch"),
        ("of_the_last_batch_case", (), "received .?different results for one batch"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(here: Path, name: str, options: tuple[str, ...], message: str) -> None:
    code, output = run(name, *options)
    assert code == 2 and re.search(message, output.replace("\n", " ")), output
    assert len(output.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["slow_case", "stuck_case"])
def test_a_check_that_takes_too_long_ends_with_one_line(here: Path, name: str) -> None:
    """Also if the step catches all exceptions, as an interrupted compiler or import may."""
    command = [sys.executable, "-m", "gradcombine", "check", f"steps_to_check:{name}", "--timeout", "0.2"]
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{here}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    expected = "check: expected a check that takes less than 0.2 s, received one that takes longer"
    assert done.stderr.replace("\n", " ").strip() == expected


@pytest.mark.full
@pytest.mark.needs("jax")
def test_the_page_shows_what_the_command_prints(here: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "check.md").read_text()
    (listing, *_), (console,) = (re.findall(rf"```{kind}\n(.*?)```", page, re.S) for kind in ("python", "console"))
    (here / "page5.py").write_text(listing)
    command, _, expected = console.partition("\n\n")
    assert command == "$ gradcombine check steps:make_case"
    done = CliRunner().invoke(app, ["check", "page5:make_case"], env={"COLUMNS": "89"})
    assert done.exit_code == 1
    printed = words(done.output.replace("page5.py", "steps.py"))
    assert printed[: len(words(expected))] == words(expected)


def words(text: str) -> list[list[str]]:
    """The words of each line, without empty lines and rules."""
    return [line.split() for line in text.splitlines() if line.strip(" \u2500")]


@pytest.mark.full
def test_the_fixtures_read_like_the_command(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makepyfile(steps_to_check=STEPS)
    pytester.makepyfile("""
        import pytest
        from steps_to_check import BATCH, PARAMS, counting, right, unseeded, wrong

        def test_right(check_step):
            assert check_step(right, PARAMS, BATCH).passes

        def test_wrong(check_step):
            check_step(wrong, PARAMS, BATCH, microbatches=(4,))

        @pytest.mark.parametrize("make_step", [unseeded, counting])
        def test_not_repeatable(check_step, make_step):
            check_step(make_step, PARAMS, BATCH)
    """)
    done = pytester.runpytest_subprocess("-p", "no:gradcombine", "-p", "gradcombine.pytest_plugin", "-p", "no:xdist")
    done.assert_outcomes(passed=1, failed=3)
    done.stdout.fnmatch_lines(["*not the same: 4 microbatches: mean of means*", "instead: return sums and counts*"])
    done.stdout.fnmatch_lines(
        ["cannot tell: one batch: a repeated call returns a different result*seed random numbers*"] * 2
    )


@pytest.mark.full
@pytest.mark.needs("tensorflow")
def test_what_an_audit_cannot_decide_does_not_pass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    pytester.makepyfile("""
        import tensorflow as tf

        step = tf.function(lambda x: x + 1)

        def test_step(audit):
            assert not audit(step, tf.zeros(4)).findings

        def test_allowed(audit):
            from gradcombine.audit import audit as function

            left = function(step, tf.zeros(4)).undecided
            assert left and not audit(step, tf.zeros(4), allow=left).findings

        def test_allowed_in_part(audit):
            audit(step, tf.zeros(4), allow=["donation-lost"])
    """)
    done = pytester.runpytest_subprocess("-p", "no:gradcombine", "-p", "gradcombine.pytest_plugin", "-p", "no:xdist")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["cannot tell: undecided: *donation-lost*; not read: *", "cannot tell: undecided: *"])
