"""A flight recorder: the digests of every step and replica in a log that a crash cuts off, and does not damage.

A log is text. Its first line, and the first one of each run that goes on with it, is JSON: ``{"gradcombine": "digests",
"version": 1, "leaves": [[name, dtype, shape], ...], "twins": [name, ...]}``. Every other line is one step of one
replica: the step, the replica (``*`` for all of them), and 16 hexadecimal digits a leaf: the two sums of
`gradcombine.digest`. Every line ends with the CRC-32 of what stands before its last space, in 8 such digits::

    12 0 8b2f1c04e9a7d35500c3aa19bb7e6d20 5d41402a
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import deque
from collections.abc import Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from gradcombine.backends.registry import dtype_of, owner
from gradcombine.digests import WORD, digested
from gradcombine.errors import (
    GradCombineError,
    attribute,
    invalid,
    operation,
    require_file,
    require_integer,
    require_items,
    require_path,
    shown,
)
from gradcombine.types import Array, Tree
from gradcombine.verify.record.trace import Recording, names

VERSION = 1
EVERY = -1
"""The number of a row that all replicas have."""

_BEGIN = b'{"gradcombine": "digests"'
_DIGITS = 16
"""Of a leaf's digest."""

_ROW = re.compile(rb"(\d{1,19}) (\*|\d{1,19}) ([0-9a-f]*)")
"""Step, replica and digests."""


