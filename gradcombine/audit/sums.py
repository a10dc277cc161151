"""Finds the values of a compiled program that are only added up, in a loop, after it, or in a row of additions."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import cache

from gradcombine.audit.flow import LINEAR, MOVING, Flow, Node
from gradcombine.audit.hlo import Instruction
from gradcombine.audit.program import Program
from gradcombine.audit.subject import ADDING, REDUCING, Loop, walk

SUMS = {"add", "subtract"}
RENAMING = {"get-tuple-element", "bitcast", "reshape", "parameter"}


class Sums:
    """Queries about the sums of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.flow = program, Flow(program)
        self.inside, self.accumulators = cache(self.flow.inner), cache(self._accumulators)
        self.varying, self.stacked = cache(self._varying), cache(self._stacked)

    @staticmethod
    def body(loop: Loop[Instruction]) -> str:
        """The computation of an iteration."""
        return loop.operation.called("body")[0]

    def carried(self, body: str) -> range:
        """The arrays that a loop carries, at the beginning of an iteration."""
        (parameter,) = (x for x in self.program.computations[body].values() if x.opcode == "parameter")
        return self.flow.leaves(body, parameter)

    def _accumulators(self, body: str) -> frozenset[int]:
        """Indices of the carried arrays that each iteration of a loop only adds to."""
        return frozenset(i for i, node in enumerate(self.carried(body)) if self._only_added_to(body, i, node))

    def _varying(self, body: str) -> frozenset[Node]:
        """The carried arrays that an iteration of a loop may change."""
        carried = zip(self.carried(body), self.flow.results(body), strict=True)
        return frozenset(node for node, result in carried if node not in self.moved_from([result]))

    def linear(self, body: str, start: Iterable[Node]) -> set[Node] | None:
        """Everything that an iteration computes from ``start``; None unless it is linear in it."""
        starts = set(start)
        # The walk ends at the first operations that are not linear in any operand.
        nodes = self.flow.reached(starts, lambda node: self._commutes_with_sum(node, set()), self.inside(body))
        return nodes if all(self._commutes_with_sum(node, nodes) for node in nodes - starts) else None

    def ends(self, body: str, nodes: set[Node]) -> set[int]:
        """Indices of the carried arrays whose next value is one of ``nodes``."""
        return {i for i, node in enumerate(self.flow.results(body)) if node in nodes}

    def adds_up(self, results: Iterable[Node], arguments: Iterable[Node]) -> bool:
        """Whether the results are sums of arguments, with factors that do not depend on any array."""
        closure = self.flow.closure(results)
        arrays = {node for node in closure.intersection(arguments) if self.flow.places[node].shape.dims}
        nodes = self.flow.reached(arrays, closure.__contains__) & closure
        return all(self._commutes_with_sum(node, nodes) for node in nodes - arrays)

    def only_sums(self, result: Node, part: Node, reached: set[Node]) -> bool:
        """Whether ``result`` depends on ``part`` only through sums."""
        nodes = self.flow.closure([result]) & reached | {result}
        return all(self._commutes_with_sum(node, nodes) for node in nodes - {part})

    def moved_from(self, start: Iterable[Node], through: Set[str] = MOVING) -> set[Node]:
        """Follows values back through operations that only move them, up to and including those that compute them."""
        flow = self.flow
        return walk(start, lambda node: flow.sources[node] if flow.opcode(node) in through else ())

    def operands(self, node: Node, index: int) -> range:
        name, x, _ = self.flow.places[node]
        return self.flow.leaves(name, self.program.computations[name][x.operands[index]])

    def _to_last_sum(self, node: Node) -> list[Node]:
        """A value and what is computed from it alone, each with one use, up to the last of the sums; may be empty."""
        path, end = [node], 0
        while len(users := set(self.flow.uses[path[-1]])) == 1:
            path += users
            if not self._commutes_with_sum(path[-1], {path[-2]}) or self.flow.opcode(path[-1]) in ("while", *REDUCING):
                break
            end = len(path) if self.flow.opcode(path[-1]) in SUMS else end
        return path[:end]

    def _is_accumulated(self, loop: Loop[Instruction], part: Node) -> bool:
        body = self.body(loop)
        ends = self.ends(body, self.linear(body, [part]) or set())
        stacked = ends - self.accumulators(body)
        return bool(ends) and stacked <= self.stacked(body) and all(self._is_summed_after(loop, i) for i in stacked)

    def _is_summed_after(self, loop: Loop[Instruction], index: int) -> bool:
        """Whether the rows of an array that a loop stacks are only added up after it."""
        flow, x = self.flow, loop.operation
        computations = self.program.computations
        (start,) = (flow.node(name, x, index) for name in computations if computations[name].get(x.name) is x)
        moving = {"while", *RENAMING, "copy", "convert", "fusion", "tuple"} - {"reshape"}
        reached = flow.reached([start], lambda node: flow.opcode(node) in moving)
        users = [flow.places[n].x for n in reached if flow.opcode(n) not in moving]
        is_returned = not reached.isdisjoint(flow.results(self.program.entry))
        return bool(users) and not is_returned and all(self._adds_rows(x) for x in users)

    def _adds_rows(self, x: Instruction) -> bool:
        return x.opcode == "reduce" and 0 in x.lists("dimensions") and self.program.reduction(x) == "add"

    def _only_added_to(self, body: str, index: int, node: Node) -> bool:
        if self.flow.places[node].shape.kind in ("token", "pred"):
            return False
        nodes = self.linear(body, [node]) or set()
        is_sum = any(self.flow.opcode(n) in SUMS or self._adds_to(n, nodes) for n in nodes)
        return is_sum and self.ends(body, nodes) == {index}

    def _adds_to(self, node: Node, nodes: set[Node]) -> bool:
        """Whether a matrix product adds one of ``nodes`` as its third operand (a GEMM with beta = 1)."""
        x = self.flow.places[node].x
        is_gemm = x.opcode == "custom-call" and len(x.operands) > 2 and '"beta":1' in x.attributes
        return is_gemm and not any(n in nodes for i in (0, 1) for n in self.operands(node, i))

    def _commutes_with_sum(self, node: Node, nodes: set[Node]) -> bool:
        """Whether an operation is linear in those of its operands that are in ``nodes``."""
        opcode, x = self.flow.opcode(node), self.flow.places[node].x

        def takes(*indices: int) -> bool:
            return any(n in nodes for i in indices if i < len(x.operands) for n in self.operands(node, i))

        if opcode == "multiply":
            return not (takes(0) and takes(1))
        if opcode == "divide":
            return not takes(1)
        if opcode in ("select", "conditional"):
            return not takes(0)
        if opcode in ("dynamic-slice", "dynamic-update-slice"):
            return not takes(*range(1 if opcode == "dynamic-slice" else 2, len(x.operands)))
        if opcode in REDUCING:
            return self.program.reduction(x) in ADDING
        return opcode in LINEAR or self._adds_to(node, nodes)

    def _stacked(self, body: str) -> set[int]:
        """Indices of the carried arrays to which each iteration of a loop writes one row."""
        written = list[tuple[int, Node]]()
        for i, (node, result) in enumerate(zip(self.carried(body), self.flow.results(body), strict=True)):
            if any(self.flow.opcode(n) == "dynamic-update-slice" for n in self.moved_from([result])):
                written.append((i, node))
        return {i for i, node in written if self.ends(body, self.flow.reached([node], within=self.inside(body))) <= {i}}
