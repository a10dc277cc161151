"""What optimized HLO says of a program: the bytes that it moves, what it copies, and where it exchanges."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
"""Operations that move nothing."""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def bytes(self) -> int:
        return sum(_size(kind, dims) for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", self.shape))

    def called(self, *names: str) -> list[str]:
        found = re.findall(rf"(?:{'|'.join(names)})=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return [name for group in found for name in re.findall(r"[\w.\-]+", group)]

    @property
    def trip_count(self) -> int | None:
        """Of a loop; None where it is not known while compiling."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(known[1]) if known else None


class Program:
    """A compiled program, from its text.

    Args:
      text: of ``compiled.as_text()``.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        inside = ""
        for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
            begun = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$", line)
            if begun:
                inside = begun[2]
                self.computations[inside] = []
                self.entry = inside if begun[1] else self.entry
            elif inside and " = " in line:
                self.computations[inside].append(_instruction(line))

    def bytes_moved(self, due: bool) -> int:
        """Read and written by one call; an operation that reads a part of an array counts as reading all of it.

        Args:
          due: whether conditionals take their second branch, and loops of an unknown number of turns turn once.
        """
        return self._moved(self.entry, due)

    def copies(self, least: int = 1024) -> int:
        """Copies of arrays from so many bytes on."""
        return sum(
            x.opcode in ("copy", "copy-start") and x.bytes >= least for x, _ in self._executed(self.entry, False)
        )

    @property
    def counts_turns(self) -> bool:
        """Whether it is known how often loops turn: not in TPU programs, which hold copies between memories besides."""
        return all(x.trip_count is not None for x in self.computations[self.entry] if self._repeats(x))

    def bytes_of_turn(self) -> int:
        """Read and written by one turn of each loop that turns more than once."""
        loops = (x for x in self.computations[self.entry] if self._repeats(x))
        return sum(self._moved(body, True) for x in loops for body in x.called("body"))

    def collectives(self, least: int = 0) -> tuple[Counter[str], Counter[str]]:
        """Those inside of loops that turn more than once, and all others; of results from so many bytes on."""
        found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for x, looped in self._executed(self.entry, False):
            kind = x.opcode.removesuffix("-start")
            if kind in COLLECTIVES and x.bytes >= least:
                found[not looped][kind] += 1
        return found

    def rows(self, width: int) -> int:
        """The most rows of this width, and of another number, that anything in a loop makes."""
        shapes = (x.shape for x, looped in self._executed(self.entry, False) if looped and x.opcode not in FREE)
        found = (int(rows) for shape in shapes for rows in re.findall(rf"\[(\d+),{width}\]", shape))
        return max((rows for rows in found if rows != width), default=0)

    def conditionals(self) -> int:
        return sum(x.opcode == "conditional" for x, _ in self._executed(self.entry, False))

    def _moved(self, name: str, due: bool) -> int:
        shapes = {x.name: x.bytes for x in self.computations[name]}
        total = 0
        for x in self.computations[name]:
            if x.opcode == "conditional":
                branches = x.called("branch_computations") or [
                    *x.called("false_computation"),
                    *x.called("true_computation"),
                ]
                total += self._moved(branches[due], due)
            elif x.opcode == "while":
                turns = int(due) if x.trip_count is None else x.trip_count
                total += turns * sum(self._moved(body, due) for body in x.called("body"))
            elif x.opcode == "call":
                total += sum(self._moved(body, due) for body in x.called("to_apply"))
            elif x.opcode not in FREE and not x.opcode.endswith("-done"):
                total += x.bytes + sum(shapes.get(operand, 0) for operand in x.operands)
        return total

    def _repeats(self, x: Instruction) -> bool:
        """Whether this is a loop that turns more than once. TPU programs do not say how often: one that counts."""
        if x.opcode != "while" or x.trip_count is not None:
            return x.opcode == "while" and x.trip_count != 1
        return any(i.opcode == "compare" for name in x.called("condition") for i in self.computations[name])

    def _executed(self, name: str, looped: bool) -> Iterator[tuple[Instruction, bool]]:
        for x in self.computations[name]:
            yield x, looped
            for body in x.called("body"):
                yield from self._executed(body, looped or self._repeats(x))
            if x.opcode in ("conditional", "call"):
                for body in x.called("branch_computations", "true_computation", "false_computation", "to_apply"):
                    yield from self._executed(body, looped)


def _instruction(line: str) -> Instruction:
    name, rest = re.sub(r"^\s*(ROOT )?%?", "", line).split(" = ", 1)
    shape, rest = _balanced(rest) if rest.startswith("(") else rest.split(" ", 1)
    opcode, rest = rest.strip().split("(", 1)
    operands, attributes = _balanced("(" + rest)
    return Instruction(name, shape, opcode, tuple(re.findall(r"%([\w.\-]+)", operands)), attributes)


def _balanced(text: str) -> tuple[str, str]:
    """The part in the parentheses that the text begins with, and what follows."""
    depth = 0
    for i, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return text[: i + 1], text[i + 1 :]
    raise ValueError(text)


def _size(kind: str, dims: str) -> int:
    size = WIDTHS.get(kind, 0)
    for n in filter(None, dims.split(",")):
        size *= int(n)
    return size
