"""Roles of the arrays of a compiled program: accumulators, copies, arrays that are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from gradcombine.audit.flow import LINEAR, MOVING, Flow, Node
from gradcombine.audit.hlo import Instruction, Loop
from gradcombine.audit.program import Exchange, Program, times

FEW_SCALARS = 256
"""Bytes below which an array is a number or a few: what it costs is not its size."""

SUMS = {"add", "subtract"}
SCALES = {"multiply", "divide"}
REDUCING = {"all-reduce", "reduce-scatter"}
RENAMING = {"get-tuple-element", "bitcast", "reshape", "parameter"}

SHARE = 0.05
"""Of a program's products or bytes, below which a repetition or copies are not worth a finding."""


class Product(NamedTuple):
    """A matrix product or convolution.

    Attributes:
      computation: it stands in.
      x: the operation.
      classes: how many different results devices have.
      source: its line.
      flops: its operations in a call.
    """

    computation: str
    x: Instruction
    classes: int
    source: str
    flops: float


class Search:
    """A program, and what several findings ask of it."""

    def __init__(self, program: Program, donated: frozenset[int]) -> None:
        self.program, self.donated = program, donated
        self.flow = Flow(program)
        self.source = program.source
        self._insides: dict[str, set[str]] = {}
        self._accumulators: dict[str, frozenset[int]] = {}

    def loops(self) -> Iterator[tuple[Loop, tuple[Loop, ...]]]:
        """The loops of more than one iteration, each with the loops around it and itself."""
        seen = set[str]()
        for _, _, loops in self.program.executed():
            if loops and loops[-1].instruction.called("body")[0] not in seen:
                seen.add(loops[-1].instruction.called("body")[0])
                yield loops[-1], loops

    def inside(self, body: str) -> set[str]:
        if body not in self._insides:
            self._insides[body] = self.flow.inner(body)
        return self._insides[body]

    def carried(self, body: str) -> list[Node]:
        """The arrays that a turn begins with."""
        (parameter,) = (x for x in self.program.computations[body].values() if x.opcode == "parameter")
        return [self.flow.node(body, parameter, leaf) for leaf in range(len(parameter.shapes))]

    def accumulators(self, body: str) -> frozenset[int]:
        """The carried arrays of a loop that each iteration only adds to."""
        if body not in self._accumulators:
            found = (i for i, node in enumerate(self.carried(body)) if self._only_added_to(body, i, node))
            self._accumulators[body] = frozenset(found)
        return self._accumulators[body]

    def linear(self, body: str, start: Iterable[Node]) -> set[int] | None:
        """The carried arrays that the start nodes are added into; None if anything else is computed from them."""
        nodes = self.flow.reached(start, True, lambda node: True, self.inside(body))
        if not all(self._keeps_sums(node, nodes) for node in nodes if node not in set(start)):
            return None
        return {i for i, node in enumerate(self.flow.results(body)) if node in nodes}

    def adds_up(self, results: Iterable[Node], arguments: Iterable[Node]) -> bool:
        """Whether these are sums of arguments, with factors that do not depend on any array."""
        before = self.flow.reached(results, False, lambda _: True)
        arrays = {node for node in before.intersection(arguments) if self.flow.places[node].shape.dims}
        made = self.flow.reached(arrays, True, before.__contains__) & before
        return all(self._keeps_sums(node, made) for node in made - arrays)

    def only_sums(self, result: Node, part: Node, reached: set[Node]) -> bool:
        """Whether nothing but sums is made of a part on its way to a result."""
        made = self.closure(result) & reached | {result}
        return all(self._keeps_sums(node, made) for node in made - {part})

    def closure(self, node: Node) -> set[Node]:
        """All that a value depends on."""
        return self.flow.reached([node], False, lambda _: True)

    def moved_from(self, start: Iterable[Node], through: frozenset[str] = frozenset(MOVING)) -> set[Node]:
        """Where values were before they were moved, without what changes them; the first that does is the last."""
        begun = set(start)
        moved = [node for node in begun if self.flow.opcode(node) in through]
        return begun | self.flow.reached(moved, False, lambda node: self.flow.opcode(node) in through)

    def operands(self, node: Node, index: int) -> list[Node]:
        name, x, _ = self.flow.places[node]
        operand = self.program.computations[name][x.operands[index]]
        return [self.flow.node(name, operand, leaf) for leaf in range(max(1, len(operand.shapes)))]

    def nodes(self, computation: str, x: Instruction) -> list[Node]:
        return [self.flow.node(computation, x, leaf) for leaf in range(max(1, len(x.shapes)))]

    def repeated(self) -> list[Product]:
        """Products that several devices compute identically."""
        return [product for product in self.products if product.classes < self.program.devices]

    @cached_property
    def products(self) -> list[Product]:
        found = list[Product]()
        for name, x, loops in self.program.executed():
            for inner, y, flops, _ in self.program.products(name, x):
                classes = self.flow.equality.classes(self.flow.node(inner, y)) if self.program.devices > 1 else 1
                found.append(Product(inner, y, classes, self.source(y) or self.source(x), times(loops) * flops))
        return found

    @cached_property
    def reduced(self) -> list[tuple[Exchange, Loop, float]]:
        """The exchanges of gradients that a loop only adds up, that loop, and the bytes of which this holds."""
        found = list[tuple[Exchange, Loop, float]]()
        for exchange in self.program.exchanges:
            if exchange.kind not in REDUCING or exchange.members == 1:
                continue
            for loop in exchange.loops:
                body = loop.instruction.called("body")[0]
                size = sum(size for part, size in self.parts(exchange) if self._adds_up(body, part))
                if size >= max(FEW_SCALARS, SHARE * exchange.operand):
                    found.append((exchange, loop, size))
                    break
        return found

    def parts(self, exchange: Exchange) -> list[tuple[Node, float]]:
        """The arrays that XLA has joined into one collective, as a tuple or end to end, and their operands' bytes."""
        leaves = self.nodes(exchange.computation, exchange.x)
        found = [part for leaf in leaves for part in self._slices(leaf, exchange.kind) or [leaf]]
        sizes = [self.flow.places[node].shape.bytes for node in found]
        return [(node, exchange.operand * size / max(1, sum(sizes))) for node, size in zip(found, sizes, strict=True)]

    def _slices(self, node: Node, kind: str) -> list[Node]:
        """The slices that are all that is used of an array; none if anything else is."""
        if self.flow.opcode(node) == "slice":
            return [node]
        users = self.flow.uses[node]
        if any(self.flow.opcode(user) not in {*RENAMING, kind, "slice"} for user in users):
            return []
        found = [self._slices(user, kind) for user in users]
        return [x for part in found for x in part] if all(found) else []

    def _adds_up(self, body: str, part: Node) -> bool:
        reached = self.linear(body, [part])
        return bool(reached) and reached <= self.accumulators(body)

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)

    def _only_added_to(self, body: str, index: int, node: Node) -> bool:
        if self.flow.places[node].shape.kind in ("token", "pred"):
            return False
        reached = self.linear(body, [node])
        if reached != {index}:
            return False
        nodes = self.flow.reached([node], True, lambda _: True, self.inside(body))
        return any(self.flow.opcode(n) in SUMS or self._adds_to(n, nodes) for n in nodes)

    def _adds_to(self, node: Node, nodes: set[Node]) -> bool:
        """Whether a matrix product adds its third operand."""
        x = self.flow.places[node].x
        third = x.opcode == "custom-call" and len(x.operands) > 2 and '"beta":1' in x.attributes
        return third and not any(n in nodes for i in (0, 1) for n in self.operands(node, i))

    def _keeps_sums(self, node: Node, nodes: set[Node]) -> bool:
        """Whether an operation on some of the nodes may as well be done after a sum."""
        opcode, x = self.flow.opcode(node), self.flow.places[node].x

        def takes(*indexes: int) -> bool:
            return any(n in nodes for i in indexes if i < len(x.operands) for n in self.operands(node, i))

        if opcode == "multiply":
            return not (takes(0) and takes(1))
        if opcode == "divide":
            return not takes(1)
        if opcode in ("select", "conditional"):
            return not takes(0)
        if opcode in ("dynamic-slice", "dynamic-update-slice"):
            return not takes(*range(1 if opcode == "dynamic-slice" else 2, len(x.operands)))
        return opcode in LINEAR or opcode in REDUCING or self._adds_to(node, nodes)
