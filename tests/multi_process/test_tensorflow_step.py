"""The accumulated step in several processes has the bits of one list; checkpoints; a killed process."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import gradcombine as gc
from tests.multi_process import processes
from tests.multi_process.processes import Ended, free_addresses
from tests.multi_process.tensorflow_worker import EVERY, SIZE, gradient_at, weight_at

pytestmark = [pytest.mark.needs("tensorflow"), pytest.mark.slow]

WINDOWS = 2


def run_workers(size: int, *arguments: str) -> list[Ended]:
    """Runs the worker in ``size`` processes of one cluster."""
    addresses = free_addresses(size)
    roles = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in range(size)]
    tasks = [(arguments, {"TF_CONFIG": json.dumps(role), "CUDA_VISIBLE_DEVICES": ""}) for role in roles]
    return processes.run_workers("tensorflow_worker", tasks, limit=120)


def trained(size: int) -> np.ndarray:
    """The variable after all windows, by `gradcombine.combine` over the list of each window."""
    w = np.zeros(SIZE, np.float32)
    for window in range(WINDOWS):
        numbers = [(r, k) for r in range(size) for k in range(window * EVERY, (window + 1) * EVERY)]
        values, weights = [gradient_at(*n) for n in numbers], [weight_at(*n) for n in numbers]
        w = w - gc.combine(gc.reductions.mean(), values, weights, order="tree")
    return w


def assert_trained(ended: list[Ended]) -> None:
    expected = trained(len(ended))
    for each in ended:
        assert each.code == 0, each.stderr
        assert each.printed["traces"] == 1
        np.testing.assert_array_equal(np.frombuffer(bytes.fromhex(each.printed["w"]), np.float32), expected)


@pytest.mark.parametrize(("size", "options"), [(2, ()), (2, ("--keras",)), (3, ())])
def test_processes_give_the_bits_of_one_list(size: int, options: tuple[str, ...]) -> None:
    ended = run_workers(size, *options)
    assert_trained(ended)
    assert [each.printed["applied"] for each in ended] == [([False] * (EVERY - 1) + [True]) * WINDOWS] * size


def test_islands_in_processes_have_the_bits_of_a_simulation() -> None:
    """Each process moves by its window's gradients; the weighted mean of the differences is subtracted."""
    w = np.zeros(SIZE, np.float32)
    for window in range(WINDOWS):
        moved, seen = list[np.ndarray](), list[float]()
        for r in range(2):
            own, weights = w, 0.0
            for k in range(window * EVERY, (window + 1) * EVERY):
                own, weights = own - gradient_at(r, k), weights + weight_at(r, k)
            moved.append(w - own)
            seen.append(weights)
        w = w - gc.combine(gc.reductions.mean(), moved, seen, order="tree")
    for each in run_workers(2, "--outer"):
        assert each.code == 0, each.stderr
        assert each.printed["traces"] == 1
        assert each.printed["applied"] == ([False] * (EVERY - 1) + [True]) * WINDOWS
        np.testing.assert_array_equal(np.frombuffer(bytes.fromhex(each.printed["w"]), np.float32), w)


@pytest.mark.parametrize("options", [(), ("--keras",)])
def test_a_gradient_in_one_process_alone_is_one_in_all(options: tuple[str, ...]) -> None:
    """Each process traces its own replicas' gradients and still takes part in the others' branches."""
    ended = run_workers(2, "--apart", *options)
    assert_trained(ended)
    weights = np.float64([[weight_at(r, k) for k in range(WINDOWS * EVERY)] for r in range(2)])
    windows = weights.reshape(2, WINDOWS, EVERY).sum(axis=2)
    expected = [-(windows[1] / windows.sum(axis=0)).sum(), 0]
    for each in ended:
        np.testing.assert_allclose(each.printed["others"], expected, rtol=1e-6)


@pytest.mark.parametrize("options", [(), ("--outer",)])
def test_lengths_that_differ_between_processes_are_refused(options: tuple[str, ...]) -> None:
    for each in run_workers(2, "--uneven", *options):
        assert each.code == 0, each.stderr
        assert "expected a window length that is the same on all replicas" in each.printed["refused"]


def test_a_killed_process_is_an_error_in_bounded_time_and_a_restart_ends_with_the_same_bits(tmp_path: Path) -> None:
    folder = ("--folder", str(tmp_path))
    begun = time.monotonic()
    survivor, killed = run_workers(2, *folder, "--save-after", str(EVERY + 2), "--die-after", str(EVERY + 3))
    assert time.monotonic() - begun < 90
    assert killed.code == -signal.SIGKILL
    assert survivor.code != 0 and survivor.printed is None
    assert "tensorflow.python.framework.errors_impl" in survivor.stderr
    resumed = run_workers(2, *folder, "--resume")
    assert_trained(resumed)
    assert [each.printed["applied"] for each in resumed] == [[False, True]] * 2