class Leaf(NamedTuple):
    """A leaf of the recorded tree: its name, dtype and shape; None for a length that is not known."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class FlightRecorder(Recording):
    """Appends the digests of each step to a log.

    Args:
      path: of the log. One that is there goes on, if it is of the same leaves: a run that resumes.
      like: a tree as the digests are made of: arrays, specs or None; the names of its leaves are its keys.
      twins: names of subtrees that are the same on all replicas, such as ``["params"]``: `gradcombine diff` tells which
        replica's copy differs.
      behind: how many steps the log may be behind, so that the host waits for none that still runs; `close` writes
        them.

    Raises:
      GradCombineError: for a file that is something else, a log of other leaves, and twins that are not there.
      OSError: where the file cannot be opened or written.

    >>> import tempfile, numpy as np, gradcombine as gc
    >>> from gradcombine.verify import FlightRecorder
    >>> params = {"w": np.float32([1, 2]), "b": np.float32(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FlightRecorder(f"{folder}/run.log", params) as recorder:
    ...         for step in range(3):
    ...             recorder(step, gc.digest(params))
    ...     log = read_log(f"{folder}/run.log")
    >>> [leaf.name for leaf in log.leaves], sorted(log.rows)
    (['b', 'w'], [(0, -1), (1, -1), (2, -1)])
    """

    name = "FlightRecorder"

    @operation("FlightRecorder")
    def __init__(self, path: str | os.PathLike[str], like: Tree, *, twins: Sequence[str] = (), behind: int = 1) -> None:
        super().__init__()
        self._leaves = _leaves_of(like)
        known = [leaf.name for leaf in self._leaves]
        expected = f"twins among {', '.join(known[:8])}"
        twins = require_items(expected, twins)
        for twin in twins:
            if not isinstance(twin, str) or not any(_within(name, twin) for name in known):
                raise invalid(expected, shown(twin))
        self._behind = require_integer("0 steps or more that it may be behind", behind, 0)
        self._pending = deque[tuple[int, Tree]]()
        self._file, self._closed = _opened(require_path("a path", path), self._leaves), False
        header = {"gradcombine": "digests", "version": VERSION, "leaves": self._leaves, "twins": twins}
        self._write(json.dumps(header).encode())

    @operation("FlightRecorder")
    def __call__(self, step: Array, digests: Tree, replica: Array = None) -> None:
        """Records a step.

        Called with known values, it takes the digests of one replica (leaves, 2), of several (replicas, leaves, 2), a
        list of them, or what tf.distribute returns; of a jax.Array that is replicated on several devices, each one's
        copy, by the number of the device. Rows that are all the same are written as one for all replicas. In a traced
        JAX program, or a tf.function without jit_compile, one replica's are written by a callback as the program runs.

        Args:
          step: its number, from 0 on.
          digests: what `gradcombine.digest` made of the tree.
          replica: whose they are, an integer scalar that may be traced, as ``jax.lax.axis_index("data")`` in shard_map;
            None for all replicas, or as the digests tell.

        Raises:
          GradCombineError: for digests of other leaves.
        """
        self._require_step(step)
        who = np.int32(EVERY) if replica is None else replica
        if type(digests) not in (list, tuple) and any(map(_traced, (step, digests, who))):
            self._on_host(step, [digests, who], lambda step, arrays: self._record(step, {int(arrays[1]): arrays[0]}))
            return
        if replica is not None:
            digests = {require_integer("the number of a replica", replica, 0): digests}
        self._pending.append((int(step), digests))
        while len(self._pending) > self._behind:
            self._record(*self._pending.popleft())

    @operation("FlightRecorder")
    def close(self) -> None:
        """Writes what is left, waits for pending callbacks, and closes the file.

        Raises:
          GradCombineError: for digests of other leaves, or a step below 0, that a callback has met.
        """
        while self._pending:
            try:
                self._record(*self._pending.popleft())
            except GradCombineError as problem:  # the steps after it are written
                self._problems.append(problem)
        try:
            super().close()
        finally:
            if not self._closed:
                os.close(self._file)
            self._closed = True

    def _record(self, step: int, digests: Tree) -> None:
        rows = {replica: self._row(part) for replica, part in _by_replica(digests).items()}
        if len(rows) > 1 and len(set(rows.values())) == 1:
            rows = {EVERY: next(iter(rows.values()))}
        for replica, row in sorted(rows.items()):
            self._write(f"{step} {'*' if replica == EVERY else replica} {row}".encode())

    def _row(self, digests: Tree) -> str:
        array = _array(digests)
        if array.dtype != WORD or array.shape != (len(self._leaves), 2):
            expected = f"uint32 digests of {len(self._leaves)} leaves, of shape ({len(self._leaves)}, 2)"
            raise invalid(expected, f"{array.dtype} of shape {array.shape}")
        return array.astype(">u4").tobytes().hex()

    def _write(self, line: bytes) -> None:
        with self._lock:
            # One write a line: what a crash cuts off is the last one.
            os.write(self._file, b"%s %08x\n" % (line, zlib.crc32(line)))


def _leaves_of(like: Tree) -> tuple[Leaf, ...]:
    """The leaves that `gradcombine.digest` has digests of, in its order."""
    parts, structure = digested(like)
    known = names(structure, "")
    return tuple(_leaf(known[part.leaf].removeprefix("/") + part.suffix, part.array) for part in parts)


def _leaf(name: str, array: Array) -> Leaf:
    shape: Any = getattr(array, "shape", ())
    # A tensor's may be unknown, or in part.
    lengths = () if getattr(shape, "rank", 0) is None else tuple(None if n is None else int(n) for n in shape)
    return Leaf(name or "(root)", str(dtype_of(array)), lengths)


def _opened(path: Path, leaves: tuple[Leaf, ...]) -> int:
    """The log, to append to; a line that a crash has cut off ends here."""
    if path.exists():
        require_file("a log, or a path where nothing is", path)
    begun = path.exists() and path.stat().st_size > 0
    if begun and read_log(path).leaves != leaves:
        raise invalid("a log of the same leaves, or none", str(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
    if begun and not path.read_bytes().endswith(b"\n"):
        os.write(descriptor, b"\n")
    return descriptor


def _traced(array: Array) -> bool:
    backend = owner(array)
    return backend is not None and backend.concrete(backend.asarray(array)) is None


def _by_replica(digests: Tree) -> dict[int, Tree]:
    """One replica's digests each, by its number; `EVERY` where they are not told apart."""
    if isinstance(digests, dict):
        return cast("dict[int, Tree]", digests)
    shards = attribute(digests, "addressable_shards")
    if shards is not None and (len(shards) > 1 or not digests.is_fully_addressable):
        if digests.is_fully_replicated and digests.ndim == 2:
            return {shard.device.id: shard.data for shard in shards}
        parts: list[tuple[int, Tree]] = [(shard.index[0].start or 0, np.asarray(shard.data)) for shard in shards]
        return {start + i: row for start, rows in parts for i, row in enumerate(rows)}
    # A tf.distribute value has one of each replica.
    of_replicas = digests if (values := attribute(digests, "values")) is None else values
    if not isinstance(of_replicas, (list, tuple)) and (array := _array(of_replicas)).ndim != 3:
        return {EVERY: array}
    return dict(enumerate(cast("Sequence[Tree]", of_replicas)))


def _array(digests: Tree) -> np.ndarray:
    try:
        return np.asarray(digests)
    except Exception:  # NumPy has several, and a foreign class may have others
        raise invalid("digests of gradcombine.digest", shown(digests)) from None


def _within(name: str, tree_name: str) -> bool:
    return name == tree_name or name.startswith(f"{tree_name}/")


class Log(NamedTuple):
    """A log that was read.

    Attributes:
      content: the file.
      leaves: in the order of their digests.
      twins: whether each is the same on all replicas.
      rows: by step and replica, where the rows are in the file: the later ones are of runs that have resumed.
      damaged: the numbers of lines that cannot be read, from 1 on; the last one if a crash has cut it off.
    """

    content: mmap
    leaves: tuple[Leaf, ...]
    twins: tuple[bool, ...]
    rows: dict[tuple[int, int], list[int]]
    damaged: tuple[int, ...]

    @property
    def steps(self) -> list[int]:
        return sorted({step for step, _ in self.rows})

    def replicas(self, step: int) -> list[int]:
        """The replicas that a step was recorded of; `EVERY` if it is the same of all."""
        return sorted(replica for at, replica in self.rows if at == step)

    def digests(self, offset: int) -> list[str]:
        """The digests of a row, in hexadecimal."""
        digits = self.content[offset : self.content.find(b"\n", offset)].split(b" ")[2].decode()
        return [digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS)]


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a log of digests does."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


@operation("diff")
def read_log(path: str | os.PathLike[str]) -> Log:
    """Reads a log as far as its lines are whole; the rows themselves are read when they are asked for.

    Raises:
      GradCombineError: for a file that does not begin as a log does, one of a later version, and logs of several
        trees in one file.
    """
    path = require_file("a log of digests", path)
    header: dict[str, Any] = {}
    rows: dict[tuple[int, int], list[int]] = {}
    damaged: list[int] = []
    offset = 0
    with open(path, "rb") as file:
        if not path.stat().st_size:
            raise invalid("a log of digests", f"{path}, which is empty")
        whole = mmap(file.fileno(), 0, access=ACCESS_READ)
        for number, line in enumerate(file, 1):
            content = _checked(line)
            if number == 1 and not line.startswith(_BEGIN):
                raise invalid("two logs of digests", f"{path}, which is none")
            if content is None and not header:
                raise invalid("a log that begins with its leaves", f"{path}: line {number} is damaged")
            if content is None:
                damaged.append(number)
            elif content.startswith(b"{"):
                header = _header(path, content, header)
            else:
                row = _ROW.fullmatch(content)
                if row is None or len(row[3]) != _DIGITS * len(header["leaves"]):
                    raise invalid(f"{len(header['leaves'])} digests in line {number}", str(path))
                rows.setdefault((int(row[1]), EVERY if row[2] == b"*" else int(row[2])), []).append(offset)
            offset += len(line)
    leaves = tuple(Leaf(name, dtype, tuple(shape)) for name, dtype, shape in header["leaves"])
    twins = tuple(any(_within(leaf.name, twin) for twin in header["twins"]) for leaf in leaves)
    return Log(whole, leaves, twins, rows, tuple(damaged))


def _checked(line: bytes) -> bytes | None:
    """The content of a line; None if the line is not whole."""
    content, _, check = line.rpartition(b" ")
    return content if check.rstrip(b"\n") == b"%08x" % zlib.crc32(content) else None


def _header(path: Path, content: bytes, before: dict[str, Any]) -> dict[str, Any]:
    """The header in a line; ``before`` is the one that the log begins with."""
    expected = f"a log of digests, version {VERSION}, with leaves as name, dtype and shape, and twins as names"
    try:
        header: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(expected, f"{path}: {error}") from None
    match header:
        case {"gradcombine": "digests", "version": version, "leaves": [*leaves], "twins": [*twins]} if (
            version == VERSION
            and all(map(_is_leaf, leaves))
            and len({leaf[0] for leaf in leaves}) == len(leaves)
            and all(isinstance(twin, str) for twin in twins)
        ):
            if before and leaves != before["leaves"]:
                raise invalid("the same leaves throughout a log", f"others from some line of {path} on")
            return header
        case _:
            raise invalid(expected, f"{path}: {shown(header)}")


def _is_leaf(leaf: Any) -> bool:
    match leaf:
        case [str(), str(), [*lengths]]:
            return all(n is None or (type(n) is int and 0 <= n < 2**63) for n in lengths)
        case _:
            return False
