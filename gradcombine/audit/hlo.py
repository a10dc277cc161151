"""Reads optimized HLO, the form in which XLA prints a compiled program for CPU, GPU and TPU.

XLA's own parser, which jaxlib ships, gives neither shapes nor attributes to Python: these are read here from the text
that XLA's printer writes.
"""

from __future__ import annotations

import math
import re
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gradcombine.audit.subject import Frame, Shape
from gradcombine.errors import invalid

Device = tuple[int, ...]
"""Numbers of devices."""

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MOST_DEVICES = 2**20
"""Devices that a list of groups may name."""


class Instruction(NamedTuple):
    """One operation of a computation.

    Attributes:
      name: unique in its computation.
      shapes: of its result; all arrays of a tuple, in order.
      starts: where in them the elements of the outermost tuple begin.
      opcode: as HLO names it.
      operands: names of instructions of the same computation.
      inside: what stands in the parentheses behind the opcode of a constant or a parameter.
      attributes: what stands behind them.
      root: whether it gives the computation's result.
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
        """The first array of a tuple's element."""
        return self.starts[index] if index < len(self.starts) else index

    def called(self, *names: str) -> list[str]:
        """The computations that these attributes name."""
        found = re.findall(rf"\b(?:{'|'.join(names)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [name for group in found for name in re.findall(r"[\w.\-]+", group)]

    def number(self, name: str) -> int | None:
        """The attribute of this name."""
        found = re.search(rf"\b{name}=(\d+)", self.attributes)
        return int(found[1]) if found else None

    def lists(self, name: str) -> tuple[int, ...]:
        """The attribute of this name, numbers in braces; empty where there is none."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    @property
    def op_name(self) -> str:
        """The framework's name of the operation, with the functions around it."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @property
    def collective(self) -> str:
        """The kind of collective that begins here; empty for anything else."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""


class Alias(NamedTuple):
    """A result that is written where an argument lay; indexes of leaves."""

    output: tuple[int, ...]
    parameter: int


class Module:
    """A compiled program, from its text.

    Args:
      text: as XLA prints it, for instance ``compiled.as_text()``.

    Raises:
      GradCombineError: this is no HLO, or holds no entry.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.entry = ""
        header, _, _ = text.partition("\n")
        if not header.startswith("HloModule"):
            raise invalid("text of HLO, which begins with HloModule", header[:80] or "nothing")
        self.name = header.split(",")[0].removeprefix("HloModule ").strip()
        self._header = header
        self._queues = '"operation_queue_id"' in text
        self._tables: dict[str, dict[int, str]] = {}
        inside, table, instructions, reader = "", "", dict[str, Instruction](), _Reader()
        for found in re.finditer(r".+", text):  # one line at a time: a list of them is the text once more
            line = re.sub(r"/\*.*?\*/", "", found[0]) if "/*" in found[0] else found[0]
            if inside and line == "}":
                inside = ""
            elif inside and " = " in line:
                one = reader.instruction(line)
                instructions[one.name] = one
                if one.root:
                    self.roots[inside] = one.name
            elif begun := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line):
                inside, instructions = begun[2], {}
                self.computations[inside] = instructions
                self.entry = inside if begun[1] else self.entry
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = line
            elif table and (row := re.match(r"(\d+) (.*)", line)):
                self._tables.setdefault(table, {})[int(row[1])] = row[2]
        if inside or self.entry not in self.roots:
            raise invalid("HLO with a whole ENTRY computation", f"{self.name}, cut off")

    @cached_property
    def partitions(self) -> int:
        return self._count("num_partitions")

    @cached_property
    def replicas(self) -> int:
        return self._count("replica_count")

    @property
    def for_tpu(self) -> bool:
        """Whether its arrays are tiled as TPUs tile them."""
        return ":T(" in self._header

    @property
    def for_cpu(self) -> bool:
        """Whether nothing in it is a GPU's or a TPU's."""
        return not self.for_tpu and not self._queues

    @property
    def devices(self) -> int:
        """The number of devices that run the program together."""
        return self.partitions * self.replicas

    def _count(self, name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", self._header)
        return int(found[1]) if found else 1

    @cached_property
    def aliases(self) -> list[Alias]:
        """Results that take an argument's memory."""
        found = re.search(r"input_output_alias=\{(.*?)\ }", self._header)
        rows = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", found[1]) if found else []
        return [Alias(tuple(int(n) for n in index.split(",") if n.strip()), int(number)) for index, number in rows]

    @cached_property
    def donors(self) -> list[int]:
        """Arguments that were donated and that no result takes."""
        found = re.search(r"buffer_donor=\{(.*?)\ }", self._header)
        return [int(n) for n in re.findall(r"\((\d+), \{", found[1])] if found else []

    @property
    def root(self) -> Instruction:
        """Of the entry."""
        return self.computations[self.entry][self.roots[self.entry]]

    @cached_property
    def parameters(self) -> list[Instruction]:
        """Of the entry, in order."""
        found = (x for x in self.computations[self.entry].values() if x.opcode == "parameter")
        return sorted(found, key=lambda x: int(x.inside))

    @property
    def results(self) -> tuple[Shape, ...]:
        return self.root.shapes

    def frames(self, x: Instruction) -> list[Frame]:
        """The lines of source that an operation came from, the innermost first."""
        if plain := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', x.attributes):
            return [Frame(plain[1], int(plain[2] or 0), "")]
        found, frame = list[Frame](), x.number("stack_frame_id")
        # An operation is its own caller's frame only in damaged tables: each frame counts once.
        seen = set[int]()
        while frame and frame not in seen and (row := self._tables.get("StackFrames", {}).get(frame)):
            seen.add(frame)
            numbers = dict(re.findall(r"(\w+)=(\d+)", row))
            place = self._tables.get("FileLocations", {}).get(int(numbers.get("file_location_id", 0)), "")
            at = dict(re.findall(r"(\w+)=(\d+)", place))
            file = self._tables.get("FileNames", {}).get(int(at.get("file_name_id", 0)), "").strip('"')
            function = self._tables.get("FunctionNames", {}).get(int(at.get("function_name_id", 0)), "").strip('"')
            found.append(Frame(file, int(at.get("line", 0)), function))
            frame = int(numbers.get("parent_frame_id", 0))
        return found

    def groups(self, x: Instruction) -> list[Device]:
        """The devices that a collective joins; without a list, all of them."""
        return groups(x.attributes) or [tuple(range(self.devices))]


def groups(attributes: str) -> list[Device]:
    """The devices that exchange with each other, from any of the forms in which XLA writes them.

    >>> groups("replica_groups={{0,1},{2,3}}, dimensions={0}")
    [(0, 1), (2, 3)]
    >>> groups("replica_groups=[2,2]<=[2,2]T(1,0)")
    [(0, 2), (1, 3)]
    >>> groups("replica_groups=mesh['data'=2,'model'=2] {'model'}")
    [(0, 1), (2, 3)]
    >>> groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}")
    [(0, 2), (1, 3)]
    >>> groups("source_target_pairs={{0,1},{1,0}}")
    [(0, 1), (1, 0)]
    """
    if found := re.search(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}", attributes):
        return [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        order = iota(numbers(found[2]), found[3])
        return [tuple(map(int, row)) for row in order.reshape(numbers(found[1]))]
    if found := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes):
        axes = dict(re.findall(r"'?([^'=,]+)'?=(\d+)", found[1]))
        names, lengths = list(axes), [int(n) for n in axes.values()]
        chosen = re.findall(r"'?([\w.\-]+)'?(?:,|$)", found[3])
        ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", found[2])
        if (found[2].strip() and not ids) or not set(chosen) <= set(names):
            raise invalid("groups of whole axes of a mesh", found[0])
        order = iota(numbers(ids[1]), ids[2]) if ids else iota(tuple(lengths))
        rest = [i for i, name in enumerate(names) if name not in chosen]
        order = order.reshape(lengths).transpose(rest + [names.index(name) for name in chosen])
        size = math.prod(lengths[names.index(name)] for name in chosen)
        return [tuple(map(int, row)) for row in order.reshape(-1, size)]
    return []


class _Reader:
    """Reads instructions, of which many share names and shapes: each is kept once."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._shapes: dict[str, tuple[tuple[Shape, ...], tuple[int, ...]]] = {}

    def instruction(self, line: str) -> Instruction:
        head, rest = line.strip().split(" = ", 1)
        root, name = head.startswith("ROOT "), head.removeprefix("ROOT ").removeprefix("%")
        shape, rest = _balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
        opcode, rest = rest.strip().split("(", 1)
        inside, attributes = _balanced("(" + rest)
        if shape not in self._shapes:
            self._shapes[shape] = _shapes(shape)
        if opcode in ("constant", "parameter"):  # these hold values; all else names operands, with their shapes or not
            operands = ()
        else:
            operands = tuple(self._name(operand) for operand in re.findall(r"%([\w.\-]+)", inside))
            inside = "()"
        return Instruction(
            self._name(name), *self._shapes[shape], self._name(opcode), operands, inside[1:-1], attributes, root
        )

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, name)


def _shapes(text: str) -> tuple[tuple[Shape, ...], tuple[int, ...]]:
    shapes, starts, depth = list[Shape](), list[int](), 0
    for found in re.finditer(r"([()])|(\w+)\[([^\]]*)\](\{[^}]*\})?", text):
        if found[1] != ")" and depth == 1:
            starts.append(len(shapes))
        if found[1]:
            depth += 1 if found[1] == "(" else -1
        else:
            shapes.append(Shape(found[2], numbers(found[3].replace("<=", "")), found[4] or ""))
    return tuple(shapes), tuple(starts)


def _balanced(text: str) -> tuple[str, str]:
    """The part in the parentheses that the text begins with, and what follows."""
    depth, quoted = 0, False
    for found in re.finditer(r'\\.|["()]', text):
        at = found[0]
        quoted ^= at == '"'
        depth += 0 if quoted else {"(": 1, ")": -1}.get(at, 0)
        if depth == 0 and not quoted:
            return text[: found.end()], text[found.end() :]
    raise invalid("HLO with whole lines", text[:80])


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def iota(dims: tuple[int, ...], axes: str | None = None) -> np.ndarray:
    """Numbers of devices, counted along these lengths, with their axes in this order."""
    devices = math.prod(dims)
    if devices > MOST_DEVICES:
        raise invalid(f"groups of at most {MOST_DEVICES:,} devices", f"{devices:,}")
    order = np.arange(devices).reshape(dims)
    return order.transpose(numbers(axes)) if axes else order
