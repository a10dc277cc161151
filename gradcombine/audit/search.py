"""Roles of the arrays of a compiled program: accumulators, copies, arrays that are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from typing import NamedTuple

from gradcombine.audit.flow import LINEAR, MOVING, Flow, Node
from gradcombine.audit.hlo import Instruction
from gradcombine.audit.program import Program
from gradcombine.audit.subject import (
    COPIED,
    FEW_SCALARS,
    REDUCING,
    Exchange,
    Loop,
    Reduced,
    Shape,
    Subject,
    size_text,
    times,
)

SUMS = {"add", "subtract"}
SCALES = {"multiply", "divide"}
RENAMING = {"get-tuple-element", "bitcast", "reshape", "parameter"}
WHOLE = frozenset(MOVING - {"slice", "dynamic-slice", "concatenate", "pad", "all-gather", "all-to-all"})

SHARE = 0.05
"""Of a program's products or bytes, below which a repetition or copies are not worth a finding."""

Gates = dict[Node, list[tuple[set[Node], set[Node]]]]
"""Where a counter decides in a call what becomes of arrays, and what a result there is and is instead."""


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


class Search(Subject[Instruction]):
    """A compiled program, and what findings ask of it; ``donated`` is as for `gradcombine.audit.rules.find`."""

    noun = "arrays"

    def __init__(self, program: Program, donated: frozenset[int]) -> None:
        self.program, self.joins_sums = program, not program.for_cpu
        self.aliased = {alias.parameter for alias in program.aliases}
        self.donated = donated | self.aliased | set(program.donors)
        self.flow = Flow(program)
        self.source = program.source
        self.inside, self.accumulators = cache(self.flow.inner), cache(self._accumulators)
        self._counts = cache(self._is_counter)

    @cached_property
    def exchanges(self) -> list[Exchange[Instruction]]:
        return self.program.exchanges

    def loops(self) -> Iterator[tuple[Loop[Instruction], int]]:
        seen = set[str]()
        for _, _, loops in self.program.executed():
            if loops and (body := loops[-1].operation.called("body")[0]) not in seen:
                seen.add(body)
                yield loops[-1], times(loops[:-1])

    def carried(self, body: str) -> range:
        """The arrays that a turn begins with."""
        (parameter,) = (x for x in self.program.computations[body].values() if x.opcode == "parameter")
        return self.flow.leaves(body, parameter)

    def _accumulators(self, body: str) -> frozenset[int]:
        """The carried arrays of a loop that each iteration only adds to."""
        return frozenset(i for i, node in enumerate(self.carried(body)) if self._only_added_to(body, i, node))

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

    def operands(self, node: Node, index: int) -> range:
        name, x, _ = self.flow.places[node]
        return self.flow.leaves(name, self.program.computations[name][x.operands[index]])

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
    def reduced(self) -> list[Reduced[Instruction]]:
        """The exchanges of gradients that a loop, or calls, only add up."""
        found = list[Reduced[Instruction]]()
        for exchange in self.exchanges:
            if exchange.kind not in REDUCING or exchange.members == 1:
                continue
            least = max(FEW_SCALARS, SHARE * exchange.operand)
            for loop in exchange.loops:
                body = loop.operation.called("body")[0]
                size = sum(size for part, size in self.parts(exchange) if self._adds_up(body, part))
                if size >= least:
                    found.append(Reduced(exchange, loop, size))
                    break
            if not exchange.loops and (gates := self.gates):
                size = sum(size for part, size in self.parts(exchange) if self._waits(part, gates))
                if size >= least:
                    found.append(Reduced(exchange, None, size))
        return sorted(found, key=lambda x: x.loop is None)

    def parts(self, exchange: Exchange[Instruction]) -> list[tuple[Node, float]]:
        """The arrays that XLA has joined into one collective, as a tuple or end to end, and their operands' bytes."""
        leaves = self.flow.leaves(exchange.computation, exchange.x)
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

    def kept(self) -> list[tuple[Instruction, int]]:
        """Selects between a new value and the one that is kept, by what integers alone decide: a counter."""
        flow, kept = self.flow, dict[str, tuple[Instruction, int]]()
        entry = {self.flow.node(self.program.entry, x): i for i, x in enumerate(self.program.parameters)}
        turned = dict[Node, set[Node]]()
        for loop, _ in self.loops():
            body = loop.operation.called("body")[0]
            for n, result in zip(self.carried(body), flow.results(body), strict=True):
                turned[n] = self.moved_from([result], WHOLE)

        def returns(n: Node, x: Node, computed: set[Node], often: bool) -> bool:
            """Whether the next turn or call begins with what is selected; accumulators are cleared to arguments too."""
            if n in turned:
                return x in turned[n]
            return n in entry and (entry[n] in self.aliased or often or not self.adds_up(computed, entry))

        for node, (_, x, _) in enumerate(flow.places):
            if x.opcode != "select" or not x.shapes[0].is_float or x.bytes < FEW_SCALARS:
                continue
            (predicate,) = self.operands(node, 0)
            if not self._counts(predicate):
                continue
            sides = [self.moved_from(self.operands(node, i), WHOLE) for i in (1, 2)]
            for side, other, chosen in ((*sides, "NE"), (*sides[::-1], "EQ")):
                computed = {flow.opcode(n) for n in other} & (SUMS | SCALES)
                same = {n for n in side - other if flow.places[n].shape.elements == x.shapes[0].elements}
                often = chosen == self._compared(predicate)
                if computed and (same := {n for n in same if returns(n, node, other, often)}):
                    origin = flow.places[min(same)]
                    kept[f"{origin.computation}/{origin.x.name}/{origin.leaf}"] = (x, x.bytes)
        return list(kept.values())

    def could_join(self, exchange: Exchange[Instruction]) -> bool:
        told = any(x.exchange is exchange and x.loop is not None for x in self.reduced)
        return exchange.kind != "collective-permute" and not told

    def unused(self, exchange: Exchange[Instruction], loop: Loop[Instruction]) -> bool:
        body = loop.operation.called("body")[0]
        reached = self.linear(body, self.flow.leaves(exchange.computation, exchange.x))
        return reached is not None and reached <= self.accumulators(body) | self._stacked(body)

    def beside(self, exchange: Exchange[Instruction]) -> tuple[str, str, int]:
        nodes, of = self.flow.leaves(exchange.computation, exchange.x), exchange.computation
        before = self.flow.reached(nodes, False, lambda _: True, self.inside(of))
        others = (x for x in self.exchanges if x.computation == of and x is not exchange and x.kind == exchange.kind)
        depth = sum(bool(before.intersection(self.flow.leaves(of, other.x))) for other in others)
        return of, str(exchange.groups), depth

    def converted(self, exchange: Exchange[Instruction]) -> Iterator[tuple[Shape, Shape]]:
        # What XLA widens because it has no narrower collective on a machine is not the program's.
        promoted = any(name.endswith("_promoted") for name in exchange.x.called("to_apply"))
        if promoted or (exchange.kind not in REDUCING and self.program.for_cpu):
            return
        through = frozenset(MOVING - {"convert", "all-gather", "collective-permute", "all-to-all", "while"})
        name = exchange.computation
        for operand in exchange.x.operands:
            for node in self.moved_from([self.flow.node(name, self.program.computations[name][operand])], through):
                if self.flow.opcode(node) == "convert":
                    yield self.flow.places[self.operands(node, 0)[0]].shape, self.flow.places[node].shape

    def narrow_sums(self, loop: Loop[Instruction] | None) -> Iterator[tuple[Shape, Instruction]]:
        if loop is not None:
            body = loop.operation.called("body")[0]
            shapes = [self.flow.places[node].shape for node in self.carried(body)]
            yield from ((shapes[i], loop.operation) for i in sorted(self.accumulators(body)) if shapes[i].is_narrow)

    def exchanged(self, exchange: Exchange[Instruction]) -> object:
        of, x = self.program.computations[exchange.computation], exchange.x
        origins = tuple(self.program.origin(of, operand).name for operand in x.operands)
        shapes = tuple(of[operand].shapes[0].dims for operand in x.operands)
        how = x.lists("dimensions"), str(exchange.groups), shapes
        return exchange.computation, exchange.kind, how, origins

    def is_equal(self, exchange: Exchange[Instruction]) -> bool:
        given = [n for node in self.flow.leaves(exchange.computation, exchange.x) for n in self.flow.sources[node]]
        if not all(self.flow.equality.within(node, exchange.groups) for node in given):
            return False
        earlier = self.moved_from(given, frozenset(LINEAR | SCALES | REDUCING))
        others = (x for x in self.exchanges if x is not exchange and x.groups == exchange.groups)
        return any(earlier.intersection(self.flow.leaves(other.computation, other.x)) for other in others)

    def one_turn(self, loop: Loop[Instruction]) -> str:
        inner = list(self.program.executed(loop.operation.called("body")[0]))
        moved = sum(self.program.traffic(name, x) for name, x, _ in inner)
        # What lies in a TPU's fast memory moves nothing.
        if moved < COPIED and not any(True for name, x, _ in inner for _ in self.program.products(name, x)):
            return ""
        return f" is counted as one iteration, of {size_text(moved)}"

    @cached_property
    def gates(self) -> Gates:
        """Selects, products with a flag, and conditionals, of whose branches the arguments have no such result."""
        flow, found = self.flow, Gates()
        for node, (_, x, leaf) in enumerate(flow.places):
            if x.opcode not in ("select", "conditional", "multiply") or not x.shapes[leaf].is_float:
                continue
            if x.opcode == "multiply":
                for i in (0, 1):
                    flags = self.moved_from(self.operands(node, 1 - i), WHOLE | {"broadcast"})
                    if any(self._is_flag(n) for n in flags):
                        found[node] = [(self.moved_from(self.operands(node, i), WHOLE), set())]
                continue
            (predicate, *_) = self.operands(node, 0)
            if not self._counts(predicate):
                continue
            if x.opcode == "select":
                given = [self.operands(node, i) for i in (1, 2)]
            else:
                branches = self.program.bodies(x)
                given = [flow.results(name)[leaf : leaf + 1] for name in branches]
                for name in branches:
                    arguments = [y for y in self.program.computations[name].values() if y.opcode == "parameter"]
                    found.update((argument, []) for y in arguments for argument in self.flow.leaves(name, y))
            if len(given) == 2:
                a, b = (self.moved_from(side, WHOLE) for side in given)
                found[node] = [(a, b), (b, a)]
        return found

    def _is_flag(self, node: Node) -> bool:
        """Whether this is a number that counters alone decide, 0 by one of their decisions."""
        x, shape = self.flow.places[node].x, self.flow.places[node].shape
        if shape.dims or not shape.is_float:
            return not shape.dims and self._counts(node)
        sides = [self.moved_from(self.operands(node, i), WHOLE) for i in (1, 2)] if x.opcode == "select" else []
        zeros = [n for side in sides for n in side if self.flow.opcode(n) == "constant"]
        nothing = any(float(self.flow.places[n].x.inside) == 0 for n in zeros)
        return nothing and self._counts(self.operands(node, 0)[0])

    def _waits(self, part: Node, gates: Gates) -> bool:
        """Whether calls only add this to an argument, and where a counter says so anything else is made of it."""
        flow, program = self.flow, self.program
        reached = flow.reached([part], True, lambda node: node not in gates)
        if any(node in reached and node not in gates for node in flow.results(program.entry)):
            return False
        held = {flow.node(program.entry, x): x.shapes[0].elements for x in program.parameters}
        for side, other in (pair for gate in reached & gates.keys() for pair in gates[gate]):
            for node in side & reached:
                if flow.opcode(node) in SUMS and self.only_sums(node, part, reached):
                    before = self.moved_from([n for i in (0, 1) for n in self.operands(node, i)], WHOLE)
                    if any(held.get(n) == flow.places[node].shape.elements for n in before - other):
                        return True
        return False

    def _is_counter(self, predicate: Node) -> bool:
        """Whether integers alone decide: no value of any float, nor an array of data, is among what it depends on."""
        flow, closure = self.flow, self.closure(predicate)
        shapes = [flow.places[node].shape for node in closure if flow.places[node].x.shapes]
        scalar = any(not shape.dims and shape.kind == "pred" for shape in shapes)
        parameters = [flow.places[node].shape for node in closure if flow.places[node].x.opcode == "parameter"]
        held = bool(parameters) and all(shape.elements == 1 for shape in parameters)
        exchanged = any(flow.places[node].x.collective for node in closure)
        return scalar and held and not exchanged and not any(shape.is_float for shape in shapes)

    def _compared(self, predicate: Node) -> str:
        """The direction of the comparison that a predicate is; empty for any other one."""
        found = [self.flow.places[n].x for n in self.moved_from([predicate], WHOLE | {"broadcast"})]
        return "".join(x.attributes.partition("direction=")[2][:2] for x in found if x.opcode == "compare")

    def _stacked(self, body: str) -> set[int]:
        """The carried arrays of a loop of which each iteration writes one row."""
        found = set[int]()
        for i, (node, result) in enumerate(zip(self.carried(body), self.flow.results(body), strict=True)):
            nodes = self.flow.reached([node], True, lambda _: True, self.inside(body))
            written = self.moved_from([result], frozenset(MOVING))
            kinds = {self.flow.opcode(n) for n in written}
            others = {j for j, other in enumerate(self.flow.results(body)) if other in nodes}
            if "dynamic-update-slice" in kinds and others <= {i}:
                found.add(i)
        return found
