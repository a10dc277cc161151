"""Reads optimized HLO as text, XLA's output for compiled programs on CPU, GPU and TPU.

The parser in jaxlib does not expose shapes and attributes to Python, so they are parsed here.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from sys import intern
from typing import NamedTuple

import numpy as np

from gradcombine.audit.subject import Frame, Shape
from gradcombine.errors import invalid

Device = tuple[int, ...]
"""Indices of devices that form a group."""

COLLECTIVES = {
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}
MOST_DEVICES = 2**20
"""Most devices in a list of groups."""


class Instruction(NamedTuple):
    """An instruction of a computation.

    Attributes:
      name: unique in its computation.
      shapes: of its result; for a tuple, of all arrays in order.
      starts: indices in ``shapes`` at which the elements of the outermost tuple begin.
      opcode: as HLO names it.
      operands: names of instructions of the same computation.
      inside: text in parentheses after the opcode of a constant (its value) or a parameter (its index).
      attributes: text after the parentheses.
      root: whether it is the computation's result.
    """

    name: str
    shapes: tuple[Shape, ...]
    starts: tuple[int, ...]
    opcode: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(shape.bytes for shape in self.shapes)

    def leaf(self, index: int) -> int:
        """Index in ``shapes`` of the first array of a tuple element."""
        return self.starts[index] if index < len(self.starts) else index

    def called(self, *names: str) -> list[str]:
        """Names of the computations in these attributes."""
        values = re.findall(rf"\b(?:{'|'.join(names)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [name for value in values for name in re.findall(r"[\w.\-]+", value)]

    def number(self, name: str) -> int | None:
        """The integer attribute of this name."""
        match = re.search(rf"\b{name}=(\d+)", self.attributes)
        return int(match[1]) if match else None

    def lists(self, name: str) -> tuple[int, ...]:
        """The attribute of this name, a list of integers; empty if missing."""
        match = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return numbers(match[1]) if match else ()

    @property
    def op_name(self) -> str:
        """The framework's name of the operation, with the enclosing functions."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1].replace("\\'", "'") if match else ""

    @property
    def collective(self) -> str:
        """The type of collective that starts here; empty for other instructions."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""


class Module:
    """A compiled program, parsed from its text.

    Args:
      text: as XLA prints it, for instance ``compiled.as_text()``.

    Raises:
      GradCombineError: for text that is not HLO or has no entry computation.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, Instruction] = {}
        self.entry = ""
        self._header, _, _ = text.partition("\n")
        if not self._header.startswith("HloModule"):
            raise invalid("text of HLO, which begins with HloModule", self._header[:80] or "nothing")
        self.name = self._header.split(",")[0].removeprefix("HloModule ").strip()
        self._queues = '"operation_queue_id"' in text
        self._tables = defaultdict[str, dict[int, str]](dict)
        current, table, instructions, shapes = "", "", dict[str, Instruction](), dict[str, Shapes]()
        for match in re.finditer(r".+", text):  # not splitlines, which would copy the text
            line = re.sub(r"/\*.*?\*/", "", match[0]) if "/*" in match[0] else match[0]
            if current and line == "}":
                current = ""
            elif current and " = " in line:
                instruction = _instruction(line, shapes)
                instructions[instruction.name] = instruction
                if instruction.root:
                    self.roots[current] = instruction
            elif header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
                current, instructions = header[2], {}
                self.computations[current] = instructions
                self.entry = current if header[1] else self.entry
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif table and (row := re.match(r"(\d+) (.*)", line)):
                self._tables[table][int(row[1])] = row[2]
        if current or self.entry not in self.roots:
            raise invalid("HLO with a complete ENTRY computation", f"{self.name}, truncated")

    @property
    def for_tpu(self) -> bool:
        """Whether it is compiled for TPU: its layouts are tiled."""
        return ":T(" in self._header

    @property
    def for_cpu(self) -> bool:
        """Whether it is compiled for CPU: it lacks the marks of GPU and TPU programs."""
        return not self.for_tpu and not self._queues

    @cached_property
    def devices(self) -> int:
        """Number of devices that run the program together."""
        return math.prod(map(int, re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self._header)))

    @cached_property
    def aliases(self) -> dict[int, int]:
        """The parameters whose buffers results reuse, by the index in `results`."""
        match = re.search(r"input_output_alias=\{(.*?)\ }", self._header)
        rows = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", match[1]) if match else []
        indices = [(list(map(int, re.findall(r"\d+", index))) or [0], int(number)) for index, number in rows]
        return {self.roots[self.entry].leaf(outer) + sum(inner): number for (outer, *inner), number in indices}

    @cached_property
    def donors(self) -> list[int]:
        """Numbers of donated parameters whose buffers no result reuses."""
        match = re.search(r"buffer_donor=\{(.*?)\ }", self._header)
        return [int(n) for n in re.findall(r"\((\d+), \{", match[1])] if match else []

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Parameters of the entry computation, in order."""
        unordered = (x for x in self.computations[self.entry].values() if x.opcode == "parameter")
        return sorted(unordered, key=lambda x: int(x.inside))

    @property
    def results(self) -> tuple[Shape, ...]:
        return self.roots[self.entry].shapes

    def frames(self, x: Instruction) -> list[Frame]:
        """The stack frames of an operation, innermost first."""
        if plain := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', x.attributes):
            return [Frame(plain[1], int(plain[2] or 0), "")]
        frames, frame = list[Frame](), x.number("stack_frame_id")
        seen = set[int]()  # frames of a damaged table may form a cycle
        while frame and frame not in seen and (row := self._tables["StackFrames"].get(frame)):
            seen.add(frame)
            numbers = dict(re.findall(r"(\w+)=(\d+)", row))
            place = self._tables["FileLocations"].get(int(numbers.get("file_location_id", 0)), "")
            location = dict(re.findall(r"(\w+)=(\d+)", place))
            file = self._tables["FileNames"].get(int(location.get("file_name_id", 0)), "").strip('"')
            function = self._tables["FunctionNames"].get(int(location.get("function_name_id", 0)), "").strip('"')
            frames.append(Frame(file, int(location.get("line", 0)), function))
            frame = int(numbers.get("parent_frame_id", 0))
        return frames

    def groups(self, x: Instruction) -> list[Device]:
        """The groups of devices of a collective, or a permutation's pairs; a group of all devices if none is listed."""
        everywhere = [] if x.collective == "collective-permute" else [tuple(range(self.devices))]
        return groups(x.attributes) or everywhere


