"""Several JAX processes on this machine: one window over time and processes, a lost peer, a restart in mid-window."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.multi_process import jax_worker
from tests.multi_process.tensorflow_cluster import free_addresses

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    code: int
    printed: Any
    stderr: str


def run(size: int, task: str, folder: Path, limit: float = 60) -> list[Ended]:
    """Runs the worker in ``size`` processes of one device each; those not ended after ``limit`` seconds are killed."""
    (coordinator,) = free_addresses(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    started: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + limit
    try:
        for rank in range(size):
            command = [sys.executable, "-m", "tests.multi_process.jax_worker"]
            command += [coordinator, str(size), str(rank), task, str(folder)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
        outputs = [each.communicate(timeout=max(0.1, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return [Ended(each.returncode, _printed(out), err) for each, (out, err) in zip(started, outputs, strict=True)]


def _printed(output: str) -> Any:
    """The worker's line of JSON among the lines that Gloo prints."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return found[-1] if found else None


def in_one_process() -> str:
    """The same training on one list of all microbatches."""
    params = jax_worker.start()
    for window in range(jax_worker.WINDOWS):
        batches = [jax_worker.microbatch(window, number) for number in range(jax_worker.MICROBATCHES)]
        grads = [jax_worker.gradient(params, x, y) for x, y in batches]
        mean = gc.combine(reductions.mean(), grads, [len(x) for x, _ in batches], order="tree")
        params = jax_worker.descend(params, mean)
    return jax_worker.bits(params)


def agree(ended: list[Ended], expected: str) -> None:
    assert [(each.code, each.printed) for each in ended] == [(0, {"result": expected})] * len(ended), ended[0].stderr[
        -2000:
    ]


@pytest.mark.full
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    agree(run(2, "train", tmp_path), in_one_process())


@pytest.mark.slow
def test_four_processes_train_as_one(tmp_path: Path) -> None:
    agree(run(4, "train", tmp_path), in_one_process())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_window_resumes_in_new_processes(tmp_path: Path, size: int) -> None:
    agree(run(size, "save", tmp_path), "saved")
    agree(run(size, "resume", tmp_path), in_one_process())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_lost_process_is_named_in_bounded_time(tmp_path: Path, size: int) -> None:
    begun = time.monotonic()
    *survivors, lost = run(size, "die", tmp_path)
    assert time.monotonic() - begun < 50
    assert lost.code == 9
    for each in survivors:
        assert each.code == 3, each.stderr[-2000:]
        assert f"merge_replicas: expected an answer from all {size} processes, received" in each.printed["error"]
