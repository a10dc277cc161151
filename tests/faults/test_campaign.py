"""A short campaign: a few runs of each engine pass, and planted defects are reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("jax", "tensorflow")

ROOT = Path(__file__).parents[2]


def campaign(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.full
@pytest.mark.parametrize(("engine", "runs"), [("jax", 2), ("tensorflow", 1)])
def test_nothing_is_lost(engine: str, runs: int) -> None:
    done = campaign("--engine", engine, "--runs", str(runs), "--seed", "4511")
    none = "microbatches lost 0, doubled 0, computed again for no fault 0, runs with other bits 0, runs over time 0"
    found = f"{engine}: {runs} runs, {none}"
    assert done.returncode == 0 and found in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (
            "saved-after-update",
            "window 1: expected its gradients in .*, received those of window 0, saved after its update",
        ),
        ("saved-at-end", r"1\.0: computed again 1 times more than a fault accounts for"),
        ("dealt-twice", r"0\.0: twice in the window.*each of 8 microbatches once, received several of 0"),
        ("skip-not-agreed", "window 1: left out in the unbroken run, applied by .*: the skip was not agreed on"),
    ],
)
def test_a_defect_in_the_training_is_found(plant: str, why: str) -> None:
    done = campaign("--engine", "jax", "--runs", "2", "--seed", "10", "--plant", plant)
    assert done.returncode == 1 and re.search(why, done.stdout), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "why"),
    [
        ("doubles-hidden", r"counted twice, and .* refused none; .*window \d: other gradients than those"),
        ("save-not-atomic", r"\d\.\d: computed again \d times more than a fault accounts for"),
        ("parts-overlap", r"ledger\.deal: expected each number once, received several of \d"),
        ("checksums-not-compared", r"the part of \d+ on the disk is none that a process has saved|other parameters"),
        ("windows-mixed", r"received those of window \d|computed again \d times more than a fault accounts for"),
    ],
)
def test_a_defect_in_the_library_is_found_within_ten_runs(plant: str, why: str) -> None:
    done = campaign("--engine", "jax", "--runs", "10", "--seed", "2", "--plant", plant)
    assert done.returncode == 1 and re.search(why, done.stdout), done.stdout + done.stderr
