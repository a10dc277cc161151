"""A flight recorder: digests of every step and replica, in a log of which a crash can truncate only the last line.

A log is text. Its first line, and the first one of each run that continues it, is JSON: ``{"gradcombine": "digests",
"version": 1, "leaves": [[name, dtype, shape], ...], "twins": [name, ...]}``. Every other line is one step of one
replica: the step, the replica (``*`` for all of them), and 16 hexadecimal digits per leaf: the two sums of
`gradcombine.digest`. Every line ends with a space and the CRC-32 of the text before it, in 8 hexadecimal digits::

    12 0 8b2f1c04e9a7d35500c3aa19bb7e6d20 5d41402a
"""

from __future__ import annotations

import json
import os
import re
import weakref
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import accumulate
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
"""Replica number of a row for all replicas."""

_BEGIN = b'{"gradcombine": "digests"'
_DIGITS = 16
"""Hexadecimal digits per leaf."""

_ROW = re.compile(rb"(\d{1,19}) (\*|\d{1,19}) ([0-9a-f]*)")
"""Step, replica and digests."""


class Leaf(NamedTuple):
    """Name, dtype and shape of a leaf of the recorded tree; unknown lengths are None."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]


class FlightRecorder(Recording):
    """Appends the digests of each step to a log.

    Args:
      path: path of the log. An existing log of the same leaves is continued, for runs that resume.
      like: a pytree with the structure of the digested one: arrays, specs or None; its keys name the leaves.
      twins: names of subtrees that have to be the same on all replicas, such as ``["params"]``: `gradcombine diff`
        reports which replica's copy differs.
      behind: number of steps by which writing is delayed, so that the host does not wait for a running step; `close`
        writes the remaining ones.

    Raises:
      GradCombineError: for a file that is not a log, a log of other leaves, and twins that are not in the tree.
      OSError: if the file cannot be opened or written.

    >>> import tempfile, numpy as np, gradcombine as gc
    >>> from gradcombine.verify import FlightRecorder
    >>> params = {"w": np.float32([1, 2]), "b": np.float32(0)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with FlightRecorder(f"{folder}/run.log", params) as recorder:
    ...         for step in range(3):
    ...             recorder(step, gc.digest(params))
    ...     log = read_log(f"{folder}/run.log")
    >>> [leaf.name for leaf in log.leaves], sorted(log.rows)
    (['b', 'w'], [0, 1, 2])
    """

    name = "FlightRecorder"

    @operation("FlightRecorder", renames=True)
    def __init__(self, path: str | os.PathLike[str], like: Tree, *, twins: Sequence[str] = (), behind: int = 1) -> None:
        super().__init__()
        self._leaves = _leaves_of(like)
        leaf_names = [leaf.name for leaf in self._leaves]
        expected = f"twins among {', '.join(leaf_names[:8])}"
        twins = require_items(expected, twins)
        subtrees = {subtree for name in leaf_names for subtree in _subtrees(name)}
        for twin in twins:
            if not isinstance(twin, str) or twin not in subtrees:
                raise invalid(expected, shown(twin))
        self._behind = require_integer("an integer of 0 or more as behind", behind, 0)
        self._pending = deque[tuple[int, Tree]]()
        self._file, self._is_cut_off = _open(require_path("a path", path), self._leaves)
        weakref.finalize(self, self._file.close)  # without a warning, if `close` is never called
        header = {"gradcombine": "digests", "version": VERSION, "leaves": self._leaves, "twins": twins}
        self._write(json.dumps(header).encode())

    @operation("FlightRecorder")
    def __call__(self, step: Array, digests: Tree, replica: Array = None) -> None:
        """Records a step.

        Concrete digests may be those of one replica, of shape (leaves, 2), those of several, of shape
        (replicas, leaves, 2), a list with one element per replica, a dict by replica number, or a per-replica value of
        tf.distribute. For a jax.Array that is replicated on several devices, each device's copy is recorded under the
        device's number. If all rows are equal, one row for all replicas is written. In a traced JAX program, or a
        tf.function without jit_compile, a host callback writes the digests of one replica as the program runs.

        Args:
          step: number of the step, 0 or more.
          digests: result of `gradcombine.digest`.
          replica: number of the replica, an integer scalar that may be traced, such as ``jax.lax.axis_index("data")``
            in shard_map; None: all replicas, or as implied by ``digests``.

        Raises:
          GradCombineError: for digests of other leaves.
        """
        self._require_open()
        self._require_step(step)
        if isinstance(digests, dict):
            digests = {_replica(number): part for number, part in cast("dict[Any, Tree]", digests).items()}
        number = np.int32(EVERY) if replica is None else replica
        if type(digests) not in (list, tuple) and any(map(_is_traced, (step, digests, number))):

            def write(step: int, arrays: Sequence[np.ndarray]) -> None:
                self._record(step, {EVERY if replica is None else _replica(arrays[1]): arrays[0]})

            self._on_host(step, [digests, number], write)
            return
        digests = _copied(digests)
        self._pending.append((int(step), digests if replica is None else {_replica(replica): digests}))
        while len(self._pending) > self._behind:
            self._record(*self._pending.popleft())

    @operation("FlightRecorder")
    def close(self) -> None:
        """Writes the remaining steps, waits for pending callbacks, and closes the file.

        Raises:
          GradCombineError: for digests of other leaves, or a negative step, in a pending step or a callback.
        """
        if self._is_closed:
            return
        while self._pending:
            try:
                self._record(*self._pending.popleft())
            except GradCombineError as error:  # later steps are still written
                self._errors.append(error)
        try:
            super().close()
        finally:
            self._file.close()

    def _record(self, step: int, digests: Tree) -> None:
        require_integer("a step below 2**63", step, 0, 2**63 - 1)
        rows = {replica: self._row(part) for replica, part in _by_replica(digests).items()}
        if not rows:
            raise invalid("digests of one replica or more", "none")
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
            # Unbuffered, so that a crash can truncate only the last line.
            remaining = b"\n" * self._is_cut_off + b"%s %08x\n" % (line, zlib.crc32(line))
            while remaining:
                written = self._file.write(remaining)  # fewer bytes if the disk is full; the next call raises then
                self._is_cut_off = written < len(remaining)
                remaining = remaining[written:]


def _leaves_of(like: Tree) -> tuple[Leaf, ...]:
    """Leaves digested by `gradcombine.digest`, in its order."""
    parts, structure = digested(like)
    leaf_names = names(structure, "")
    return tuple(_leaf(leaf_names[part.leaf].removeprefix("/") + part.suffix, part.array) for part in parts)


def _leaf(name: str, array: Array) -> Leaf:
    shape: Any = getattr(array, "shape", ())
    # The shape of a TensorFlow tensor may be unknown or partially known.
    lengths = () if getattr(shape, "rank", 0) is None else tuple(None if n is None else int(n) for n in shape)
    return Leaf(name or "(root)", str(dtype_of(array)), lengths)


def _open(path: Path, leaves: tuple[Leaf, ...]) -> tuple[FileIO, bool]:
    """Opens a log for appending; returns whether its last line is truncated. Clears a log without a complete line."""
    is_cut_off = False
    if path.exists() and require_file("a log, or a path without a file", path).stat().st_size:
        with open(path, "rb") as file:
            first = file.readline()
        if not first.endswith(b"\n") and (first.startswith(_BEGIN) or _BEGIN.startswith(first)):
            os.truncate(path, 0)
        else:
            log = read_log(path)
            if log.leaves != leaves:
                raise invalid("a log of the same leaves, or a new path", str(path))
            is_cut_off = log.content[-1:] != b"\n"
    return FileIO(path, "a"), is_cut_off


def _replica(number: Array) -> int:
    return require_integer("the number of a replica", number, 0)


def _copied(digests: Tree) -> Tree:
    """Copies NumPy arrays, which the caller may overwrite before they are written."""
    if isinstance(digests, dict):
        return {number: _copied(part) for number, part in cast("dict[int, Tree]", digests).items()}
    if isinstance(digests, (list, tuple)):
        return [_copied(part) for part in cast("Sequence[Tree]", digests)]
    return np.array(cast("np.ndarray", digests)) if isinstance(digests, np.ndarray) else digests


def _is_traced(array: Array) -> bool:
    backend = owner(array)
    return backend is not None and backend.concrete(backend.asarray(array)) is None


def _by_replica(digests: Tree) -> dict[int, Tree]:
    """Splits digests by replica number; `EVERY` if they do not distinguish replicas."""
    if isinstance(digests, dict):
        return cast("dict[int, Tree]", digests)
    shards = attribute(digests, "addressable_shards")
    if shards is not None and (len(shards) > 1 or not digests.is_fully_addressable):
        if digests.is_fully_replicated and digests.ndim == 2:
            return {shard.device.id: shard.data for shard in shards}
        parts: list[tuple[int, Tree]] = [(shard.index[0].start or 0, np.asarray(shard.data)) for shard in shards]
        return {start + i: row for start, rows in parts for i, row in enumerate(rows)}
    values = attribute(digests, "values")  # of a PerReplica value of tf.distribute
    by_replica = digests if values is None else values
    if not isinstance(by_replica, (list, tuple)) and (array := _array(by_replica)).ndim != 3:
        return {EVERY: array}
    return dict(enumerate(cast("Sequence[Tree]", by_replica)))


def _array(digests: Tree) -> np.ndarray:
    try:
        return np.asarray(digests)
    except Exception:  # of any class, for foreign objects
        raise invalid("digests of gradcombine.digest", shown(digests)) from None


def _subtrees(name: str) -> Iterator[str]:
    """The names of the subtrees that contain a leaf, and its own."""
    return accumulate(name.split("/"), "{}/{}".format)


class Log(NamedTuple):
    """A log that was read.

    Attributes:
      content: the file, memory-mapped.
      leaves: leaves in the order of their digests.
      twins: for each leaf, whether it has to be the same on all replicas.
      rows: offsets of the rows in the file, by step and replica; a run that resumed may add rows for a step.
      damaged: numbers, from 1, of lines that cannot be read, such as a truncated last line.
    """

    content: mmap
    leaves: tuple[Leaf, ...]
    twins: tuple[bool, ...]
    rows: dict[int, dict[int, list[int]]]
    damaged: tuple[int, ...]

    def digests(self, offset: int) -> list[str]:
        """Hexadecimal digests of the row at this offset, one per leaf."""
        digits = self.content[offset : self.content.find(b"\n", offset)].split(b" ")[2].decode()
        return [digits[i : i + _DIGITS] for i in range(0, len(digits), _DIGITS)]

    def at(self, step: int) -> dict[int, list[str]]:
        """Digests by replica, `EVERY` for all replicas; of a repeated step those of the later row.

        A row of all replicas replaces the earlier rows of each.
        """
        latest = {replica: offsets[-1] for replica, offsets in self.rows[step].items()}
        begin = latest.get(EVERY, 0)
        return {replica: self.digests(offset) for replica, offset in latest.items() if offset >= begin}

    def history(self, step: int) -> dict[int, list[int]]:
        """Offsets of all rows of each replica, in the order of the file; under `EVERY` if none has a number."""
        rows = self.rows[step]
        numbered = {replica: offsets for replica, offsets in rows.items() if replica != EVERY}
        common = rows.get(EVERY, [])
        return {replica: sorted([*offsets, *common]) for replica, offsets in numbered.items()} or {EVERY: common}


def is_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file starts like a log of digests."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_BEGIN)) == _BEGIN


@operation("diff")
def read_log(path: str | os.PathLike[str]) -> Log:
    """Reads the complete lines of a log; digests are parsed on demand, by `Log.digests`.

    Raises:
      GradCombineError: for a file that does not start like a log, a log of another version, and logs of several trees
        in one file.
    """
    path = require_file("a log of digests", path)
    if not path.stat().st_size:
        raise invalid("a log of digests", f"{path}, which is empty")
    if not is_log(path):
        raise invalid("a log of digests", f"{path}, which is not a log")
    with open(path, "rb") as file:
        mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
    header: dict[str, Any] = {}
    rows: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    damaged: list[int] = []
    for number, line in enumerate(iter(mapped.readline, b""), 1):
        content, _, checksum = line.rpartition(b" ")
        if checksum.rstrip(b"\n") != b"%08x" % zlib.crc32(content):
            damaged.append(number)
            if not header:
                raise invalid("a log that begins with its leaves", f"{path}: line {number} is damaged")
        elif content.startswith(b"{"):
            header = _header(path, content, header)
        else:
            row = _ROW.fullmatch(content)
            if row is None or len(row[3]) != _DIGITS * len(header["leaves"]):
                raise invalid(f"{len(header['leaves'])} digests in line {number}", str(path))
            rows[int(row[1])][EVERY if row[2] == b"*" else int(row[2])].append(mapped.tell() - len(line))
    leaves = tuple(Leaf(name, dtype, tuple(shape)) for name, dtype, shape in header["leaves"])
    declared = frozenset(header["twins"])
    twins = tuple(not declared.isdisjoint(_subtrees(leaf.name)) for leaf in leaves)
    by_step = {step: dict(sorted(rows[step].items())) for step in sorted(rows)}
    return Log(mapped, leaves, twins, by_step, tuple(damaged))


def _header(path: Path, content: bytes, first: dict[str, Any]) -> dict[str, Any]:
    """Parses a header line, which has to have the leaves of the log's first header."""
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
            if first and leaves != first["leaves"]:
                raise invalid("the same leaves throughout a log", f"{path}, where a later header has other leaves")
            return header | {"twins": [*twins, *first.get("twins", ())]}
        case _:
            raise invalid(expected, f"{path}: {shown(header)}")


def _is_leaf(leaf: Any) -> bool:
    match leaf:
        case [str(), str(), [*lengths]]:
            return all(n is None or (type(n) is int and 0 <= n < 2**63) for n in lengths)
        case _:
            return False
