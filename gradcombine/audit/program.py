"""The work of a compiled program in one call: loops, bytes moved, copies, products and exchanges."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from gradcombine.audit.hlo import Instruction, Module
from gradcombine.audit.subject import COPIED, Exchange, Frame, Loop, Shape, own_line, times

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
"""Operations that move nothing."""

CONTROL = {"while", "conditional", "call", "async-start"}
"""Operations whose computations are counted by themselves."""

NOTHING = ("AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
"""Targets of custom calls that move nothing."""

SLICES = {"dynamic-slice", "slice", "gather"}


Lines = Callable[[str], Sequence[Frame]]


def no_lines(name: str) -> Sequence[Frame]:
    return ()


Loops = tuple[Loop[Instruction], ...]
"""The loops around an operation, the outermost first."""


class Program(Module):
    """A compiled program, and what can be counted in it.

    Args:
      text: as XLA prints it, for instance ``compiled.as_text()``.
      lines: of source that a framework knows of an operation, by its name; otherwise those of the text.
      shardings: of the entry's parameters, where the text does not tell.
    """

    def __init__(self, text: str, lines: Lines = no_lines, shardings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self._lines, self._shardings = lines, shardings

    def sharding(self, parameter: Instruction) -> str:
        """How devices hold a parameter of the entry, as HLO writes it; empty where it is unknown."""
        if found := re.search(r"\bsharding=(\{.*?\})(?=,|$| )", parameter.attributes):
            return found[1]
        number = int(parameter.inside)
        return self._shardings[number] if number < len(self._shardings) else ""

    @property
    def is_unsplit(self) -> bool:
        """Whether several devices run it, and nothing says how its arguments are split."""
        return self.devices > 1 and "" in map(self.sharding, self.parameters)

    def frames(self, x: Instruction) -> list[Frame]:
        return [*self._lines(x.op_name)] or super().frames(x)

    def source(self, x: Instruction) -> str:
        """The line that an operation came from, "file:line": the innermost one that is no library's."""
        return own_line(self.frames(x)) or self._of_joined.get(x.name, "")

    def trips(self, computation: str, x: Instruction) -> int | None:
        """Iterations of a loop; None where it is not known while compiling."""
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
        """Whether this is a loop of more than one iteration, as far as that is known."""
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

    @cached_property
    def _of_joined(self) -> dict[str, str]:
        """Lines of collectives that XLA has joined, and that have lost their own: of the first that takes a result."""
        found = dict[str, str]()
        for of in self.computations.values():
            begun = {x.name: x.name for x in of.values() if x.collective}
            for x in of.values():
                for operand in x.operands:
                    if operand in begun and (line := own_line(self.frames(x))):
                        found.setdefault(begun[operand], line)
                    elif operand in begun:
                        begun.setdefault(x.name, begun[operand])
        return found

    def _is_whole(self, of: dict[str, Instruction], x: Instruction) -> bool:
        """Whether one flag selects between two whole arrays."""
        flag = self.origin(of, x.operands[0])
        return not flag.shapes[0].dims or (flag.opcode == "broadcast" and not of[flag.operands[0]].shapes[0].dims)

    def controls(self) -> Iterator[tuple[str, str, str]]:
        """Its loops, branches and selects: what they are, how often they turn or decide in a call, and their lines."""
        for name, x, loops in self.executed():
            count = times(loops)
            if x.opcode == "while" and ((trips := self.trips(name, x)) is not None or self.repeats(name, x)):
                yield "loop", "unknown" if trips is None else f"{count * trips:,}", self.source(x)
            elif x.opcode == "while":
                yield "branch, as a loop of at most one iteration", f"{count:,}", self.source(x)
            elif x.opcode == "conditional":
                yield "branch", f"{count:,}", self.source(x)
        selects = Counter[str]()
        for of in self.computations.values():
            whole = (x for x in of.values() if x.opcode == "select" and x.bytes >= COPIED and self._is_whole(of, x))
            selects.update(map(self.source, whole))
        for source, number in selects.items():
            yield f"{number} arrays selected: both are computed", "", source

    @cached_property
    def exchanges(self) -> list[Exchange[Instruction]]:
        """All collectives, in the program's order."""
        found = list[Exchange[Instruction]]()
        for name, x, loops in self.executed():
            if x.collective:
                operand = sum(self.computations[name][operand].bytes for operand in x.operands)
                # What begins an asynchronous collective may give its operands as well.
                shapes = x.shapes[len(x.operands) :] if len(x.shapes) >= 2 * len(x.operands) else x.shapes
                result = sum(shape.bytes for shape in shapes[: len(x.operands)])
                found.append(Exchange(name, x, loops, self.groups(x), operand, result))
        return found

    def work(self) -> Iterator[tuple[str, Loops, int, dict[int, float]]]:
        """Of each operation, as often as loops repeat it in a call: where it is, the loops, bytes, flops by type."""
        for name, x, loops in self.executed():
            flops, count = dict[int, float](), times(loops)
            for _, _, operations, width in self.products(name, x):
                flops[width] = flops.get(width, 0.0) + count * operations
            yield name, loops, count * self.traffic(name, x), flops

    def traffic(self, name: str, x: Instruction) -> int:
        """Bytes of main memory that an operation has to read and write once: the parts that it uses of its operands."""
        if x.opcode in FREE or x.opcode in CONTROL or any(f'"{target}"' in x.attributes for target in NOTHING):
            return 0
        operands = [self.computations[name][operand] for operand in x.operands]
        if x.opcode.endswith("-start"):
            return sum(_main(operand) for operand in operands) if x.collective else 0
        if x.opcode.endswith("-done"):
            started = x.opcode.removesuffix("-done") in ("copy", "slice")
            source = [self.computations[name][y] for y in operands[0].operands] if started else []
            return _main(x) + (x.bytes if any(_main(y) for y in source) else 0)
        if x.opcode == "fusion":
            return self._fused(x, operands)
        if x.opcode in SLICES:
            return 2 * _main(x)
        if x.opcode == "dynamic-update-slice":
            return 2 * _main(operands[1])
        if "__cublas" in x.attributes or "__cudnn" in x.attributes:
            # What comes behind the result is room to work in.
            return sum(map(_main, operands)) + _bytes(x.shapes[:1])
        return sum(map(_main, operands)) + _main(x)

    def products(self, name: str, x: Instruction) -> Iterator[tuple[str, Instruction, float, int]]:
        """Matrix products and convolutions that an operation runs: where, which, their flops, their type's bits."""
        if x.opcode == "fusion":
            fused = x.called("calls")[0]
            for y in self.computations[fused].values():
                yield from self.products(fused, y)
        elif found := self._product(name, x):
            yield (name, x, *found)

    def _product(self, name: str, x: Instruction) -> tuple[float, int] | None:
        operands = [self.computations[name][operand].shapes[0] for operand in x.operands[:2]]
        if len(operands) < 2:
            return None
        left, right = operands
        width = max(left.bits, right.bits)
        if x.opcode == "dot":
            return 2.0 * x.shapes[0].elements * math.prod(left.dims[i] for i in x.lists("lhs_contracting_dims")), width
        if x.opcode == "custom-call" and (
            found := re.search(r'lhs_contracting_dimensions":\s*\[([^\]]*)\]', x.attributes)
        ):
            contracted = math.prod(left.dims[int(i)] for i in re.findall(r"\d+", found[1]))
            return 2.0 * x.shapes[0].elements * contracted, width
        if x.opcode == "convolution" and (found := re.search(r"dim_labels=\w+_(\w+)->(\w+)", x.attributes)):
            # Each output sums the kernel without its output features; a larger window of padding is no work.
            features = right.dims[found[1].index("o")]
            outputs = x.shapes[0].elements
            return 2.0 * outputs * right.elements / features, width
        return None

    def _fused(self, x: Instruction, operands: list[Instruction]) -> int:
        fused = x.called("calls")[0]
        body = self.computations[fused]
        users: dict[str, list[Instruction]] = {}
        for y in body.values():
            for operand in y.operands:
                users.setdefault(operand, []).append(y)

        def consumers(name: str) -> list[tuple[str, Instruction]]:
            found = list[tuple[str, Instruction]]()
            for y in users.get(name, []):
                found += consumers(y.name) if y.opcode in ("bitcast", "convert", "copy", "reshape") else [(name, y)]
            return found

        total = 0
        for y in body.values():
            if y.opcode == "parameter" and _main(operands[int(y.inside)]):
                used = consumers(y.name)
                parts = [_part(body, via, z) for via, z in used]
                whole = operands[int(y.inside)].bytes
                total += whole if None in parts or not parts else min(whole, sum(n for n in parts if n is not None))
        root = body[self.roots[fused]]
        results = [body[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
        for result, shape in zip(results, x.shapes, strict=False):
            origin = self.origin(body, result.name)
            written = body[origin.operands[1]].bytes if origin.opcode == "dynamic-update-slice" else shape.bytes
            total += 0 if shape.space else written
        return total


def _part(body: dict[str, Instruction], name: str, x: Instruction) -> int | None:
    """The bytes that a slice takes of an operand; None for what takes all of it."""
    if x.opcode in SLICES and x.operands[0] == name:
        return x.bytes
    if x.opcode == "dynamic-update-slice" and x.operands[0] == name:
        return 0
    return None


def _bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(0 if shape.space else shape.bytes for shape in shapes)


def _main(x: Instruction) -> int:
    """Of an operation's result, in main memory."""
    return _bytes(x.shapes)


def _integer(x: Instruction) -> int | None:
    return int(x.inside) if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside) else None
