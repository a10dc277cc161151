"""What strikes the processes of a run, and their files."""

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
"""Faults after which the start goes on: the next one strikes it as well."""
DAMAGE = ("cut", "flip")
"""Faults of files, once their process was killed."""
KINDS = ("kill", "stop", "pause", "hang", "resize", "disk", "kill-in-save", *DAMAGE, "stray", "clock")
REPLICAS = (*bad_replicas.KINDS, "twice")
"""Faults of a process that goes on, and computes the wrong thing."""


class Fault(NamedTuple):
    """One fault of a run.

    Attributes:
      kind: ``kill``: SIGKILL. ``stop``: SIGSTOP, for good. ``pause``: SIGSTOP, then SIGCONT. ``hang``: the process
        stays away from the collective in which the others wait. ``resize``: all are ended, another number is started.
        ``disk``: no file can be written beyond so many bytes, for a while. ``kill-in-save``: killed after so many bytes
        of the next save, or before one of its calls of the system. ``cut``, ``flip``: killed, and one of the files is
        cut off, or has one bit that is another. ``stray``: killed, and an older part of its window is there under
        another holder's name. ``clock``: time.time jumps, and so do the files' times. ``twice``: the process computes
        and counts a microbatch of another one, and nobody looks for that but the ledger.
      rank: of the process that it strikes.
      after: at how many places that process passes it strikes.
      draw: a number from 0 to 1: where to cut, how far to jump.
      start: in which start of all processes.

    The kinds of `bad_replicas` are of a replica that goes on, and computes the wrong thing.
    """

    kind: str
    rank: int
    after: int
    draw: float
    start: int = 0


def strike(fault: Fault, run: Run) -> None:
    """What happens to this process."""
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
    """The next saves are made by ``wrapper(save, path)``; a save of TensorFlow's comes without a path.

    Where the wrapper does not save, the save is made as ever.
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
    """The system refuses what is longer than so many bytes."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


CALLS = ("open", "os.rename", "os.remove", "os.truncate")
"""What a save asks of the system, by the names of Python's audit events."""


def die_within(save: Callable[[], None], draw: float, path: Path | None = None) -> None:
    """Half of the draws end the process after so many bytes, half before one of the calls of the system.

    Of a save in one folder the one that replaces a file is waited for, as the old one is what may be lost.
    """
    if path is not None and not path.exists() and draw * 10 % 1 < 0.75:
        wrap_saves(lambda again, *of: die_within(again, draw, *of))
        return
    if draw < 0.5:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the system writes so many bytes, and ends the process
        with_room(int(draw * 2 * (path.stat().st_size if path and path.exists() else 4000)), save)
    else:
        calls, last = itertools.count(), int((draw - 0.5) * 2 * 6)

        def hook(event: str, _: Any) -> None:
            if event in CALLS and next(calls) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        save()
    os.kill(os.getpid(), signal.SIGKILL)  # whole, and nobody was told


def leave_stray(save: Callable[[], None], path: Path) -> None:
    """What the next save of a part replaces, under a name that no process has."""
    name, holder, suffix = path.name.split(".")
    if holder == "begun" or not path.exists():
        wrap_saves(leave_stray)
        return
    shutil.copy(path, path.with_name(f"{name}.{int(holder) + training.MICROBATCHES}.{suffix}"))
    save()
    os.kill(os.getpid(), signal.SIGKILL)


def damage(folder: Path, way: str, scheme: str, fault: Fault) -> None:
    """Cuts off one of the files that were written last, or flips a bit of it; of the beginnings, one in a run.

    What that costs is noted: the microbatches of a part; with a beginning, those of all parts that need it; with a
    worker's newest checkpoint, the last one in it.
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
        # The first window begins with what is known.
        parts = [file] if "begun" not in file.name else chosen if window else []
        held = [[window, n] for part in parts if "begun" not in part.name for n in numbers_in(part, scheme)]
    (folder / f"cut-{len(list(folder.glob('cut-*')))}-{file.name}.json").write_text(json.dumps(held))
    if fault.kind == "flip":
        flip(file, draw)
    else:
        os.truncate(file, int(draw * file.stat().st_size))


def flip(file: Path, draw: float) -> None:
    """Flips a bit: of any byte of the file, or of an array, in seven of eight, with ZIP's own checksum of it."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = {member.filename: bytearray(archive.read(member)) for member in archive.infolist()}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError):  # it was damaged before
        members = {}
    arrays = [name for name in members if name != "header.npy"]
    if draw < 1 / 8 or not arrays:
        contents = bytearray(file.read_bytes())
        _flip(contents, draw * 8 % 1)
        file.write_bytes(contents)
        return
    position = (draw * 8 - 1) / 7 * len(arrays)
    _flip(members[arrays[int(position)]], position % 1, 128)  # the elements begin there
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
    except GradCombineError:  # it was cut off before
        return []
    return list(ledger.read(state).held)
