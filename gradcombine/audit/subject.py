"""A program under audit, as its readers give it to the rules: arrays, lines of source, loops and exchanges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

LIBRARIES = ("site-packages/", "dist-packages/", "/gradcombine/integrations/", "/gradcombine/backends/", "<frozen")
"""Parts of the paths of files whose lines are not the user's."""

REDUCING = {"all-reduce", "reduce-scatter"}
FEW_SCALARS = 256
"""Bytes below which an array is a number or a few: what it costs is not its size."""

COPIED = 1024
"""Bytes of an array from which on its copy counts."""

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


class Shape(NamedTuple):
    """An array of a program.

    Attributes:
      kind: its element type as HLO names it, for instance "f32".
      dims: its lengths.
      layout: what stands in braces behind them; empty where nothing does.
      exact: whether all lengths are known; one that is not is 1, and so is all where the number of lengths is not.
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
        """In memory; types of less than a byte are packed."""
        return (self.elements * self.bits + 7) // 8

    @property
    def bits(self) -> int:
        """Of an element."""
        return bits(self.kind)

    @property
    def is_float(self) -> bool:
        return self.kind.startswith(("f", "bf"))

    @property
    def is_narrow(self) -> bool:
        """Whether sums of many terms lose bits in it."""
        return self.is_float and self.bits < 32

    @property
    def space(self) -> int:
        """The memory it lies in: 0 is the device's main memory."""
        found = re.search(r"S\((\d+)\)", self.layout)
        return int(found[1]) if found else 0

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.dims))}]"


def bits(kind: str) -> int:
    """Of an element type.

    >>> [bits(kind) for kind in ("pred", "bf16", "f32", "s4", "f8e4m3fn", "c64")]
    [8, 16, 32, 4, 8, 64]
    """
    found = re.match(r"[a-z]+(\d+)", kind)
    return _BITS[kind] if kind in _BITS else int(found[1]) if found else 0


class Frame(NamedTuple):
    """A line of source that an operation came from."""

    file: str
    line: int
    function: str


class Operation(Protocol):
    """One operation of a program, as a reader gives it.

    Attributes:
      name: of its own.
      op_name: the framework's name, with the functions around it.
      collective: the kind of collective that begins here, as HLO names it; empty for anything else.
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
      operation: that turns it.
      trips: how often it turns; None where that is not known before it runs.
    """

    operation: X
    trips: int | None

    def __str__(self) -> str:
        return f"a loop of {'an unknown number of' if self.trips is None else self.trips} iterations"


