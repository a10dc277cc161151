"""A save that fails, or whose process is killed, leaves the file that was there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradcombine import reductions, statefile
from gradcombine.statefile import stored
from tests.statefile.states import SUFFIXES

MEAN = reductions.mean()


def state(value: float, size: int = 3) -> Any:
    return MEAN.update(MEAN.init(np.zeros(size, np.float32)), np.full(size, value, np.float32))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_on_the_way_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, step: str
) -> None:
    path = tmp_path / f"a{suffix}"
    statefile.save(path, MEAN, state(1))
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(OSError, match="no space left"):
            statefile.save(path, MEAN, state(2))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    statefile.save(path, MEAN, state(2))
    assert float(MEAN.finalize(statefile.load(path, MEAN, np.zeros(3, np.float32)))[0]) == 2


def test_the_contents_are_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def recorded(*args: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(os, name, recorded)
    statefile.save(tmp_path / "a.npz", MEAN, state(1))
    assert calls == (["fsync", "replace", "fsync"] if os.name == "posix" else ["fsync", "replace"])


WRITER = """
import sys, numpy as np
from gradcombine import reductions, statefile
mean, like, i = reductions.mean(), np.zeros(200_000, np.float32), 0
while True:
    i += 1
    statefile.save(sys.argv[1], mean, mean.update(mean.init(like), np.full_like(like, i)))
    print(i, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path: Path, suffix: str) -> None:
    path, like, rng = tmp_path / f"a{suffix}", np.zeros(200_000, np.float32), np.random.default_rng(0)
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = int(writer.stdout.readline())
            time.sleep(rng.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            finished = [first, *map(int, writer.stdout.read().split())][-1]
        value = MEAN.finalize(statefile.load(path, MEAN, like))
        assert value[0] in (finished, finished + 1)
        np.testing.assert_array_equal(value, np.full_like(like, value[0]))


def test_digests_are_of_the_bytes() -> None:
    """SHA-256 of four zero bytes, from another implementation."""
    expected = "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"
    assert stored.digest(np.zeros((), np.float32)) == expected
