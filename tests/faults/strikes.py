"""Faults of the processes of a run and of their files."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine import GradCombineError, ledger, statefile
from gradcombine.statefile import container
from tests.faults import bad_replicas, training
from tests.faults.training import Run

QUIET = ("pause", "disk", "clock")
"""Faults that do not end the start, so that the next one strikes it too."""
DAMAGE = ("cut", "flip")
"""Faults of files, after their process was killed."""
KINDS = ("kill", "stop", "pause", "hang", "resize", "disk", "kill-in-save", *DAMAGE, "stray", "clock")
REPLICAS = (*bad_replicas.KINDS, "twice")
"""Faults of a process that continues with wrong values."""


class Fault(NamedTuple):
    """One fault of a run.

    Attributes:
      kind: ``kill``: SIGKILL. ``stop``: SIGSTOP for good. ``pause``: SIGSTOP, then SIGCONT. ``hang``: the process
        never joins the collective in which the others wait. ``resize``: all are ended, a different number is started.
        ``disk``: file sizes are limited for a while. ``kill-in-save``: killed after some bytes of the next save or
        before one of its system calls. ``cut``, ``flip``: killed, and one of the files is truncated or has a flipped
        bit. ``stray``: killed, and an older part of its window exists under another holder's name. ``clock``: time.time
        and the files' times jump. ``twice``: the process computes and counts another one's microbatch, which only the
        ledger detects.
      rank: rank of the process.
      after: number of places that the process passes before the fault.
      draw: a number from 0 to 1 for where to cut or how far to jump.
      start: index of the start of all processes.

    The kinds in `bad_replicas` are faults of a replica that continues with wrong values.
    """

    kind: str
    rank: int
    after: int
    draw: float
    start: int = 0


def strike(fault: Fault, run: Run) -> None:
    """Applies the fault to this process."""
    own = os.getpid()
    if fault.kind in REPLICAS:
        run.bad.append(fault.kind)
    elif fault.kind in ("kill", *DAMAGE):
        os.kill(own, signal.SIGKILL)
    elif fault.kind == "stop":
        os.kill(own, signal.SIGSTOP)
    elif fault.kind == "pause":
        subprocess.Popen(["/bin/sh", "-c", f"sleep {0.1 + fault.draw:.2f}; kill -CONT {own}"])
        os.kill(own, signal.SIGSTOP)
    elif fault.kind == "hang":
        time.sleep(10_000)
    elif fault.kind == "resize":
        os._exit(75)
    elif fault.kind == "disk":
        wrap_saves(lambda save, *_: with_room(int(fault.draw * 4000), save), saves=3)
    elif fault.kind == "kill-in-save":
        wrap_saves(lambda save, *path: die_within(save, fault.draw, *path))
    elif fault.kind == "stray":
        wrap_saves(leave_stray)
    elif fault.kind == "clock":
        moved, real = (fault.draw - 0.5) * 1e9, time.time
        time.time = lambda: real() + moved
        for file in run.folder.iterdir():
            os.utime(file, (real() + moved, real() + moved))


def wrap_saves(wrapper: Callable[..., Any], saves: int = 1) -> None:
    """Makes the next saves through ``wrapper(save, path)``; TensorFlow's saves have no path.

    If the wrapper does not save, the original save runs.
    """
    owners = [(container, "write")]
    if "tensorflow" in sys.modules:
        owners.append((sys.modules["tensorflow"].train.CheckpointManager, "save"))
    for owner, name in owners:
        real, left = getattr(owner, name), itertools.count(saves, -1)

        def write(*args: Any, real: Any = real, left: Any = left, **options: Any) -> Any:
            result = list[Any]()

            def save() -> None:
                result.append(real(*args, **options))

            if next(left) > 0:
                wrapper(save, *(x for x in args[:1] if isinstance(x, Path)))
            return result[0] if result else save() or result[0]

        setattr(owner, name, write)


def with_room(room: int, save: Callable[[], None]) -> None:
    """Saves with a limit of ``room`` bytes on the size of files."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


CALLS = ("open", "os.rename", "os.remove", "os.truncate")
"""System calls of a save, by the names of Python's audit events."""