class Exchange(NamedTuple, Generic[X]):
    """One collective of a program.

    Attributes:
      computation: it stands in.
      x: the operation that begins it.
      loops: around it.
      groups: of devices that take part together; empty where the program does not tell.
      operand: bytes that each device gives.
      result: bytes that each device gets.
      exact: whether both are known; where not, there are so many at least.
      label: the operation in the text of findings; empty where its line is enough.
    """

    computation: str
    x: X
    loops: tuple[Loop[X], ...]
    groups: list[tuple[int, ...]]
    operand: int
    result: int
    exact: bool = True
    label: str = ""

    @property
    def kind(self) -> str:
        return self.x.collective

    @property
    def size(self) -> int:
        """The bytes of the larger side."""
        return max(self.operand, self.result)

    @property
    def members(self) -> int:
        """Devices of a group; two where the program does not tell."""
        if self.kind == "collective-permute":
            return 2
        return max(map(len, self.groups), default=2)

    @property
    def times(self) -> int:
        return times(self.loops)

    @property
    def few(self) -> bool:
        """Whether each device gives a number or a few."""
        return self.exact and self.operand < FEW_SCALARS

    @property
    def over(self) -> str:
        return f"over {self.members if self.groups else 'an unknown number of'} devices"

    def __str__(self) -> str:
        least = "" if self.exact else "at least "
        return f"{self.kind} of {least}{size_text(self.size)} {self.over}" + f" ({self.label})" * bool(self.label)

    def sent(self) -> float:
        """Bytes that each device has to send, by the best known algorithms."""
        n = self.members
        if n == 1:
            return 0.0
        if self.kind == "all-reduce":
            return 2 * (n - 1) / n * self.operand
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.operand)
        return (n - 1) / n * self.size

    def leaves_host(self, per_host: int) -> tuple[int, float]:
        """The hosts that a group spans, and the bytes that each device sends to other ones."""
        hosts = max(len({device // per_host for device in group}) for group in self.groups or [(0,)])
        each = max(1, math.ceil(self.members / hosts))
        if hosts == 1:
            return 1, 0.0
        if self.kind == "all-reduce":
            return hosts, 2 * (hosts - 1) / hosts * self.operand / each
        if self.kind in ("all-gather", "reduce-scatter"):
            return hosts, (hosts - 1) / hosts * self.size / each
        return hosts, self.sent()


def times(loops: Iterable[Loop[X]]) -> int:
    """How often what stands in these loops runs; a loop of unknown length counts once."""
    return math.prod(1 if loop.trips is None else loop.trips for loop in loops)


T = TypeVar("T")


def walk(start: Iterable[T], onward: Callable[[T], Iterable[T]]) -> set[T]:
    """All that is reached from a start, which is among it, where ``onward`` gives what follows one."""
    seen = set(start)
    waiting = list(seen)
    while waiting:
        for other in onward(waiting.pop()):
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return seen


def size_text(size: float) -> str:
    """In the largest unit of which there is one at least.

    >>> [size_text(n) for n in (0, 1023, 1536, 3 * 2**30)]
    ['0 B', '1,023 B', '1.5 KiB', '3.0 GiB']
    """
    unit = 0
    while size >= 1024 and unit < 4:
        size, unit = size / 1024, unit + 1
    return f"{size:,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}" if unit else f"{size:,.0f} B"


def own_line(frames: Sequence[Frame]) -> str:
    """Of lines of source, the innermost first, the first one that is no library's, as "file:line"."""
    own = [frame for frame in frames if not any(part in frame.file for part in LIBRARIES)]
    return "".join(f"{frame.file}:{frame.line}" for frame in (own or frames)[:1] if frame.file)


def short(source: str) -> str:
    """A line of source as a screen shows it: from the working directory, or the file's name alone."""
    path, _, line = source.rpartition(":")
    if not path:
        return source
    file = Path(path)
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name}:{line}"


class Reduced(NamedTuple, Generic[X]):
    """An exchange of gradients of which nothing is made but sums.

    Attributes:
      exchange: which.
      loop: whose iterations add it up; None where calls do.
      size: bytes of the exchange's operands of which this holds.
    """

    exchange: Exchange[X]
    loop: Loop[X] | None
    size: float


class Subject(Protocol[X]):
    """A program, and what rules ask of it.

    Attributes:
      noun: its arrays that last from call to call.
      joins_sums: whether sums that do not wait for one another are exchanged together on its machine.
    """

    noun: str
    joins_sums: bool

    @cached_property
    def exchanges(self) -> list[Exchange[X]]:
        """All collectives, in the program's order."""
        ...

    @cached_property
    def reduced(self) -> list[Reduced[X]]:
        """The exchanges of gradients that a loop, or calls, only add up."""
        ...

    def source(self, x: X) -> str:
        """The line that an operation came from, "file:line"; empty where the program does not tell."""
        ...

    def loops(self) -> Iterable[tuple[Loop[X], int]]:
        """The loops of more than one iteration, and how often each is begun in a call."""
        ...

    def unrolled(self) -> Iterable[Sequence[Exchange[X]]]:
        """Groups of several exchanges that are only added to each other."""
        return ()

    def kept(self) -> Sequence[tuple[X, int]]:
        """Operations whose result a counter keeps or throws away although it is computed anew, and their bytes."""
        ...

    def could_join(self, exchange: Exchange[X]) -> bool:
        """Whether an exchange may be one with others beside it."""
        ...

    def unused(self, exchange: Exchange[X], loop: Loop[X]) -> bool:
        """Whether the iterations of a loop only add up or stack what is exchanged."""
        ...

    def beside(self, exchange: Exchange[X]) -> tuple[Hashable, ...]:
        """The place and devices of an exchange, and how many it waits for: equal for those that could be one."""
        ...

    def converted(self, exchange: Exchange[X]) -> Iterator[tuple[Shape, Shape]]:
        """Conversions right before an exchange: arrays before and after each."""
        ...

    def narrow_sums(self, loop: Loop[X] | None) -> Iterator[tuple[Shape, X]]:
        """Arrays of less than 32 bits that the iterations of a loop, or calls, only add to, and where they do."""
        ...

    def exchanged(self, exchange: Exchange[X]) -> Hashable:
        """The operands of an exchange and how they are exchanged; None where it is not known."""
        ...

    def is_equal(self, exchange: Exchange[X]) -> bool:
        """Whether an earlier exchange has made the operands of an exchange equal on its devices."""
        ...

    def one_turn(self, loop: Loop[X]) -> str:
        """How a loop of unknown length is counted; empty if nothing in it costs anything."""
        ...
