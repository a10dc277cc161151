"""The interface between programs and rules: arrays, source lines, loops and exchanges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

LIBRARIES = ("site-packages/", "dist-packages/", "/gradcombine/integrations/", "/gradcombine/backends/", "<frozen")
"""Parts of the paths of files that are not the user's code."""

REDUCING = {"all-reduce", "reduce-scatter"}
ADDING = {"add", "sum", ""}
"""Reductions that may be sums, as `Exchange.reduction`."""

FEW_SCALARS = 256
"""Arrays of fewer bytes are scalars or a few of them, whose cost does not depend on their size."""

SHARE = 0.05
"""Smallest fraction of a program's flops or bytes that is reported."""

COPIED = 1024
"""Fewest bytes of an array whose copy is relevant."""

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


class Shape(NamedTuple):
    """An array of a program.

    Attributes:
      kind: element type as HLO names it, for instance "f32".
      dims: lengths of the axes. Unknown lengths are 1; for an unknown rank, ``dims`` is empty.
      layout: text in braces after the shape, or empty.
      exact: whether all lengths are known.
    """

    kind: str
    dims: tuple[int, ...]
    layout: str = ""
    exact: bool = True

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in memory, where types narrower than a byte are packed."""
        return (self.elements * self.bits + 7) // 8

    @property
    def bits(self) -> int:
        """Width of an element.

        >>> [Shape(kind, ()).bits for kind in ("pred", "bf16", "f32", "s4", "f8e4m3fn", "c64")]
        [8, 16, 32, 4, 8, 64]
        """
        match = re.match(r"[a-z]+(\d+)", self.kind)
        return _BITS[self.kind] if self.kind in _BITS else int(match[1]) if match else 0

    @property
    def is_float(self) -> bool:
        return self.kind.startswith(("f", "bf"))

    @property
    def is_narrow(self) -> bool:
        """Whether it is a float type too narrow to accumulate in."""
        return self.is_float and self.bits < 32

    @property
    def space(self) -> int:
        """The memory space; 0 is the device's main memory."""
        match = re.search(r"S\((\d+)\)", self.layout)
        return int(match[1]) if match else 0

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.dims))}]"


Fact = Literal["donation", "compiled", "code", "exchanges", "shardings"]
"""A fact that may be unknown of a program: which buffers are donated, layouts and buffers (of a program that is not
compiled), parts of its code, the size or the groups of a collective, or how arguments are sharded."""

Facts = dict[Fact, list[str]]
"""Unknown facts, with descriptions for a report."""


class Frame(NamedTuple):
    """A stack frame of an operation in the source code."""

    file: str
    line: int
    function: str


class Operation(Protocol):
    """An operation of a program.

    Attributes:
      name: unique in its computation.
      op_name: the framework's name, with the enclosing functions.
      collective: type of the collective that starts here, as HLO names it; empty for other operations.
    """

    @property
    def name(self) -> str: ...
    @property
    def op_name(self) -> str: ...
    @property
    def collective(self) -> str: ...


X = TypeVar("X", bound=Operation)


@dataclass(eq=False)
class Loop(Generic[X]):
    """A loop.

    Attributes:
      operation: the loop operation.
      trips: number of iterations; None if it is unknown before running.
    """

    operation: X
    trips: int | None

    def __str__(self) -> str:
        return f"a loop of {'an unknown number of' if self.trips is None else self.trips} iterations"


class Exchange(NamedTuple, Generic[X]):
    """A collective of a program.

    Attributes:
      computation: that contains it.
      x: the operation that starts it.
      loops: enclosing loops.
      groups: of participating devices; empty if unknown.
      operand: bytes that each device contributes.
      result: bytes that each device receives.
      exact: whether both sizes are known; otherwise they are lower bounds.
      label: identifies the operation in findings; empty if its source line suffices.
      reduction: how it combines values, for instance "max"; empty if it does not, or if that is not shown.
    """

    computation: str
    x: X
    loops: tuple[Loop[X], ...]
    groups: list[tuple[int, ...]]
    operand: int
    result: int
    exact: bool = True
    label: str = ""
    reduction: str = ""

    @property
    def kind(self) -> str:
        return self.x.collective

    @property
    def size(self) -> int:
        """The larger of operand and result, in bytes."""
        return max(self.operand, self.result)

    @property
    def members(self) -> int:
        """Number of devices in a group; 2 if unknown."""
        if self.kind == "collective-permute":
            return 2
        return max(map(len, self.groups), default=2)

    @property
    def times(self) -> int:
        return times(self.loops)

    @property
    def negligible(self) -> bool:
        """Whether nothing is sent, or each device contributes only a few scalars."""
        return self.members == 1 or (self.exact and self.operand < FEW_SCALARS)

    @property
    def over(self) -> str:
        if self.kind == "collective-permute":
            return "between pairs of devices"
        return f"over {self.members if self.groups else 'an unknown number of'} devices"

    def __str__(self) -> str:
        least = "" if self.exact else "at least "
        return f"{self.kind} of {least}{size_text(self.size)} {self.over}" + f" ({self.label})" * bool(self.label)

    def sent(self) -> float:
        """Bytes that each device sends in an optimal algorithm."""
        n = self.members
        if n == 1:
            return 0.0
        if self.kind == "all-reduce":
            return 2 * (n - 1) / n * self.operand
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand)
        return (n - 1) / n * self.size

    def leaves_host(self, host: Callable[[int], int]) -> tuple[int, float]:
        """The number of hosts that a group spans, and the bytes that each device sends to other hosts."""
        hosts = max(len({host(device) for device in group}) for group in self.groups or [(0,)])
        on_host = max(1, math.ceil(self.members / hosts))
        if hosts == 1:
            return 1, 0.0
        if self.kind == "all-reduce":
            return hosts, 2 * (hosts - 1) / hosts * self.operand / on_host
        if self.kind in ("all-gather", "reduce-scatter"):
            return hosts, (hosts - 1) / hosts * self.size / on_host
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            return hosts, (self.members - on_host) / self.members * self.size
        return hosts, self.sent()