def die_within(save: Callable[[], None], draw: float, path: Path | None = None) -> None:
    """Kills the process during the save: after some bytes for half of the draws, otherwise before a system call.

    Waits for a save that replaces a file in the folder, as the old file is what could be lost.
    """
    if path is not None and not path.exists() and draw * 10 % 1 < 0.75:
        wrap_saves(lambda again, *of: die_within(again, draw, *of))
        return
    if draw < 0.5:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system ends the process after so many bytes
        with_room(int(draw * 2 * (path.stat().st_size if path and path.exists() else 4000)), save)
    else:
        calls, last = itertools.count(), int((draw - 0.5) * 2 * 6)

        def hook(event: str, _: Any) -> None:
            if event in CALLS and next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save()
    os.kill(os.getpid(), signal.SIGKILL)  # the file is complete, but the save did not return


def leave_stray(save: Callable[[], None], path: Path) -> None:
    """Copies the file that the next save of a part replaces to a name that no process has."""
    name, holder, suffix = path.name.split(".")
    if holder == "begun" or not path.exists():
        wrap_saves(leave_stray)
        return
    shutil.copy(path, path.with_name(f"{name}.{int(holder) + training.MICROBATCHES}.{suffix}"))
    save()
    os.kill(os.getpid(), signal.SIGKILL)


def damage(folder: Path, way: str, scheme: str, fault: Fault) -> None:
    """Truncates one of the last written files or flips a bit in it; damages at most one beginning per run.

    Logs the lost microbatches: those of a part; for a beginning, those of all parts that need it; for a worker's newest
    checkpoint, the last one in it.
    """
    if way == "checkpoint":
        saved = [list(own.glob("*.index")) for own in sorted(folder.glob("worker-*"))]
        newest = [max(files, key=lambda file: file.stat().st_mtime_ns) for files in saved if files]
        chosen = [file for index in newest for file in sorted(index.parent.glob(f"{index.stem}.*"))]
    else:
        files = sorted(folder.glob("window-*.npz"), key=lambda file: file.name)
        newest = files[-1].name.split(".")[0] if files else ""
        chosen = [file for file in files if file.name.startswith(newest)]
        if list(folder.glob("cut-*begun*")):
            chosen = [file for file in chosen if "begun" not in file.name]
    if not chosen:
        return
    position = fault.draw * len(chosen)
    file, draw = chosen[int(position)], position % 1
    if way == "checkpoint":
        rank = file.parent.name.rpartition("-")[2]
        logs = sorted(folder.glob(f"log-*-{rank}.jsonl"), key=lambda log: int(log.name.split("-")[1]))
        entries = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
        last = [entry for entry in entries if "saved" in entry][-1:]
        held = [[entry["saved"], number] for entry in last for number in entry["numbers"][-1:]]
    else:
        window = int(file.name.split(".")[0].removeprefix("window-"))
        # The first window begins with known parameters.
        parts = [file] if "begun" not in file.name else chosen if window else []
        held = [[window, n] for part in parts if "begun" not in part.name for n in numbers_in(part, scheme)]
    (folder / f"cut-{len(list(folder.glob('cut-*')))}-{file.name}.json").write_text(json.dumps(held))
    if fault.kind == "flip":
        flip(file, draw)
    else:
        os.truncate(file, int(draw * file.stat().st_size))


def flip(file: Path, draw: float) -> None:
    """Flips a bit anywhere in the file or, in seven of eight cases, in an array, with a matching ZIP checksum."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: bytearray(archive.read(member)) for member in archive.infolist()}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError):  # already damaged
        members = {}
    arrays = [name for name in members if name != "header.npy"]
    if draw < 1 / 8 or not arrays:
        contents = bytearray(file.read_bytes())
        _flip(contents, draw * 8 % 1)
        file.write_bytes(contents)
        return
    position = (draw * 8 - 1) / 7 * len(arrays)
    _flip(members[arrays[int(position)]], position % 1, 128)  # start of the elements
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, bytes(data))


def _flip(contents: bytearray, draw: float, start: int = 0) -> None:
    if len(contents) > start:
        bit = int(draw * 8 * (len(contents) - start))
        contents[start + bit // 8] ^= 1 << bit % 8


def numbers_in(part: Path, scheme: str) -> list[int]:
    try:
        state = statefile.load(part, training.SCHEMES[scheme].reduction, training.begin())
    except GradCombineError:  # already truncated
        return []
    return list(ledger.read(state).held)
