"""Several JAX processes on this machine: one window over time and processes, a lost peer, a restart in mid-window."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import gradcombine as gc
from gradcombine import reductions
from tests.faults.jax_engine import descend, gradient
from tests.faults.training import bits
from tests.multi_process import jax_worker
from tests.multi_process.processes import Ended, free_addresses, run_workers


def run(size: int, task: str, folder: Path) -> list[Ended]:
    """Runs the worker in ``size`` processes of one device each."""
    (coordinator,) = free_addresses(1)
    arguments = [[coordinator, str(size), str(rank), task, str(folder)] for rank in range(size)]
    return run_workers(
        "jax_worker", [(each, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}) for each in arguments], limit=60
    )


def in_one_process() -> str:
    """The same training on one list of all microbatches."""
    params = jax_worker.start()
    for window in range(jax_worker.WINDOWS):
        batches = [jax_worker.microbatch(window, number) for number in range(jax_worker.MICROBATCHES)]
        grads = [gradient(params, x, y) for x, y in batches]
        mean = gc.combine(reductions.mean(), grads, [len(x) for x, _ in batches], order="tree")
        params = descend(params, mean)
    return bits(params)


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
