"""The work of a compiled program per call: loops, bytes moved, products and exchanges."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from gradcombine.audit.hlo import Instruction, Module
from gradcombine.audit.subject import COPIED, Exchange, Facts, Frame, Loop, Shape, own_line, times

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all"}
"""Operations that move no data."""

CONTROL = {"while", "conditional", "call", "async-start"}
"""Operations that run other computations, whose work is counted separately."""

NOTHING = ("AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape")
"""Targets of custom calls that move no data."""

SLICES = {"dynamic-slice", "slice", "gather"}


def _calls_host(x: Instruction) -> bool:
    """Whether an operation has a result of the host's Python code, which may do anything, such as an exchange."""
    if x.opcode == "recv":  # on TPUs
        return "is_host_transfer=true" in x.attributes
    return x.opcode == "custom-call" and bool(x.shapes) and bool(re.search(r'_target="\w*python', x.attributes))


Lines = Callable[[str], Sequence[Frame]]
"""Returns the stack frames of an operation by its ``op_name``."""


def no_lines(name: str) -> Sequence[Frame]:
    return ()


Loops = tuple[Loop[Instruction], ...]
"""The loops that enclose an operation, outermost first."""


class Program(Module):
    """A compiled program, with its costs.

    Args:
      text: as XLA prints it, for instance ``compiled.as_text()``.
      lines: returns stack frames that the framework recorded; if empty, those in the text are used.
      shardings: of the entry's parameters, used if the text lacks them.
    """

    def __init__(self, text: str, lines: Lines = no_lines, shardings: Sequence[str] = ()) -> None:
        super().__init__(text)
        self._lines, self._shardings = lines, shardings

    def sharding(self, parameter: Instruction) -> str:
        """The sharding of an entry parameter in HLO's notation; empty if unknown."""
        if match := re.search(r"\bsharding=(\{.*?\})(?=,|$| )", parameter.attributes):
            return match[1]
        number = int(parameter.inside)
        return self._shardings[number] if number < len(self._shardings) else ""

    @cached_property
    def unknown(self) -> Facts:
        """Facts that the program does not show."""
        calls = (x for computation in self.computations.values() for x in computation.values() if _calls_host(x))
        facts: Facts = {"code": [f"the Python code in {x.op_name or x.name} is not read" for x in calls]}
        if self.devices > 1 and "" in map(self.sharding, self.parameters):
            facts["shardings"] = ["how arguments are sharded, and hence which work devices repeat"]
        return {fact: texts for fact, texts in facts.items() if texts}

    def frames(self, x: Instruction) -> list[Frame]:
        return [*self._lines(x.op_name)] or super().frames(x)

    def source(self, x: Instruction) -> str:
        """The source line of an operation, "file:line": the innermost one outside of libraries."""
        return own_line(self.frames(x)) or self._lines_of_merged.get(x.name, "")

    def trips(self, computation: str, x: Instruction) -> int | None:
        """The trip count of a loop; None if it is unknown at compile time."""
        if known := re.search(r'known_trip_count":\s*\{"n":\s*"(\d+)"', x.attributes):
            return int(known[1])
        return self._inferred_trips(computation, x)

    def runs_at_most_once(self, x: Instruction) -> bool:
        """Whether a loop is used as a branch: its condition is a flag that its body sets to false."""
        condition, body = (x.called(name)[0] for name in ("condition", "body"))
        flag, root = self.roots[condition], self.roots[body]
        if flag.opcode != "get-tuple-element" or root.opcode != "tuple":
            return False
        after = self.origin(self.computations[body], root.operands[flag.number("index") or 0])
        return after.opcode == "constant" and after.inside == "false"

    def repeats(self, computation: str, x: Instruction) -> bool:
        """Whether an operation is a loop that may run more than once."""
        if x.opcode != "while":
            return False
        trips = self.trips(computation, x)
        return trips > 1 if trips is not None else not self.runs_at_most_once(x)

    def executed(self, name: str = "", loops: Loops = ()) -> Iterator[tuple[str, Instruction, Loops]]:
        """Yields all operations, each with its computation and enclosing loops. A fusion is a single operation."""
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
        """The computations that an operation other than a loop may run; the false branch before the true branch."""
        return x.called("branch_computations") or [
            *x.called("false_computation"),
            *x.called("true_computation"),
            *x.called("to_apply", "calls"),
        ]

    def origin(self, computation: dict[str, Instruction], name: str) -> Instruction:
        """Follows copies, reshapes and conversions of a value to the instruction that computes it."""
        x = computation[name]
        while x.opcode in ("copy", "copy-start", "bitcast", "convert", "reshape") or x.opcode.endswith("-done"):
            x = computation[x.operands[0]]
        return x

    def reduction(self, x: Instruction) -> str:
        """The operation by which a reduction combines values, for instance "add"; empty for others."""
        return "".join(self.origin(self.computations[f], self.roots[f].name).opcode for f in x.called("to_apply"))

    def _inferred_trips(self, computation: str, loop: Instruction) -> int | None:
        """The trip count of a loop whose index is incremented by one and compared to a constant, or None.

        TPU programs lack the attribute ``known_trip_count``.
        """
        names = computation, *(loop.called(name)[0] for name in ("condition", "body"))
        outside, condition, body = (self.computations[name] for name in names)
        root = self.roots[names[2]]
        start = outside[loop.operands[0]]
        if start.opcode != "tuple" or root.opcode != "tuple":
            return None

        def initial(index: int) -> int | None:
            return _integer(self.origin(outside, start.operands[index]))

        def value(x: Instruction) -> int | None:
            """The value of a constant, or of a loop invariant that is initially a constant."""
            if x.opcode != "get-tuple-element":
                return _integer(x)
            index = x.number("index") or 0
            result = self.origin(body, root.operands[index])
            return initial(index) if result.opcode == x.opcode and result.number("index") == index else None

        comparison, sides = self._unfused(condition, self.roots[names[1]])
        if comparison.opcode != "compare" or "direction=LT" not in comparison.attributes or len(sides) != 2:
            return None
        index = sides[0].number("index")
        if index is None:
            return None
        update, terms = self._unfused(body, self.origin(body, root.operands[index]))
        by_one = sorted((x.number("index") == index, value(x) == 1) for x in terms) == [(False, True), (True, False)]
        first, limit = initial(index), value(sides[1])
        if update.opcode != "add" or not by_one or first is None or limit is None:
            return None
        return max(0, limit - first)

    def _unfused(self, computation: dict[str, Instruction], x: Instruction) -> tuple[Instruction, list[Instruction]]:
        """An operation, or the root of a fusion, and the origins of its operands."""
        if x.opcode != "fusion":
            return x, [self.origin(computation, name) for name in x.operands]
        fused = x.called("calls")[0]
        body, root = self.computations[fused], self.roots[fused]
        while root.opcode == "and" and len(set(root.operands)) == 1:  # and(x, x)
            root = body[root.operands[0]]
        origins = (self.origin(body, name) for name in root.operands)
        return root, [
            self.origin(computation, x.operands[int(y.inside)]) if y.opcode == "parameter" else y for y in origins
        ]

    @cached_property
    def _lines_of_merged(self) -> dict[str, str]:
        """Source lines for collectives that lost theirs when XLA merged them: that of the first user with a line."""
        lines = dict[str, str]()
        for computation in self.computations.values():
            collective_of = {x.name: x.name for x in computation.values() if x.collective}
            for x in computation.values():
                for operand in x.operands:
                    if operand in collective_of and (line := own_line(self.frames(x))):
                        lines.setdefault(collective_of[operand], line)
                    elif operand in collective_of:
                        collective_of.setdefault(x.name, collective_of[operand])
        return lines

    def _has_scalar_predicate(self, computation: dict[str, Instruction], x: Instruction) -> bool:
        """Whether a select chooses between two arrays by a scalar."""
        flag = self.origin(computation, x.operands[0])
        of_scalar = flag.opcode == "broadcast" and not computation[flag.operands[0]].shapes[0].dims
        return of_scalar or not flag.shapes[0].dims

    def controls(self) -> Iterator[tuple[str, str, str]]:
        """Yields loops, branches and selects: a description, the number of executions per call, and the source."""
        for name, x, loops in self.executed():
            count = times(loops)
            if x.opcode == "while" and ((trips := self.trips(name, x)) is not None or self.repeats(name, x)):
                yield "loop", "unknown" if trips is None else f"{count * trips:,}", self.source(x)
            elif x.opcode == "while":
                yield "branch, as a loop of at most one iteration", f"{count:,}", self.source(x)
            elif x.opcode == "conditional":
                yield "branch", f"{count:,}", self.source(x)
        selects = Counter[str]()
        for computation in self.computations.values():
            large = (x for x in computation.values() if x.opcode == "select" and x.bytes >= COPIED)
            selects.update(self.source(x) for x in large if self._has_scalar_predicate(computation, x))
        for source, number in selects.items():
            yield f"{number} arrays selected: both are computed", "", source

    @cached_property
    def exchanges(self) -> list[Exchange[Instruction]]:
        """All collectives, in program order."""
        return [exchange for at in self.executed() if (exchange := self.exchange(*at)) is not None]

    def exchange(self, name: str, x: Instruction, loops: Loops) -> Exchange[Instruction] | None:
        """The collective that an operation starts, if any. On TPUs, XLA fuses an all-reduce with a slice of it."""
        outer = x
        if x.opcode == "fusion" and "kind=kCustom" in x.attributes:
            (name,) = x.called("calls")
            x = next((y for y in self.computations[name].values() if y.collective), x)
        if not x.collective or not (groups := self.groups(x)):  # a permutation without pairs makes zeros
            return None
        operand = sum(self.computations[name][operand].bytes for operand in x.operands)
        # The result of an asynchronous start may contain its operands before the results.
        shapes = x.shapes[len(x.operands) :] if len(x.shapes) >= 2 * len(x.operands) else x.shapes
        result = sum(shape.bytes for shape in shapes[: len(x.operands)])
        if outer is not x:
            opcode = "reduce-scatter" if x.opcode == "all-reduce" and outer.bytes < result else x.opcode
            x, result = x._replace(opcode=opcode, attributes=f"{x.attributes}, {outer.attributes}"), outer.bytes
        return Exchange(name, x, loops, groups, operand, result, reduction=self.reduction(x))

    def work(self) -> Iterator[tuple[str, Loops, int, dict[int, float]]]:
        """Yields for each operation its computation and loops, and its bytes moved and flops by bit width, per call."""
        for name, x, loops in self.executed():
            count, flops = times(loops), self.flops(name, x)
            yield name, loops, count * self.traffic(name, x), {width: count * n for width, n in flops.items()}

    def flops(self, name: str, x: Instruction) -> dict[int, float]:
        """Floating-point operations of the products in one execution of an operation, by bit width."""
        flops = dict[int, float]()
        for _, _, count, width in self.products(name, x):
            flops[width] = flops.get(width, 0.0) + count
        return flops

    def traffic(self, name: str, x: Instruction) -> int:
        """Bytes of main memory that one execution of an operation reads and writes, at least."""
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
            # The second element of the result is scratch memory.
            return sum(map(_main, operands)) + _bytes(x.shapes[:1])
        return sum(map(_main, operands)) + _main(x)

    def products(self, name: str, x: Instruction) -> Iterator[tuple[str, Instruction, float, int]]:
        """Yields matrix products and convolutions in an operation: computation, instruction, flops and bit width."""
        if x.opcode == "fusion":
            fused = x.called("calls")[0]
            for y in self.computations[fused].values():
                yield from self.products(fused, y)
        elif product := self._product(name, x):
            yield (name, x, *product)

    def _product(self, name: str, x: Instruction) -> tuple[float, int] | None:
        if x.opcode not in ("dot", "custom-call", "convolution") or len(x.operands) < 2:
            return None
        left, right = (self.computations[name][operand].shapes[0] for operand in x.operands[:2])
        result, width = x.shapes[0], max(left.bits, right.bits)
        if match := re.search(r"dim_labels=\w+_(\w+)->\w+", x.attributes):
            # Each output element sums over the kernel except its output features. Padding is not counted. In cuDNN's
            # backward convolutions, the outputs are an operand, and labels and work are those of the forward one.
            output, kernel = result, right
            if "convBackwardInput" in x.attributes:
                output = left
            elif "convBackwardFilter" in x.attributes:
                output, kernel = right, result
            return 2.0 * output.elements * kernel.elements / kernel.dims[match[1].index("o")], width
        contracted = x.lists("lhs_contracting_dims")
        if x.opcode == "custom-call":
            match = re.search(r'lhs_contracting_dimensions":\s*\[([^\]]*)\]', x.attributes)
            if match is None:
                return None
            contracted = map(int, re.findall(r"\d+", match[1]))
        return 2.0 * result.elements * math.prod(left.dims[i] for i in contracted), width

    def _fused(self, x: Instruction, operands: list[Instruction]) -> int:
        """Bytes that a fusion moves: the parts of its operands that it reads, and its results."""
        fused = x.called("calls")[0]
        body = self.computations[fused]
        users: dict[str, list[Instruction]] = {}
        for y in body.values():
            for operand in y.operands:
                users.setdefault(operand, []).append(y)

        def consumers(name: str) -> list[tuple[str, Instruction]]:
            """Users of a value, through copies, reshapes and conversions, each with the operand's name."""
            pairs = list[tuple[str, Instruction]]()
            for y in users.get(name, []):
                pairs += consumers(y.name) if y.opcode in ("bitcast", "convert", "copy", "reshape") else [(name, y)]
            return pairs

        total = 0
        for y in body.values():
            if y.opcode == "parameter" and _main(operands[int(y.inside)]):
                parts = [_part(operand, z) for operand, z in consumers(y.name)]
                size = operands[int(y.inside)].bytes
                total += size if None in parts or not parts else min(size, sum(n for n in parts if n is not None))
        root = self.roots[fused]
        results = [body[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
        for result, shape in zip(results, x.shapes, strict=False):
            origin = self.origin(body, result.name)
            written = body[origin.operands[1]].bytes if origin.opcode == "dynamic-update-slice" else shape.bytes
            total += 0 if shape.space else written
        return total


def _part(operand: str, x: Instruction) -> int | None:
    """Bytes that an operation reads of an operand if it is a slice; None if it reads the full operand."""
    if x.opcode in SLICES and x.operands[0] == operand:
        return x.bytes
    if x.opcode == "dynamic-update-slice" and x.operands[0] == operand:
        return 0
    return None


def _bytes(shapes: tuple[Shape, ...]) -> int:
    return sum(0 if shape.space else shape.bytes for shape in shapes)


def _main(x: Instruction) -> int:
    """Bytes of an operation's result in main memory."""
    return _bytes(x.shapes)


def _integer(x: Instruction) -> int | None:
    return int(x.inside) if x.opcode == "constant" and re.fullmatch(r"-?\d+", x.inside) else None