def groups(attributes: str) -> list[Device]:
    """Parses the groups of devices that exchange with each other, in any of XLA's notations.

    >>> groups("replica_groups={{0,1},{2,3}}, dimensions={0}")
    [(0, 1), (2, 3)]
    >>> groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    [(0, 2), (1, 3)]
    >>> groups("replica_groups=mesh['data'=2,'model'=2] {'model'}")
    [(0, 1), (2, 3)]
    >>> groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}")
    [(0, 2), (1, 3)]
    >>> groups("replica_groups=mesh['a'=8] {'a':(2)2}")
    [(0, 2), (1, 3), (4, 6), (5, 7)]
    >>> groups("source_target_pairs={{0,1},{1,0}}")
    [(0, 1), (1, 0)]
    """
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", attributes):
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        order = iota(numbers(match[2]), match[3])
        return [tuple(map(int, row)) for row in order.reshape(numbers(match[1]))]
    if match := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes):
        return _along_axes(match)
    return []


def _along_axes(match: re.Match[str]) -> list[Device]:
    """Parses groups along axes of a mesh, or along parts of them: the axes, the devices if permuted, and those chosen.

    An axis of length 8 is split as 4, 2, 1 by its part (4)2, of length 2 after a major part of length 4.
    """
    axes = {name: int(n) for name, n in re.findall(r"'?([^'=,]+)'?=(\d+)", match[1])}
    chosen = re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", match[3])
    ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", match[2])
    if (match[2].strip() and not ids) or not {name for name, _, _ in chosen} <= set(axes):
        raise invalid("groups of mesh axes", match[0])
    parts = [(name, int(start or 1), int(start or 1) * int(size or axes[name])) for name, start, size in chosen]
    pieces, lengths = list[tuple[str, int]](), list[int]()
    for name, n in axes.items():
        cuts = sorted({1, n, *(cut for other, *ends in parts if other == name for cut in ends)})
        for start, end in pairwise(cuts):
            pieces.append((name, start))
            lengths.append(end // start if start and end % start == 0 else 0)
    grouped = [i for x, start, end in parts for i, (name, at) in enumerate(pieces) if x == name and start <= at < end]
    order = iota(numbers(ids[1]), ids[2]) if ids else iota(tuple(axes.values()))
    if math.prod(lengths) != order.size or len({*grouped}) < len(grouped):
        raise invalid("groups of mesh axes", match[0])
    rest = [i for i in range(len(pieces)) if i not in grouped]
    size = math.prod(lengths[i] for i in grouped)
    return [tuple(map(int, row)) for row in order.reshape(lengths).transpose(rest + grouped).reshape(-1, size)]


Shapes = tuple[tuple[Shape, ...], tuple[int, ...]]
"""The arrays in a shape, in order, and the indices at which the elements of the outermost tuple begin."""


def _instruction(line: str, known: dict[str, Shapes]) -> Instruction:
    """Parses an instruction; equal names, and the shapes in ``known``, are shared to save memory."""
    head, rest = line.strip().split(" = ", 1)
    root, name = head.startswith("ROOT "), head.removeprefix("ROOT ").removeprefix("%")
    shape, rest = _balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    inside, attributes = _balanced("(" + rest)
    if shape not in known:
        known[shape] = _shapes(shape)
    if opcode in ("constant", "parameter"):  # others have operands in the parentheses, with or without shapes
        operands = ()
    else:
        operands = tuple(map(intern, re.findall(r"%([\w.\-]+)", inside)))
        inside = "()"
    return Instruction(intern(name), *known[shape], intern(opcode), operands, inside[1:-1], attributes, root)


def _shapes(text: str) -> Shapes:
    shapes, starts, depth = list[Shape](), list[int](), 0
    for match in re.finditer(r"([()])|(\w+)\[([^\]]*)\](\{[^}]*\})?", text):
        if match[1] != ")" and depth == 1:
            starts.append(len(shapes))
        if match[1]:
            depth += 1 if match[1] == "(" else -1
        else:
            shapes.append(Shape(match[2], numbers(match[3].replace("<=", "")), match[4] or ""))
    return tuple(shapes), tuple(starts)


def _balanced(text: str) -> tuple[str, str]:
    """Splits text after the closing parenthesis that matches its first character."""
    depth, quoted = 0, False
    for match in re.finditer(r'\\.|["()]', text):
        quoted ^= match[0] == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0 and not quoted:
            return text[: match.end()], text[match.end() :]
    raise invalid("HLO with balanced parentheses", text[:80])


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def iota(dims: tuple[int, ...], axes: str | None = None) -> np.ndarray:
    """Device indices of HLO's iota notation: a range of shape ``dims``, transposed by ``axes`` if that is not None."""
    count = math.prod(dims)
    if count > MOST_DEVICES:
        raise invalid(f"groups of at most {MOST_DEVICES:,} devices", f"{count:,}")
    devices = np.arange(count).reshape(dims)
    return devices.transpose(numbers(axes)) if axes else devices
