"""Reads optimized HLO, the form in which XLA prints a compiled program for CPU, GPU and TPU.

XLA's own parser, which jaxlib ships, gives neither shapes nor attributes to Python: these are read here from the text
that XLA's printer writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gradcombine.audit.elements import Frame, Instruction, Loop, Shape
from gradcombine.errors import GradCombineError

Device = tuple[int, ...]
"""Numbers of devices."""

MOST_DEVICES = 2**20
"""That a list of groups may name."""


Loops = tuple[Loop[Instruction], ...]
"""Those around an operation, the outermost first."""


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
            raise GradCombineError("audit", "text of HLO, which begins with HloModule", header[:80] or "nothing")
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
            raise GradCombineError("audit", "HLO with a whole ENTRY computation", f"{self.name}, cut off")

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

    def trips(self, computation: str, x: Instruction) -> int | None:
        """How often a loop turns; None where it is not known while compiling."""
        if known := re.search(r'known_trip_count":\s*\{"n":\s*"(\d+)"', x.attributes):
            return int(known[1])
        return self._counted(computation, x)

    def turns_at_most_once(self, x: Instruction) -> bool:
        """Whether a loop is a branch: its condition is a flag that its body takes away."""
        condition, body = (self.computations[x.called(name)[0]] for name in ("condition", "body"))
        flag = condition[self.roots[x.called("condition")[0]]]
        root = body[self.roots[x.called("body")[0]]]
        if flag.opcode != "get-tuple-element" or root.opcode != "tuple":
            return False
        after = self.origin(body, root.operands[flag.number("index") or 0])
        return after.opcode == "constant" and after.inside == "false"

    def repeats(self, computation: str, x: Instruction) -> bool:
        """Whether this is a loop that turns more than once, as far as that is known."""
        if x.opcode != "while":
            return False
        trips = self.trips(computation, x)
        return trips > 1 if trips is not None else not self.turns_at_most_once(x)

    def executed(self, name: str = "", loops: Loops = ()) -> Iterator[tuple[str, Instruction, Loops]]:
        """All operations, their computations and the loops that repeat them; what a fusion holds is one operation."""
        name = name or self.entry
        for x in self.computations[name].values():
            yield name, x, loops
            if x.opcode == "while":
                inner = (*loops, Loop(x, self.trips(name, x))) if self.repeats(name, x) else loops
                for body in x.called("body"):
                    yield from self.executed(body, inner)
            elif x.opcode in ("conditional", "call", "async-start"):
                for body in self.bodies(x):
                    yield from self.executed(body, loops)

    @staticmethod
    def bodies(x: Instruction) -> list[str]:
        """The computations that an operation other than a loop runs, or may run; a false branch before a true one."""
        return x.called("branch_computations") or [
            *x.called("false_computation"),
            *x.called("true_computation"),
            *x.called("to_apply", "calls"),
        ]

    def origin(self, of: dict[str, Instruction], name: str) -> Instruction:
        """The instruction whose value an operation copies, reshapes or converts."""
        x = of[name]
        while x.opcode in ("copy", "bitcast", "convert", "reshape") or x.opcode.endswith("-done"):
            x = of[x.operands[0]]
        return x

    def _counted(self, computation: str, loop: Instruction) -> int | None:
        """Of a loop whose index is compared to a constant, and grows by one: TPU programs do not say how often."""
        outside = self.computations[computation]
        condition, body = (self.computations[loop.called(name)[0]] for name in ("condition", "body"))
        asked, root = (of[self.roots[loop.called(name)[0]]] for of, name in ((condition, "condition"), (body, "body")))
        start = outside[loop.operands[0]]
        if start.opcode != "tuple" or root.opcode != "tuple":
            return None

        def began(place: int) -> int | None:
            return _integer(self.origin(outside, start.operands[place]))

        def value(x: Instruction) -> int | None:
            """Of a constant, or of what the loop carries unchanged."""
            if x.opcode != "get-tuple-element":
                return _integer(x)
            place = x.number("index") or 0
            kept = self.origin(body, root.operands[place])
            return began(place) if kept.opcode == x.opcode and kept.number("index") == place else None

        compared, ends = self._of_two(condition, asked)
        if compared.opcode != "compare" or "direction=LT" not in compared.attributes or len(ends) != 2:
            return None
        place = ends[0].number("index")
        if place is None:
            return None
        grown, terms = self._of_two(body, self.origin(body, root.operands[place]))
        by_one = sorted((x.number("index") == place, value(x) == 1) for x in terms) == [(False, True), (True, False)]
        first, limit = began(place), value(ends[1])
        if grown.opcode != "add" or not by_one or first is None or limit is None:
            return None
        return max(0, limit - first)

    def _of_two(self, of: dict[str, Instruction], x: Instruction) -> tuple[Instruction, list[Instruction]]:
        """An operation, or that which a fusion holds, and where its operands come from."""
        if x.opcode != "fusion":
            return x, [self.origin(of, name) for name in x.operands]
        fused = x.called("calls")[0]
        body = self.computations[fused]
        inner = body[self.roots[fused]]
        while inner.opcode == "and" and len(set(inner.operands)) == 1:  # a condition and the limit that it equals
            inner = body[inner.operands[0]]
        ends = (self.origin(body, name) for name in inner.operands)
        return inner, [self.origin(of, x.operands[int(y.inside)]) if y.opcode == "parameter" else y for y in ends]


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
        order = _iota(_numbers(found[2]), found[3])
        return [tuple(map(int, row)) for row in order.reshape(_numbers(found[1]))]
    if found := re.search(r"replica_groups=mesh\[(.*?)\]([^{]*)\{(.*?)\}", attributes):
        axes = dict(re.findall(r"'?([^'=,]+)'?=(\d+)", found[1]))
        names, lengths = list(axes), [int(n) for n in axes.values()]
        chosen = re.findall(r"'?([\w.\-]+)'?(?:,|$)", found[3])
        ids = re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", found[2])
        if (found[2].strip() and not ids) or not set(chosen) <= set(names):
            raise GradCombineError("audit", "groups of whole axes of a mesh", found[0])
        order = _iota(_numbers(ids[1]), ids[2]) if ids else _iota(tuple(lengths))
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
            shapes.append(Shape(found[2], _numbers(found[3].replace("<=", "")), found[4] or ""))
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
    raise GradCombineError("audit", "HLO with whole lines", text[:80])


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _integer(x: Instruction) -> int | None:
    return int(x.inside) if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside) else None


def _iota(dims: tuple[int, ...], axes: str | None = None) -> np.ndarray:
    """Numbers of devices, counted along these lengths, with their axes in this order."""
    devices = math.prod(dims)
    if devices > MOST_DEVICES:
        raise GradCombineError("audit", f"groups of at most {MOST_DEVICES:,} devices", f"{devices:,}")
    order = np.arange(devices).reshape(dims)
    return order.transpose(_numbers(axes)) if axes else order
