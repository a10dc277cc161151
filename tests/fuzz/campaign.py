"""The inputs dealt over rooms, each a process of its own that is started again after an input that ends it."""

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

from gradcombine.backends.registry import load
from tests.fuzz.guard import COMPILING, SECONDS, bounded, happened
from tests.fuzz.values import Drawn

ROOMS = {
    "numpy": 1.0,
    "jax": 0.02,
    "jax traced": 0.01,
    "tensorflow": 0.02,
    "tensorflow graph": 0.005,
    "doors": 1.0,
    "files": 1.0,
}
"""Each with the part of the inputs of its functions that it is given: what a framework runs takes longer."""

FACTOR, BASE = 1100, 4 << 20
"""The memory that reading a file may take: so many times its size, as deflate shrinks by 1032, and so many bytes."""

MEASURED = 16
"""Of so many files, the memory of one is measured."""

AGAIN = 75
"""The status with which a process asks for another one in its place."""

EXAMPLES = 3
"""Numbers of inputs that are named for each defect."""


class Job(NamedTuple):
    """What a room does with one name: draws input number i, and runs it, in so many times the bounds."""

    name: str
    inputs: int
    run: Callable[[Random], tuple[str, str]]
    factor: int = 1


def jobs(room: str, inputs: int) -> Iterator[Job]:
    """The jobs of a room; frameworks are imported by the rooms that need them."""
    if room == "files":
        from tests.fuzz import files

        for name, reader in files.readers().items():
            yield Job(name, inputs, partial(_read, reader), reader.factor)
        return
    from tests.fuzz import functions

    if room == "doors":
        from tests.fuzz import doors

        found = doors.targets()
    else:
        found = functions.targets()
    within, factor = _within(room), 1 if room == "numpy" else COMPILING
    for name, target in found.items():

        def run(r: Random, target: functions.Target = target) -> tuple[str, str]:
            def one(asarray: Callable[[Any], Any] | None) -> tuple[str, str]:
                try:
                    arguments, called = functions.call(target, Drawn(r, asarray))
                except Exception:  # what was drawn does not fit together, or has no value while traced
                    return "not drawn", ""
                return happened(arguments, called, target.allowed, factor)

            return within(one)

        yield Job(name, max(1, round(inputs * ROOMS[room])), run, factor)


