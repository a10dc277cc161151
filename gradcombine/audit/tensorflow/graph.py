# pyright: standard
"""Answers the queries of the rules for TensorFlow graphs: collectives, loops and branches, sums and variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gradcombine.audit.subject import COPIED, FEW_SCALARS, SHARE, Exchange, Facts, Loop, Shape, Subject, times, walk
from gradcombine.audit.tensorflow.inlined import Inlined
from gradcombine.audit.tensorflow.values import (
    CHOSEN,
    EITHER,
    FIRST,
    LINEAR,
    MOVED,
    OF_SHAPES,
    SCALED,
    SELECTS,
    SUMS,
    SUMS_OF_DEVICES,
    WRITES,
    GraphLoop,
    Operation,
    Value,
    closure,
    linear_in,
    makers,
    moved_from,
    origins,
)

PASSES = {"Identity", EITHER, CHOSEN}


@dataclass
class Sums:
    """Accumulators of values from which nothing else is computed.

    Attributes:
      carried: indices of carried values of the loop.
      variables: handles of variables that are written or added to.
      values: all values on the way there.
      added: whether there was an addition.
    """

    carried: set[int] = field(default_factory=set)
    variables: set[Value] = field(default_factory=set)
    values: set[Value] = field(default_factory=set)
    added: bool = False


class Graph(Inlined, Subject[Operation]):
    """Queries of rules and reports for a graph; arguments as for `Inlined`."""

    noun, merges_sums = "variables", True

    @cached_property
    def devices(self) -> int:
        """Number of devices that run the graph together, as far as the graph shows."""
        return max([1, *(exchange.members for exchange in self.exchanges if exchange.groups)])

    @cached_property
    def exchanges(self) -> list[Exchange[Operation]]:
        """The collectives of one device, in program order: of the one that exchanges most, if the graph has several."""
        every = [exchange for x in self.operations if (exchange := self._exchange(x)) is not None]
        by_device, shared = defaultdict[str, list[Exchange[Operation]]](list), list[Exchange[Operation]]()
        for exchange in every:
            (shared if exchange.x.op in SUMS_OF_DEVICES else by_device[exchange.x.device]).append(exchange)
        busiest = max(by_device.values(), key=lambda some: sum(e.times * e.size for e in some), default=[])
        chosen = {exchange.x for exchange in (*busiest, *shared)}
        return [exchange for exchange in every if exchange.x in chosen]

    @cached_property
    def unknown(self) -> Facts:
        """Facts that the graph does not show."""
        counts = {
            "the size": sum(not x.exact for x in self.exchanges),
            "the group": sum(not x.groups for x in self.exchanges),
        }
        facts: Facts = {
            "compiled": ["bytes moved in memory, and matrix products"],
            "code": list(self.notes),
            "exchanges": [f"{text} of {n} collective{'s' * (n > 1)}" for text, n in counts.items() if n],
        }
        return {fact: texts for fact, texts in facts.items() if texts}

    def controls(self) -> Iterator[tuple[str, str, str]]:
        """Yields loops and branches: a description, the number of executions per call, and the source."""
        for loop in self.graph_loops:
            count = times(loop.operation.loops)
            often = "unknown" if loop.trips is None else f"{count * loop.trips:,}"
            yield "loop", often, self.source(loop.operation)
        for x in self.conditionals:
            yield "branch", f"{times(x.loops):,}", self.source(x)

    def loops(self) -> Iterator[tuple[GraphLoop, int]]:
        device_of = dict[tuple[object, ...], str]()  # each replica has its own copy of a loop
        for loop in self.graph_loops:
            x = loop.operation
            copied = loop.trips, len(x.loops), *(v.shape for v in loop.carried)
            if (loop.trips is None or loop.trips > 1) and device_of.setdefault(copied, x.device) == x.device:
                yield loop, times(x.loops)

    def accumulated(self, exchange: Exchange[Operation], loop: Loop[Operation] | None) -> float:
        assert loop is None or isinstance(loop, GraphLoop)
        if loop is not None and self._by_turns(exchange.x, loop):
            return 0
        parts = self.parts(exchange.x)
        large = [v for v in parts if v.shape.bytes >= FEW_SCALARS or not exchange.exact]
        added = (self._only_added([v], loop, exchange.x) for v in large)
        return exchange.operand if any(sums.carried or sums.variables for sums in added if sums) else 0

    def _by_turns(self, x: Operation, loop: GraphLoop) -> bool:
        """Whether a counter selects the iterations of a loop in which an operation runs."""
        varying = {v for v, after in zip(loop.carried, loop.results, strict=True) if origins(after, {v}) != {v}}
        around = x.site.branches[len(loop.operation.site.branches) :]
        decisions = (closure(self.conditionals[index].inputs[:1]) for index, _ in around)
        return any(values & varying and not any(v.shape.is_float for v in values) for values in decisions)

    def unrolled(self) -> Iterator[tuple[list[Exchange[Operation]], int, float]]:
        by_sum = defaultdict[tuple[object, ...], dict[Operation, Exchange[Operation]]](dict)
        for exchange in self.summing():
            if self.could_merge(exchange):
                for part in self.parts(exchange.x):
                    for last in self.sums_of(part)[-1:]:
                        by_sum[self.key(exchange.x), last][exchange.x] = exchange
        for group in {tuple(group): list(group.values()) for group in by_sum.values() if len(group) > 1}.values():
            yield group, len(group), sum(x.times * x.sent() for x in group[1:])

    def discarded(self) -> list[tuple[Operation, int]]:
        # Writes of one device's variables for which a counter chooses between a new value and the old one.
        writes = list[tuple[Operation, int]]()
        for x in self.operations:
            if x.op not in WRITES or (handle := x.variable) is None:
                continue
            array = x.inputs[1].shape
            if not array.is_float or (array.exact and array.bytes < FEW_SCALARS):
                continue
            for decision, (a, b), in_branch in self._choices(x.inputs[1]):
                kept = [any(self._reads(v, handle) for v in moved_from([side])) for side in (a, b)]
                computed = [self._is_computed(side, handle, in_branch, x) for side in (a, b)]
                if any(a and b for a, b in zip(kept, computed[::-1], strict=True)) and self._by_counter(decision):
                    writes.append((x, times(x.loops) * array.bytes))
                    break
        first = min((x.device for x, _ in writes), default="")
        return [(x, size) for x, size in writes if x.device == first]

    def could_merge(self, exchange: Exchange[Operation]) -> bool:
        return all(other is not exchange for other, _, _ in self.reduced)

    def only_accumulated(self, exchange: Exchange[Operation], loop: Loop[Operation]) -> bool:
        assert isinstance(loop, GraphLoop)
        return self._only_added(exchange.x.outputs, loop) is not None

    def merge_key(self, exchange: Exchange[Operation]) -> tuple[object, ...]:
        # What a loop carries comes from earlier iterations.
        carried = {v for loop in exchange.x.site.loops for v in loop.carried}
        return exchange.x.site, self.key(exchange.x), len(closure(exchange.x.sent, carried) & self._exchanged)

    @cached_property
    def _exchanged(self) -> set[Value]:
        return {v for exchange in self.exchanges for v in exchange.x.outputs}

    def converted(self, exchange: Exchange[Operation]) -> Iterator[tuple[Shape, Shape]]:
        for x in makers(moved_from(exchange.x.sent)):
            if x.op == "Cast":
                yield x.inputs[0].shape, x.outputs[0].shape

    def narrow_sums(self, loop: Loop[Operation] | None) -> Iterator[tuple[Shape, Operation]]:
        assert loop is None or isinstance(loop, GraphLoop)
        if loop is not None:
            narrow = (i for i, v in enumerate(loop.carried) if v.shape.is_narrow and self._adds_only(i, loop))
            yield from ((loop.carried[i].shape, loop.operation) for i in narrow)
        written = {handle: x for handle, xs in self.touching.items() for x in xs[::-1] if x.op in WRITES}
        narrow = {handle: x for handle, x in written.items() if x.inputs[1].shape.is_narrow}
        first = min((x.device for x in narrow.values()), default="")
        for handle, x in narrow.items():
            if x.device == first and self._adds_to(handle, loop):
                yield x.inputs[1].shape, x if loop is None else loop.operation

    def operand_key(self, exchange: Exchange[Operation]) -> object:
        arrays = self._packed(exchange.x.sent)
        return None if any(len(origins(v)) != 1 for v in arrays) else (self.key(exchange.x), *arrays)

    def _packed(self, values: Iterable[Value]) -> list[Value]:
        """The arrays that a strategy flattened and concatenated for a collective."""
        arrays = list[Value]()
        for v in values:
            (end, *others) = origins(v) or {v}
            x = None if others else end.maker
            if x is not None and x.op in ("Reshape", "ConcatV2"):
                arrays += self._packed(x.inputs[MOVED[x.op]])
            else:
                arrays.append(v if others else end)
        return arrays

    def equal_bytes(self, exchange: Exchange[Operation]) -> float:
        earlier, arrays = self.made_equal(exchange.x), self._packed(exchange.x.sent)
        rows = zip(*(self._packed(y.sent) for y in self.peers(exchange.x)), strict=False)
        equal = [moved_from(row[:1], linear=True) & earlier and self.are_equal(row, earlier) for row in rows]
        sizes = [v.shape.bytes for v in arrays]
        share = sum(size for size, known in zip(sizes, equal, strict=False) if known) / max(1, sum(sizes))
        return share * exchange.operand if share >= SHARE else 0

    def counted_once(self, loop: Loop[Operation]) -> str:
        inside = (x for x in self.operations if loop in x.site.loops)
        arrays = [v.shape for x in inside for v in x.outputs]
        size = sum(array.bytes for array in arrays)
        unknown = any(array.kind and not array.exact for array in arrays)
        return f", {loop.operation.name}, is counted as one iteration" if size >= COPIED or unknown else ""

    def sums(self, start: Iterable[Value], loop: GraphLoop | None) -> Sums | None:
        """Finds the accumulators of values, in an iteration or a call; None if anything else is computed from them."""
        sums, waiting, products = Sums(), list(start), list[Operation]()
        while waiting:
            v = waiting.pop()
            if v in sums.values:
                continue
            sums.values.add(v)
            if v in self.escaping:
                return None
            if loop is not None and v in loop.results:
                sums.carried |= {i for i, result in enumerate(loop.results) if result == v}
            # The results of the loop are not followed beyond it.
            outside = set(loop.operation.outputs if loop is not None and v in loop.results else ())
            for x in v.users:
                if x.op in OF_SHAPES or outside.intersection(x.outputs):
                    continue
                if x.op in WRITES and v not in x.inputs[:1]:
                    handle = x.variable
                    if handle is None:
                        return None
                    sums.variables.add(handle)
                    sums.added |= x.op != "AssignVariableOp"
                elif (outputs := linear_in(x, v)) is not None:
                    sums.added |= x.op in SUMS
                    products += [x] * (x.op in SCALED)
                    waiting += outputs
                else:
                    return None
        if any(all(v in sums.values for v in x.inputs) for x in products):
            return None
        return sums

    def parts(self, x: Operation) -> list[Value]:
        """The arrays that a strategy concatenated for a collective, split again."""
        v = x.outputs[0]
        while len(users := v.users) == 1:
            (user,) = users
            if user.op in ("Split", "SplitV"):
                return user.outputs
            if MOVED.get(user.op) != FIRST or len(user.outputs) != 1:
                break
            (v,) = user.outputs
        return x.outputs

    def sums_of(self, v: Value) -> list[Operation]:
        """The successive additions that a value enters, as long as it has no other use."""
        additions, seen = list[Operation](), set[Value]()
        while v not in seen and v not in self.escaping:
            seen.add(v)
            users = [x for x in v.users if not self._is_dead(x)]
            outputs = linear_in(users[0], v) if len(users) == 1 else None
            if outputs is None or len(outputs) != 1 or users[0].op in SCALED:
                break
            additions += [x for x in users if x.op in SUMS]
            (v,) = outputs
        return additions

    def _is_dead(self, x: Operation) -> bool:
        return x.op in MOVED and not any(v.users or v in self.escaping for v in x.outputs)

    @cached_property
    def touching(self) -> dict[Value, list[Operation]]:
        """The operations that use a variable, by its handle."""
        touching = dict[Value, list[Operation]]()
        for v in self.values:
            if v.shape.kind == "" and v.users:
                for handle in sorted(origins(v), key=lambda handle: handle.number):
                    touching.setdefault(handle, []).extend(x for x in v.users if x.op not in (EITHER, CHOSEN))
        return touching

    def _exchange(self, x: Operation) -> Exchange | None:
        if not x.collective or (x.op in SUMS_OF_DEVICES and not self._sums_devices(x)):
            return None
        outputs = [v.shape for v in x.outputs]
        inputs = [v.shape for v in x.sent] or outputs
        operand, result = (sum(array.bytes for array in arrays) for arrays in (inputs, outputs))
        exact = all(array.exact for array in (*inputs, *outputs))
        function = x.site.function or self.name
        return Exchange(function, x, x.loops, self.group(x), operand, result, exact, x.name, x.reduction)

    def _sums_devices(self, x: Operation) -> bool:
        """Whether each of an operation's inputs is computed on a different device."""
        devices = [self.places(v) - {""} for v in x.inputs]
        return len(devices) > 1 and all(len(x) == 1 for x in devices) and len(set.union(*devices)) == len(devices)

    def _only_added(self, values: list[Value], loop: GraphLoop | None, x: Operation | None = None) -> Sums | None:
        """The accumulators of a collective's results; None unless each iteration, or each call, only adds to them."""
        sums = self.sums(values, loop)
        if sums is None or not all(loop is not None and self._adds_only(i, loop) for i in sums.carried):
            return None
        return sums if all(self._adds_to(handle, loop, x) for handle in sums.variables) else None

    def _adds_only(self, index: int, loop: GraphLoop) -> bool:
        """Whether each iteration of a loop only adds to this carried value."""
        if not loop.carried[index].shape.is_float:
            return False
        sums = self.sums([loop.carried[index]], loop)
        return sums is not None and sums.added and sums.carried == {index} and not sums.variables

    def _adds_to(self, handle: Value, loop: GraphLoop | None, collective: Operation | None = None) -> bool:
        """Whether each iteration, or each call, only adds to a variable.

        A variable that accumulates over calls must be read and cleared in a branch.
        """
        inside = [x for x in self.touching.get(handle, ()) if loop is None or loop in x.site.loops]
        if any(loop in x.site.loops for x in makers([handle])):
            return False
        outer = set(collective.site.branches if collective is not None else ())
        always = [x for x in inside if set(x.site.branches) <= outer]
        reads = [x for x in always if x.op == "ReadVariableOp" and not (loop is None and self._is_for_branches(x))]
        cleared = [x for x in inside if x.op == "AssignVariableOp" and self._clears(x, handle)] if loop is None else []
        if loop is None and not (cleared and self._is_read_in_branch(inside, outer)):
            return False
        added, through = any(x.op in ("AssignAddVariableOp", "AssignSubVariableOp") for x in inside), set[Value]()
        for x in reads:
            sums = self.sums(x.outputs, loop)
            if sums is None or sums.carried or sums.variables - {handle}:
                return False
            added, through = added or sums.added, through | sums.values
        for x in always if loop is None else inside:
            if x.op == "AssignVariableOp" and x.inputs[1] not in through and x not in cleared:
                return loop is None and any(self._reads(v, handle) for v in closure([x.inputs[1]]))
            if x.op not in (*WRITES, "ReadVariableOp", "VariableShape", "VarIsInitializedOp"):
                return False
        return added or bool(cleared)

    def _is_for_branches(self, read: Operation) -> bool:
        """Whether the value of a read is used only in branches."""
        outer = set(read.site.branches)

        def users(v: Value) -> list[Operation]:
            return [x for x in v.users if x.op in PASSES or set(x.site.branches) <= outer]

        values = walk(read.outputs, lambda v: [after for x in users(v) for after in x.outputs])
        return not values & self.escaping and all(x.op in PASSES for v in values for x in users(v))

    def _is_read_in_branch(self, touching: Iterable[Operation], outer: set[tuple[int, int]]) -> bool:
        reads = [x for x in touching if x.op == "ReadVariableOp" and any(v.users for v in x.outputs)]
        return any(not set(x.site.branches) <= outer or self._is_for_branches(x) for x in reads)

    def _clears(self, x: Operation, handle: Value) -> bool:
        """Whether a write in a branch replaces a variable's value by one that does not depend on it."""
        written = moved_from(x.inputs[1:2])
        choices = [side for y in makers(written) if y.op == CHOSEN for side in y.inputs[1:]]
        sides = choices or (x.inputs[1:2] if x.site.branches else [])
        return any(not any(self._reads(v, handle) for v in moved_from([side], linear=True)) for side in sides)

    def _reads(self, v: Value, handle: Value) -> bool:
        return any(x.op == "ReadVariableOp" and x.variable == handle for x in makers([v]))

    def _choices(self, value: Value) -> Iterator[tuple[Value, list[Value], bool]]:
        """Yields the selects and conditionals that a value comes from: predicate, sides, and whether conditional."""
        for x in makers(moved_from([value])):
            if (x.op in SELECTS or x.op == CHOSEN) and len(x.inputs) == 3:
                yield x.inputs[0], x.inputs[1:], x.op == CHOSEN

    def _is_computed(self, side: Value, handle: Value, in_branch: bool, at: Operation) -> bool:
        """Whether a side of a choice is computed even if the other one is chosen."""
        if in_branch:
            # Only values that a branch passes through are computed outside of it.
            producers = [v.maker for v in origins(side)]
            if any(x is None or not set(x.site.branches) <= set(at.site.branches) for x in producers):
                return False
        computed = moved_from([side])
        if any(x.op in LINEAR for x in makers(computed)):
            return True
        # A select between the variable's values before and after a write.
        written = [x for x in self.touching.get(handle, ()) if x.op in WRITES and x is not at]
        return any(self._reads(v, handle) for v in computed) and any(
            set(x.site.branches) <= set(at.site.branches) for x in written
        )

    def _by_counter(self, decision: Value) -> bool:
        """Whether a predicate depends on a variable or an argument, and on no floats."""
        values = closure([decision])
        is_state = any(x.op in ("ReadVariableOp", "Placeholder") for x in makers(values))
        return is_state and not any(v.shape.is_float for v in values)
