"""A save that fails or whose process is killed leaves the previous file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gradcombine as gc
from gradcombine import reductions, statefile
from gradcombine.statefile import container
from tests.statefile.states import SUFFIXES

MEAN = reductions.mean()


LIKE = np.zeros(3, np.float32)


def state(value: float) -> Any:
    return MEAN.update(MEAN.init(LIKE), LIKE + np.float32(value))


def held(path: Path) -> float:
    """The value of the state in a file."""
    return float(MEAN.finalize(statefile.load(path, MEAN, LIKE))[0])


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
    assert held(path) == 2


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


FULL_DISK = """
import resource, sys
import numpy as np
from gradcombine import reductions, statefile
first = reductions.first()
for path in sys.argv[1:]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    statefile.save(path, first, first.init({"w": np.zeros(5_000, np.float32)}))
    before = open(path, "rb").read()
    for limit in (0, 10, 100, 1_000, 10_000, 20_000, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            statefile.save(path, first, first.init({"w": np.ones(5_000, np.float32)}))
        except OSError as error:
            print(limit, error.strerror)
        assert open(path, "rb").read() == before
"""


def test_a_full_disk_is_the_same_error_in_every_format(tmp_path: Path) -> None:
    names = [f"a{suffix}" for suffix in SUFFIXES]
    command = [sys.executable, "-c", FULL_DISK, *(str(tmp_path / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line.partition(" ")[2] for line in done.stdout.splitlines()] == [os.strerror(errno.EFBIG)] * 7 * len(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path, dangling: bool) -> None:
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "a.npz", tmp_path / "disk" / "b.npz"
    link.symlink_to("disk/b.npz")
    if not dangling:
        target.write_bytes(b"old")
    statefile.save(link, MEAN, state(1))
    assert link.is_symlink() and os.readlink(link) == "disk/b.npz"
    assert not target.is_symlink()
    for path in (link, target):
        assert held(path) == 1
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_mode_and_owner_stay(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.npz"
    path.touch()
    owner = (1234, 5678) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(path, *owner)
    path.chmod(mode)
    statefile.save(path, MEAN, state(1))
    found = path.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, *owner)


def test_a_group_that_cannot_be_kept_hands_its_rights_to_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    path.touch()
    path.chmod(0o664)

    def forbidden(descriptor: int, owner: int, group: int) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    monkeypatch.setattr(os, "fchown", forbidden)
    statefile.save(path, MEAN, state(1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    statefile.save(tmp_path / "a.npz", MEAN, state(1))
    assert (tmp_path / "a.npz").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a fifo"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, kind: str, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    if kind == "device":
        path.symlink_to("/dev/full")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(tmp_path / "fifo")
        path = path.symlink_to("fifo") or path if kind.startswith("link") else (tmp_path / "fifo").rename(path)
    before = os.stat(path)
    for call in (
        lambda: statefile.save(path, MEAN, state(1)),
        lambda: statefile.load(path, MEAN, LIKE),
        lambda: statefile.inspect(path),
    ):
        with pytest.raises(gc.GradCombineError, match="expected a regular file"):
            call()
    assert os.stat(path) == before


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_longest_name_is_saved(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / ("n" * (255 - len(suffix)) + suffix)
    statefile.save(path, MEAN, state(1))
    statefile.save(path, MEAN, state(2))
    assert held(path) == 2
    assert list(tmp_path.iterdir()) == [path]


HANGING = """
import sys, time
from pathlib import Path
from gradcombine.statefile.container import replacing
with replacing(Path(sys.argv[1])) as file:
    print("writing", flush=True)
    time.sleep(60)
"""


def test_only_what_a_dead_writer_of_the_file_left_is_removed(tmp_path: Path) -> None:
    a, b = tmp_path / "a.npz", tmp_path / "b.npz"
    with subprocess.Popen([sys.executable, "-c", HANGING, str(a)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (left,) = tmp_path.iterdir()
        statefile.save(a, MEAN, state(1))
        assert set(tmp_path.iterdir()) == {a, left}  # its writer is alive
        writer.send_signal(signal.SIGKILL)
    statefile.save(b, MEAN, state(1))
    assert set(tmp_path.iterdir()) == {a, b, left}
    statefile.save(a, MEAN, state(2))
    assert set(tmp_path.iterdir()) == {a, b}


def test_a_draft_that_was_taken_for_abandoned_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer may intervene between creating a draft and locking it."""
    real, seen = fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not seen:
            seen.extend(tmp_path.iterdir())
            seen[0].unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    statefile.save(tmp_path / "a.npz", MEAN, state(1))
    assert len(seen) == 1 and list(tmp_path.iterdir()) == [tmp_path / "a.npz"]


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
    assert container.digest(np.zeros((), np.float32)) == expected
