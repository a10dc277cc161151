"""Fuzzes every reader in a separate process, which is restarted after a file that crashes it."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from tests.fuzz.guard import SECONDS, bounded, happened

FACTOR, BASE = 1100, 4 << 20
"""Memory limit for reading a file: FACTOR times its size, as deflate compresses by up to 1032, plus BASE bytes."""

MEASURED = 16
"""Memory is measured for one file in this many."""

AGAIN = 75
"""Exit status with which a process asks to be replaced."""

EXAMPLES = 3
"""Number of example inputs reported per defect."""


class Job(NamedTuple):
    """Fuzzing of one reader: ``run`` draws a file and reads it, within ``factor`` times the bounds."""

    name: str
    inputs: int
    run: Callable[[Random], tuple[str, str]]
    factor: int = 1


def jobs(inputs: int) -> Iterator[Job]:
    """The jobs of all readers; imports their libraries."""
    from tests.fuzz import files

    for name, reader in files.readers().items():
        yield Job(name, inputs, partial(_read, reader), reader.factor)


def _read(reader: Any, r: Random) -> tuple[str, str]:
    from tests.fuzz import files

    path = files.place(r, reader)
    # In Python 3.11, threads that allocate while tracemalloc stops can crash the process.
    if r.randrange(MEASURED) or reader.factor > 1:
        return happened(lambda: reader.read(path), reader.allowed, reader.factor)
    tracemalloc.start()
    outcome = happened(lambda: reader.read(path), reader.allowed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    most = FACTOR * (path.stat().st_size if path.is_file() else 0) + BASE
    return outcome if peak <= most else ("defect", f"{peak} bytes of memory")


def work(inputs: int, seed: int, only: str, seconds: float, name: str, start: int) -> None:
    """Runs the jobs, starting with file ``start`` of job ``name``; prints one line per outcome."""
    reached = not name
    for job in jobs(inputs):
        reached = reached or job.name == name
        if not reached or not re.search(only, job.name):
            continue
        with bounded(job.factor) as crowded:
            _work(job, seed, start if job.name == name else 0, seconds, crowded)


def _work(job: Job, seed: int, start: int, seconds: float, crowded: Callable[[], bool]) -> None:
    counts: dict[str, int] = {}
    defects: dict[str, list[Any]] = {}
    begun = time.monotonic()
    try:
        for i in range(start, job.inputs):
            if i % 64 == start % 64:
                if time.monotonic() - begun > seconds:
                    break
                _say("at", job.name, i, counts, defects, time.monotonic() - begun)
                if crowded():  # by memory that frameworks keep; running out would crash the process
                    sys.exit(AGAIN)
                faulthandler.dump_traceback_later(100 * SECONDS, exit=True)  # for code that a signal cannot interrupt
            kind, what = job.run(Random(f"{seed}:{job.name}:{i}"))
            counts[kind] = counts.get(kind, 0) + 1
            if kind == "defect":
                times, inputs = defects.get(what, [0, []])
                defects[what] = [times + 1, [*inputs, i][:EXAMPLES]]
    finally:
        faulthandler.cancel_dump_traceback_later()
    _say("done", job.name, counts, defects, time.monotonic() - begun)


def _say(*what: Any) -> None:
    print("::", json.dumps(what), flush=True)


class Result(NamedTuple):
    """The outcome of one reader.

    Attributes:
      counts: numbers of accepted and rejected files and of defects.
      defects: by description, the number of files and the indices of the first ones.
      seconds: duration.
    """

    name: str
    counts: dict[str, int]
    defects: dict[str, list[Any]]
    seconds: float


@contextmanager
def place() -> Generator[dict[str, Any], None, None]:
    """Options of subprocesses: a temporary working directory, in memory if possible."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=memory if os.path.isdir(memory) else None) as folder:
        paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
        environment = {"TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # One arena per thread would reach the limit of the address space without using memory.
        yield {"cwd": folder, "env": os.environ | environment | {"MALLOC_ARENA_MAX": "2"}}


def campaign(inputs: int, seed: int, only: str = "", seconds: float = 3600) -> Iterator[Result]:
    """Fuzzes all readers in a temporary directory."""
    options = ["--inputs", str(inputs), "--seed", str(seed), "--only", only, "--seconds", str(seconds)]
    with place() as where:
        name, at, ended = "", 0, False
        while not ended:
            command = [sys.executable, "-m", "tests.fuzz", *options, "--from-name", name, "--from-input", str(at)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            process = subprocess.Popen(command, **pipes, **where)
            assert process.stdout is not None
            begun: list[Any] | None = None  # intermediate outcome of a started reader
            for line in process.stdout:
                if not line.startswith(":: "):
                    continue
                kind, *what = json.loads(line[3:])
                if kind == "at":
                    name, at, *begun = what
                else:
                    begun = None
                    yield Result(*what)
            ended = process.wait() == 0
            if ended:
                continue
            if begun is None:
                raise RuntimeError(f"ended with status {process.returncode} after {name} {at}")
            counts, defects, spent = begun
            if process.returncode != AGAIN:
                counts["defect"] = counts.get("defect", 0) + 1
                defects[f"ended the process ({process.returncode})"] = [1, [at]]
                at += 64
            yield Result(name, counts, defects, spent)