def times(loops: Iterable[Loop[X]]) -> int:
    """Executions per call of an operation in these loops; a loop with an unknown trip count counts once."""
    return math.prod(1 if loop.trips is None else loop.trips for loop in loops)


T = TypeVar("T")


def walk(start: Iterable[T], onward: Callable[[T], Iterable[T]]) -> set[T]:
    """Everything reachable from ``start``, inclusive, in the graph whose edges ``onward`` returns."""
    seen = set(start)
    waiting = list(seen)
    while waiting:
        for other in onward(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def size_text(size: float) -> str:
    """Formats a number of bytes in binary units.

    >>> [size_text(n) for n in (0, 1023, 1536, 3 * 2**30)]
    ['0 B', '1,023 B', '1.5 KiB', '3.0 GiB']
    """
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{size:,.0f} B"


def own_line(frames: Sequence[Frame]) -> str:
    """The innermost frame outside of libraries, or else the innermost one, as "file:line"; empty without a file."""
    users = [frame for frame in frames if not any(part in frame.file for part in LIBRARIES)]
    return "".join(f"{frame.file}:{frame.line}" for frame in (users or frames)[:1] if frame.file)


def short(source: str) -> str:
    """Shortens the path in "file:line": relative to the working directory, or else the file name."""
    path, _, line = source.rpartition(":")
    if not path:
        return source
    file = Path(path)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name}:{line}"


class Subject(Protocol[X]):
    """A program, with the queries of the rules.

    Attributes:
      noun: name for its persistent arrays in messages.
      merges_sums: whether the compiler or runtime merges independent all-reduces.
    """

    noun: str
    merges_sums: bool

    @cached_property
    def exchanges(self) -> list[Exchange[X]]:
        """All collectives, in program order."""
        ...

    @cached_property
    def reduced(self) -> list[tuple[Exchange[X], Loop[X] | None, float]]:
        """Exchanges of gradients that are only accumulated, over a loop or (None) over calls, and how many bytes."""
        reduced = list[tuple[Exchange[X], Loop[X] | None, float]]()
        for exchange in self.summing():
            sizes = ((exchange, loop, self.accumulated(exchange, loop)) for loop in (*exchange.loops, None))
            reduced += islice((each for each in sizes if each[2]), 1)
        return reduced

    def summing(self) -> list[Exchange[X]]:
        """Exchanges that add up more than a few scalars."""
        return [x for x in self.exchanges if x.kind in REDUCING and x.reduction in ADDING and not x.negligible]

    def accumulated(self, exchange: Exchange[X], loop: Loop[X] | None) -> float:
        """Bytes of an exchange's operands that iterations of a loop, or calls (None), only accumulate."""
        ...

    def source(self, x: X) -> str:
        """The source line of an operation, "file:line"; empty if unknown."""
        ...

    def loops(self) -> Iterable[tuple[Loop[X], int]]:
        """Loops of more than one iteration, and how often each is started per call."""
        ...

    def unrolled(self) -> Iterable[tuple[Sequence[Exchange[X]], int, float]]:
        """Exchanges of arrays that are only added to each other, their number, and unnecessary bytes sent per call."""
        ...

    def discarded(self) -> Sequence[tuple[X, int]]:
        """Operations that always run, but whose result a counter may discard, with the bytes of the result."""
        ...

    def could_merge(self, exchange: Exchange[X]) -> bool:
        """Whether an exchange could be merged with neighbouring ones."""
        ...

    def only_accumulated(self, exchange: Exchange[X], loop: Loop[X]) -> bool:
        """Whether the iterations of a loop only accumulate or stack the exchanged values."""
        ...

    def merge_key(self, exchange: Exchange[X]) -> tuple[Hashable, ...]:
        """A key that is equal for exchanges of one type that could be merged: place, devices, depth of dependencies."""
        ...

    def converted(self, exchange: Exchange[X]) -> Iterator[tuple[Shape, Shape]]:
        """Conversions directly before an exchange, as arrays before and after."""
        ...

    def narrow_sums(self, loop: Loop[X] | None) -> Iterator[tuple[Shape, X]]:
        """Accumulators of less than 32 bits, over a loop or (None) over calls, and the operations that add to them."""
        ...

    def operand_key(self, exchange: Exchange[X]) -> Hashable:
        """A key that is equal for exchanges of the same operands over the same devices; None if unknown."""
        ...

    def equal_bytes(self, exchange: Exchange[X]) -> float:
        """Bytes of an exchange's operands that are identical on its devices due to an earlier exchange."""
        ...

    def counted_once(self, loop: Loop[X]) -> str:
        """Describes a loop with an unknown trip count for a finding; empty if its body is negligible."""
        ...
