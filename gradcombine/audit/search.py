"""Answers the queries of the rules for compiled programs: finds exchanges, discarded state and equal arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from functools import cache, cached_property
from typing import NamedTuple

from gradcombine.audit.flow import LINEAR, MOVING, Node
from gradcombine.audit.hlo import Device, Instruction
from gradcombine.audit.program import Program
from gradcombine.audit.subject import (
    COPIED,
    FEW_SCALARS,
    REDUCING,
    SHARE,
    Exchange,
    Loop,
    Shape,
    Subject,
    size_text,
    times,
)
from gradcombine.audit.sums import RENAMING, SUMS, Sums

SCALES = {"multiply", "divide"}
WHOLE = MOVING - {"slice", "dynamic-slice", "concatenate", "pad", "all-gather", "all-to-all"}

Gates = dict[Node, list[tuple[set[Node], set[Node]]]]
"""Nodes whose value a counter selects; for each alternative, its origins and those of the other one."""


class Product(NamedTuple):
    """A matrix product or convolution.

    Attributes:
      computation: that contains it.
      x: the operation.
      classes: number of different results on the devices.
      source: its source line.
      flops: per call.
    """

    computation: str
    x: Instruction
    classes: int
    source: str
    flops: float


class Search(Sums, Subject[Instruction]):
    """Queries of the rules for a compiled program; ``donated`` is as for `gradcombine.audit.rules.find`."""

    noun = "arrays"

    def __init__(self, program: Program, donated: Iterable[int]) -> None:
        super().__init__(program)
        self.merges_sums = not program.for_cpu
        self.aliased = set(program.aliases.values())
        self.donated = {*donated, *self.aliased, *program.donors}
        self.source = program.source
        self._by_counter, self._earlier = cache(self._decided_by_counter), cache(self._dependencies)

    @cached_property
    def exchanges(self) -> list[Exchange[Instruction]]:
        return self.program.exchanges

    def loops(self) -> Iterator[tuple[Loop[Instruction], int]]:
        seen = set[str]()
        for _, _, loops in self.program.executed():
            if loops and (body := self.body(loops[-1])) not in seen:
                seen.add(body)
                yield loops[-1], times(loops[:-1])

    def repeated(self) -> list[Product]:
        """Products that several devices compute identically."""
        return [product for product in self.products if product.classes < self.program.devices]

    @cached_property
    def products(self) -> list[Product]:
        products = list[Product]()
        for name, x, loops in self.program.executed():
            for inner, y, flops, _ in self.program.products(name, x):
                classes = self.flow.equality.classes(self.flow.node(inner, y)) if self.program.devices > 1 else 1
                products.append(Product(inner, y, classes, self.source(y) or self.source(x), times(loops) * flops))
        return products

    def accumulated(self, exchange: Exchange[Instruction], loop: Loop[Instruction] | None) -> float:
        if self._by_turns(exchange, loop) if loop else exchange.loops or not self.gates:
            return 0

        def test(part: Node) -> bool:
            if loop is None:
                return self._is_accumulated_over_calls(part)
            return self._is_accumulated(loop, part) and self._may_follow(exchange, loop, [part])

        size = sum(size for part, size in self.parts(exchange) if test(part))
        return size if size >= max(FEW_SCALARS, SHARE * exchange.operand) else 0

    def _by_turns(self, exchange: Exchange[Instruction], loop: Loop[Instruction]) -> bool:
        """Whether a counter selects the iterations of a loop in which an exchange runs."""
        inside, varying = self.inside(self.body(loop)), self.varying(self.body(loop))
        around = (
            self.operands(self.flow.node(name, x), 0)
            for name, x in self._conditionals
            if name in inside and any(exchange.computation in self.inside(y) for y in self.program.bodies(x))
        )
        return any(
            self._by_counter(predicate) and not varying.isdisjoint(self.flow.closure([predicate], within=inside))
            for predicate, *_ in around
        )

    @cached_property
    def _conditionals(self) -> list[tuple[str, Instruction]]:
        every = ((name, x) for name, computation in self.program.computations.items() for x in computation.values())
        return [(name, x) for name, x in every if x.opcode == "conditional"]

    def unrolled(self) -> Iterator[tuple[list[Exchange[Instruction]], int, float]]:
        by_sum = defaultdict[tuple[Hashable, ...], list[tuple[Exchange[Instruction], float, list[Node]]]](list)
        for exchange in self.summing():
            for part, size in self.parts(exchange) if self.could_merge(exchange) else ():
                if size >= FEW_SCALARS and (path := self._to_last_sum(part)):
                    by_sum[exchange.kind, str(exchange.groups), path[-1]].append((exchange, size, path))
        merged = defaultdict[tuple[str, ...], list[list[tuple[Exchange[Instruction], float]]]](list)
        for terms in by_sum.values():
            nodes = {node for _, _, path in terms for node in path}
            computed = (node for _, _, path in terms for node in path[1:])
            are_equal = not any(True for exchange, *_ in terms for _ in self._unequal_factors(exchange, nodes))
            if len(terms) > 1 and are_equal and all(self._commutes_with_sum(node, nodes) for node in computed):
                names = tuple(dict.fromkeys(exchange.x.name for exchange, _, _ in terms))
                merged[names].append([(exchange, size) for exchange, size, _ in terms])
        for sums in merged.values():
            exchanges = {x.x.name: x for terms in sums for x, _ in terms}
            sent = sum(x.times * x.sent() * size / (x.operand or 1) for terms in sums for x, size in terms[1:])
            yield [*exchanges.values()], max(map(len, sums)), sent

    def parts(self, exchange: Exchange[Instruction]) -> list[tuple[Node, float]]:
        """The arrays that XLA merged into a collective (as a tuple or concatenated), with their operand bytes."""
        leaves = self.flow.leaves(exchange.computation, exchange.x)
        parts = [part for leaf in leaves for part in self._slices(leaf, exchange.kind) or [leaf]]
        sizes = [self.flow.places[node].shape.bytes for node in parts]
        return [(node, exchange.operand * size / max(1, sum(sizes))) for node, size in zip(parts, sizes, strict=True)]

    def _slices(self, node: Node, kind: str) -> list[Node]:
        """The slices of an array, if it is used only through slices; otherwise empty."""
        if self.flow.opcode(node) == "slice":
            return [node]
        users = self.flow.uses[node]
        if any(self.flow.opcode(user) not in {*RENAMING, kind, "slice"} for user in users):
            return []
        slices = [self._slices(user, kind) for user in users]
        return [x for part in slices for x in part] if all(slices) else []

    def discarded(self) -> list[tuple[Instruction, int]]:
        # Selects between a new and an old value of state, by a predicate that depends on counters only.
        flow, kept = self.flow, dict[Node, tuple[Instruction, int]]()
        entry = {self.flow.node(self.program.entry, x): i for i, x in enumerate(self.program.parameters)}
        next_values = dict[Node, set[Node]]()
        for loop, _ in self.loops():
            body = self.body(loop)
            for n, result in zip(self.carried(body), flow.results(body), strict=True):
                next_values[n] = self.moved_from([result], WHOLE)

        def returns(n: Node, selected: Node, computed: set[Node], often: bool) -> bool:
            """Whether the selected value replaces ``n`` in the next iteration or call.

            An accumulator that is reset to an argument does not count.
            """
            if n in next_values:
                return selected in next_values[n]
            return n in entry and (entry[n] in self.aliased or often or not self.adds_up(computed, entry))

        for node, (_, x, _) in enumerate(flow.places):
            if x.opcode != "select" or not x.shapes[0].is_float or x.bytes < FEW_SCALARS:
                continue
            (predicate,) = self.operands(node, 0)
            if not self._by_counter(predicate):
                continue
            sides = [self.moved_from(self.operands(node, i), WHOLE) for i in (1, 2)]
            for side, other, chosen in ((*sides, "NE"), (*sides[::-1], "EQ")):
                is_computed = {flow.opcode(n) for n in other} & (SUMS | SCALES)
                old = {n for n in side - other if flow.places[n].shape.elements == x.shapes[0].elements}
                often = chosen == self._comparison(predicate)
                if is_computed and (old := {n for n in old if returns(n, node, other, often)}):
                    kept[min(old)] = x, x.bytes
        return list(kept.values())

    def could_merge(self, exchange: Exchange[Instruction]) -> bool:
        is_reported = any(other is exchange and loop is not None for other, loop, _ in self.reduced)
        return exchange.kind != "collective-permute" and not is_reported

    def only_accumulated(self, exchange: Exchange[Instruction], loop: Loop[Instruction]) -> bool:
        body = self.body(loop)
        start = self.flow.leaves(exchange.computation, exchange.x)
        nodes = self.linear(body, start)
        is_added = nodes is not None and self.ends(body, nodes) <= self.accumulators(body) | self.stacked(body)
        return is_added and self._may_follow(exchange, loop, start)

    def _may_follow(self, exchange: Exchange[Instruction], loop: Loop[Instruction], start: Iterable[Node]) -> bool:
        """Whether factors of ``start`` in an iteration are equal on the devices that exchange, or in all iterations."""
        body = self.body(loop)
        inside = self.inside(body)
        factors = self._unequal_factors(exchange, self.flow.reached(start, within=inside))
        return all(self.varying(body).isdisjoint(self.flow.closure([factor], within=inside)) for factor in factors)

    def _unequal_factors(self, exchange: Exchange[Instruction], nodes: set[Node]) -> Iterator[Node]:
        """Values that multiply or select some of ``nodes`` and differ between the devices that exchange."""
        for node in nodes:
            opcode = self.flow.opcode(node)
            at = {"multiply": (0, 1), "divide": (1,), "select": (0,), "conditional": (0,)}.get(opcode, ())
            others = (n for i in at for n in self.operands(node, i) if n not in nodes)
            yield from (n for n in others if not self.flow.equality.within(n, exchange.groups))

    def merge_key(self, exchange: Exchange[Instruction]) -> tuple[str, str, int]:
        name = exchange.computation
        kinds = {x.x.name: x.kind for x in self.exchanges if x.computation == name}
        before = sum(kinds[other] == exchange.kind for other in self._earlier(name)[exchange.x.name])
        return name, str(exchange.groups), before

    def _dependencies(self, name: str) -> dict[str, frozenset[str]]:
        """For each collective of a computation, those that it depends on in one execution of the computation."""
        flow, earlier = self.flow, dict[str, frozenset[str]]()

        def through(node: Node) -> bool:
            # The parameter leads to the caller, or to a loop's last iteration; of earlier collectives, all is known.
            of, x, _ = flow.places[node]
            return of != name or (x.opcode != "parameter" and x.name not in earlier)

        for exchange in (x for x in self.exchanges if x.computation == name):
            nodes = flow.closure(flow.leaves(name, exchange.x), through, self.inside(name))
            places = (flow.places[node] for node in nodes)
            direct = frozenset(x.name for of, x, _ in places if of == name and x.name in earlier)
            earlier[exchange.x.name] = direct.union(*(earlier[other] for other in direct))
        return earlier

    def converted(self, exchange: Exchange[Instruction]) -> Iterator[tuple[Shape, Shape]]:
        # Ignore conversions by XLA, for backends that lack a narrow collective.
        promoted = any(name.endswith("_promoted") for name in exchange.x.called("to_apply"))
        if promoted or (exchange.kind not in REDUCING and self.program.for_cpu):
            return
        through = MOVING - {"convert", "all-gather", "collective-permute", "all-to-all", "while"}
        name = exchange.computation
        for operand in exchange.x.operands:
            for node in self.moved_from([self.flow.node(name, self.program.computations[name][operand])], through):
                if self.flow.opcode(node) == "convert":
                    yield self.flow.places[self.operands(node, 0)[0]].shape, self.flow.places[node].shape

    def narrow_sums(self, loop: Loop[Instruction] | None) -> Iterator[tuple[Shape, Instruction]]:
        if loop is not None:
            body = self.body(loop)
            shapes = [self.flow.places[node].shape for node in self.carried(body)]
            yield from ((shapes[i], loop.operation) for i in sorted(self.accumulators(body)) if shapes[i].is_narrow)
            return
        for result, number in self.program.aliases.items():
            x, node = self.program.parameters[number], self.flow.results(self.program.entry)[result]
            if x.shapes[0].is_narrow and x.bytes >= FEW_SCALARS and self._adds_over_calls(x, node):
                yield x.shapes[0], x

    def operand_key(self, exchange: Exchange[Instruction]) -> object:
        computation, x = self.program.computations[exchange.computation], exchange.x
        origins = tuple(self.program.origin(computation, operand).name for operand in x.operands)
        shapes = tuple(computation[operand].shapes[0].dims for operand in x.operands)
        settings = x.lists("dimensions"), str(exchange.groups), shapes
        return exchange.computation, settings, origins

    def equal_bytes(self, exchange: Exchange[Instruction]) -> float:
        def covers(groups: Iterable[Device]) -> bool:
            of = {device: i for i, group in enumerate(groups) for device in group}
            return all(len({of.get(device) for device in group}) == 1 for group in exchange.groups)

        flow = self.flow
        operands = {n for node in flow.leaves(exchange.computation, exchange.x) for n in flow.sources[node]}
        joins = {n for n in self.moved_from(operands, RENAMING | {"fusion"}) if flow.opcode(n) == "concatenate"}
        parts = {n for join in joins for n in flow.sources[join]} or operands
        equal = [n for n in parts if flow.equality.within(n, exchange.groups)]
        others = [x for x in self.exchanges if equal and x is not exchange and covers(x.groups)]
        made = {n for x in others for n in flow.leaves(x.computation, x.x)}
        through = LINEAR | SCALES | REDUCING
        size = sum(flow.places[n].shape.bytes for n in equal if not made.isdisjoint(self.moved_from([n], through)))
        return size if size >= max(FEW_SCALARS, SHARE * exchange.operand) else 0

    def counted_once(self, loop: Loop[Instruction]) -> str:
        inner = list(self.program.executed(self.body(loop)))
        moved = sum(self.program.traffic(name, x) for name, x, _ in inner)
        # Loops over arrays in a TPU's vector memory move no bytes of main memory.
        if moved < COPIED and not any(True for name, x, _ in inner for _ in self.program.products(name, x)):
            return ""
        return f" is counted as one iteration, of {size_text(moved)}"

    @cached_property
    def gates(self) -> Gates:
        """Selects, conditionals and products with a flag, if a counter decides; and the arguments of such branches.

        A value that reaches a branch only as an argument is not used unless the counter selects the branch.
        """
        flow, gates = self.flow, Gates()
        for node, (_, x, leaf) in enumerate(flow.places):
            if x.opcode not in ("select", "conditional", "multiply") or not x.shapes[leaf].is_float:
                continue
            if x.opcode == "multiply":
                for i in (0, 1):
                    flags = self.moved_from(self.operands(node, 1 - i), WHOLE | {"broadcast"})
                    if any(self._is_flag(n) for n in flags):
                        gates[node] = [(self.moved_from(self.operands(node, i), WHOLE), set())]
                continue
            (predicate, *_) = self.operands(node, 0)
            if not self._by_counter(predicate):
                continue
            if x.opcode == "select":
                sides = [self.operands(node, i) for i in (1, 2)]
            else:
                branches = self.program.bodies(x)
                sides = [flow.results(name)[leaf : leaf + 1] for name in branches]
                for name in branches:
                    arguments = [y for y in self.program.computations[name].values() if y.opcode == "parameter"]
                    gates.update((argument, []) for y in arguments for argument in self.flow.leaves(name, y))
            if len(sides) == 2:
                a, b = (self.moved_from(side, WHOLE) for side in sides)
                gates[node] = [(a, b), (b, a)]
        return gates

    def _is_flag(self, node: Node) -> bool:
        """Whether a scalar depends on counters only: a non-float, or a float that a counter sets to zero."""
        x, shape = self.flow.places[node].x, self.flow.places[node].shape
        if shape.dims or not shape.is_float:
            return not shape.dims and self._by_counter(node)
        sides = [self.moved_from(self.operands(node, i), WHOLE) for i in (1, 2)] if x.opcode == "select" else []
        constants = [n for side in sides for n in side if self.flow.opcode(n) == "constant"]
        has_zero = any(self.flow.places[n].x.inside in ("0", "-0") for n in constants)
        return has_zero and self._by_counter(self.operands(node, 0)[0])

    def _is_accumulated_over_calls(self, part: Node) -> bool:
        """Whether calls only add a value to an argument, and use it otherwise only if a counter selects that."""
        flow, program, gates = self.flow, self.program, self.gates
        reached = flow.reached([part], lambda node: node not in gates)
        if any(node in reached and node not in gates for node in flow.results(program.entry)):
            return False
        arguments = {flow.node(program.entry, x): x.shapes[0].elements for x in program.parameters}
        for side, other in (pair for gate in reached & gates.keys() for pair in gates[gate]):
            for node in side & reached:
                if flow.opcode(node) in SUMS and self.only_sums(node, part, reached):
                    before = self.moved_from([n for i in (0, 1) for n in self.operands(node, i)], WHOLE)
                    if any(arguments.get(n) == flow.places[node].shape.elements for n in before - other):
                        return True
        return False

    def _adds_over_calls(self, argument: Instruction, result: Node) -> bool:
        """Whether calls add to an argument that a counter clears, and use it otherwise only if a counter selects that.

        Parameters, which are added to, too, keep their value where they are not.
        """
        flow, gates, node = self.flow, self.gates, self.flow.node(self.program.entry, argument)
        reached = flow.reached([node], lambda n: n not in gates)
        others = {*flow.results(self.program.entry)} - {result}
        if not others.isdisjoint(reached) or not all(self._commutes_with_sum(n, reached) for n in reached - {node}):
            return False
        behind = self.moved_from([result], WHOLE)
        sides = [pair for gate in behind & gates.keys() for pair in gates[gate]]
        # Cleared behind the sum, by a gate of the result, or before it, by a gate of one of its terms.
        for side, other in [*sides, (behind, {node})]:
            for n in (n for n in side if flow.opcode(n) in SUMS):
                terms = self.moved_from([m for i in (0, 1) for m in self.operands(n, i)], WHOLE)
                before = [pair for gate in terms & gates.keys() for pair in gates[gate]]
                if any(node in held and node not in cleared for held, cleared in [*before, (terms, other)]):
                    return True
        return False

    def _decided_by_counter(self, predicate: Node) -> bool:
        """Whether a predicate is computed from scalar arguments only, without floats and collectives."""
        if predicate in self._of_floats:
            return False
        places = [self.flow.places[node] for node in self.flow.closure([predicate])]
        is_scalar = any(place.x.shapes and place.shape.elements == 1 and place.shape.kind == "pred" for place in places)
        parameters = [place for place in places if place.x.opcode == "parameter"]
        arguments = [place.shape for place in parameters if place.computation == self.program.entry]
        return is_scalar and bool(parameters) and all(shape.elements == 1 for shape in arguments)

    @cached_property
    def _of_floats(self) -> set[Node]:
        """All values that depend on floats or collectives."""
        places = enumerate(self.flow.places)
        return self.flow.reached(n for n, (_, x, i) in places if x.collective or (x.shapes and x.shapes[i].is_float))

    def _comparison(self, predicate: Node) -> str:
        """The direction of the comparison that computes a predicate, for instance "EQ"; empty for others."""
        origins = [self.flow.places[n].x for n in self.moved_from([predicate], WHOLE | {"broadcast"})]
        return "".join(x.attributes.partition("direction=")[2][:2] for x in origins if x.opcode == "compare")