def _within(room: str) -> Callable[[Any], tuple[str, str]]:
    """Runs a function with what makes arrays of a room's framework: known, or traced ones."""
    if room.startswith("jax"):
        import jax
        import jax.numpy as jnp

        load("jax")  # what is imported late would take an input's time
        if room == "jax":
            return lambda one: one(jnp.asarray)

        def traced(one: Any) -> tuple[str, str]:
            outcome: list[tuple[str, str]] = []

            def program(flag: Any) -> Any:
                outcome.append(one(lambda x: jnp.where(flag, x, x)))
                return flag

            jax.eval_shape(program, True)
            return outcome[0]

        return traced
    if room.startswith("tensorflow"):
        import tensorflow as tf

        load("tensorflow")
        if room == "tensorflow":
            return lambda one: one(tf.constant)

        def in_graph(one: Any) -> tuple[str, str]:
            with tf.__internal__.FuncGraph("fuzz").as_default():
                return one(lambda x: tf.compat.v1.placeholder(x.dtype, x.shape))

        return in_graph
    if room == "doors":
        import jax

        from tests.fuzz.functions import FOLDER

        # What tools compile is the same for most inputs.
        jax.config.update("jax_compilation_cache_dir", f"{FOLDER}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return lambda one: one(None)


def _read(reader: Any, r: Random) -> tuple[str, str]:
    from tests.fuzz import files

    path = files.place(r, reader)
    # Other threads that allocate while tracemalloc ends can end the process, in Python 3.11.
    if r.randrange(MEASURED) or reader.factor > 1:
        return happened(None, lambda: reader.read(path), reader.allowed, reader.factor)
    tracemalloc.start()
    outcome = happened(None, lambda: reader.read(path), reader.allowed)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    most = FACTOR * (path.stat().st_size if path.is_file() else 0) + BASE
    return outcome if peak <= most else ("defect", f"{peak} bytes of memory")


def work(room: str, inputs: int, seed: int, only: str, seconds: float, name: str, start: int) -> None:
    """Runs a room's jobs, from an input of one of them on; says on its output what comes of them, a line each."""
    reached = not name
    for job in jobs(room, inputs):
        reached = reached or job.name == name
        if not reached or not re.search(only, job.name):
            continue
        with bounded(job.factor) as crowded:
            _work(job, seed, start if job.name == name else 0, seconds, crowded)


def _work(job: Job, seed: int, start: int, seconds: float, crowded: Callable[[], bool]) -> None:
    counts: dict[str, int] = {}
    defects: dict[str, list[Any]] = {}
    begun = time.monotonic()
    for i in range(start, job.inputs):
        if i % 64 == start % 64:
            if time.monotonic() - begun > seconds:
                break
            _say("at", job.name, i, counts, defects, time.monotonic() - begun)
            if crowded():  # by what frameworks keep; without memory they would end the process
                sys.exit(AGAIN)
            faulthandler.dump_traceback_later(100 * SECONDS, exit=True)  # what a signal cannot interrupt
        kind, what = job.run(Random(f"{seed}:{job.name}:{i}"))
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "defect":
            times, inputs = defects.get(what, [0, []])
            defects[what] = [times + 1, [*inputs, i][:EXAMPLES]]
    faulthandler.cancel_dump_traceback_later()
    _say("done", job.name, counts, defects, time.monotonic() - begun)


def _say(*what: Any) -> None:
    print("::", json.dumps(what), flush=True)


class Result(NamedTuple):
    """What came of the inputs of one name in one room.

    Attributes:
      counts: of inputs that were accepted, refused, and defects.
      defects: what happened, with how many inputs did it, and the numbers of the first.
      seconds: that it took.
    """

    room: str
    name: str
    counts: dict[str, int]
    defects: dict[str, list[Any]]
    seconds: float


@contextmanager
def place() -> Generator[dict[str, Any], None, None]:
    """Where other processes run: in a folder for all of their files, in memory where there is such a place."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=memory if os.path.isdir(memory) else None) as folder:
        paths = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
        environment = {"TMPDIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # With an arena for each of its threads, a library would reach the bound of the address space without memory.
        yield {"cwd": folder, "env": os.environ | environment | {"MALLOC_ARENA_MAX": "2"}}


def campaign(
    inputs: int, seed: int, only: str = "", rooms: tuple[str, ...] = tuple(ROOMS), seconds: float = 3600
) -> Iterator[Result]:
    """Runs all rooms, one after another, in a folder of their own: a hostile path may be one to write to."""
    options = ["--inputs", str(inputs), "--seed", str(seed), "--only", only, "--seconds", str(seconds)]
    with place() as where:
        yield from _campaign(options, rooms, where)


def _campaign(options: list[str], rooms: tuple[str, ...], where: dict[str, Any]) -> Iterator[Result]:
    for room in rooms:
        name, at = "", 0
        while True:
            command = [sys.executable, "-m", "tests.fuzz", *options]
            command += ["--room", room, "--from-name", name, "--from-input", str(at)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
            process = subprocess.Popen(command, **pipes, **where)
            assert process.stdout is not None
            begun: list[Any] | None = None  # what came of the inputs of a name that has begun
            for line in process.stdout:
                if not line.startswith(":: "):
                    continue
                kind, *what = json.loads(line[3:])
                if kind == "at":
                    name, at, *begun = what
                else:
                    begun = None
                    yield Result(room, *what)
            if process.wait() == 0:
                break
            if begun is None:
                raise RuntimeError(f"room {room} ended with status {process.returncode} after {name} {at}")
            counts, defects, seconds = begun
            if process.returncode != AGAIN:
                counts["defect"] = counts.get("defect", 0) + 1
                defects[f"ended the process ({process.returncode})"] = [1, [at]]
                at += 64
            yield Result(room, name, counts, defects, seconds)
