# pyright: standard
"""A graph of TensorFlow as rules and reports ask of it: its collectives, loops and branches, sums and variables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from gradcombine.audit.subject import (
    COPIED,
    FEW_SCALARS,
    REDUCING,
    Exchange,
    Loop,
    Reduced,
    Shape,
    Subject,
    times,
    walk,
)
from gradcombine.audit.tensorflow.constants import turns
from gradcombine.audit.tensorflow.inlined import SUMS_OF_DEVICES, WRITES, Operation, Turning, Value
from gradcombine.audit.tensorflow.values import LINEAR, OF_FIRST, SELECTS, Values


class Graph(Values, Subject[Operation]):
    """A graph, and what a report and findings ask of it; see `Inlined`."""

    noun, joins_sums = "variables", True

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        for turning in reversed(self.turnings):  # the innermost first
            turning.trips = turns(self, turning)

    @cached_property
    def devices(self) -> int:
        """The number of devices that run the graph together, as far as the graph says."""
        return max([1, *(exchange.members for exchange in self.exchanges if exchange.groups)])

    @cached_property
    def exchanges(self) -> list[Exchange[Operation]]:
        """The collectives of one device: of the one that exchanges most, where the graph holds several."""
        every = [exchange for x in self.operations if (exchange := self._exchange(x)) is not None]
        found, shared = defaultdict[str, list[Exchange[Operation]]](list), list[Exchange[Operation]]()
        for exchange in every:
            (shared if exchange.x.op in SUMS_OF_DEVICES else found[exchange.x.device]).append(exchange)
        busiest = max(found.values(), key=lambda of: sum(e.times * e.size for e in of), default=[])
        chosen = {exchange.x for exchange in (*busiest, *shared)}
        return [exchange for exchange in every if exchange.x in chosen]

    def unread(self) -> Iterator[str]:
        """The parts of the graph that cannot be read."""
        yield from self.notes
        for text, told in (("the size", lambda e: e.exact), ("the group", lambda e: bool(e.groups))):
            if n := sum(not told(exchange) for exchange in self.exchanges):
                yield f"{text} of {n} collective{'s' * (n > 1)}"

    def controls(self) -> Iterator[tuple[str, str, str]]:
        """Its loops and branches: what they are, how often they turn or decide in a call, and their lines."""
        for turning in self.turnings:
            count = times(turning.operation.loops)
            yield (
                "loop",
                "unknown" if turning.trips is None else f"{count * turning.trips:,}",
                self.source(turning.operation),
            )
        for x in self.conditionals:
            yield "branch", f"{times(x.loops):,}", self.source(x)

    def loops(self) -> Iterator[tuple[Turning, int]]:
        for turning in self.turnings:
            if turning.trips is None or turning.trips > 1:
                yield turning, times(turning.operation.loops)

    @cached_property
    def reduced(self) -> list[Reduced[Operation]]:
        """The exchanges of gradients that a loop, or calls, only add up."""
        found = list[Reduced[Operation]]()
        for exchange in self._reducing():
            parts = self.parts(exchange.x)
            large = [v for v in parts if self.arrays[v].bytes >= FEW_SCALARS or not exchange.exact]
            for turning in (*exchange.x.loops, None):
                if any(self._only_added([v], turning, exchange.x) for v in large):
                    found.append(Reduced(exchange, turning, exchange.operand))
                    break
        return found

    def unrolled(self) -> list[list[Exchange[Operation]]]:
        alike = defaultdict[tuple[object, ...], dict[Operation, Exchange[Operation]]](dict)
        for exchange in self._reducing():
            if self.could_join(exchange):
                for part in self.parts(exchange.x):
                    for last in self.sums_of(part)[-1:]:
                        alike[self.key(exchange.x), last][exchange.x] = exchange
        groups = {tuple(found): list(found.values()) for found in alike.values() if len(found) > 1}
        return list(groups.values())

    def kept(self) -> list[tuple[Operation, int]]:
        """Variables that are computed anew, and keep what they held where a counter says so: of one device."""
        found = list[tuple[Operation, int]]()
        for x in self.operations:
            array = self.arrays[x.inputs[1]] if x.op in WRITES else None
            if array is None or not array.is_float or (array.exact and array.bytes < FEW_SCALARS):
                continue
            handle = self.variable(x)
            for decision, (a, b), branches in self._choices(x.inputs[1]):
                kept = [any(self._reads(v, handle) for v in self.moved_from([side])) for side in (a, b)]
                made = [self._is_computed(side, handle, branches, x) for side in (a, b)]
                if any(a and b for a, b in zip(kept, made[::-1], strict=True)) and self._counts(decision):
                    found.append((x, times(x.loops) * array.bytes))
                    break
        first = min((x.device for x, _ in found), default="")
        return [(x, size) for x, size in found if x.device == first]

    def could_join(self, exchange: Exchange[Operation]) -> bool:
        return all(found.exchange is not exchange for found in self.reduced)

    def unused(self, exchange: Exchange[Operation], loop: Loop[Operation]) -> bool:
        assert isinstance(loop, Turning)
        sums = self.sums(exchange.x.outputs, loop)
        if sums is None or not all(self._adds_only(i, loop) for i in sums.carried):
            return False
        return all(self._adds_to(handle, loop) for handle in sums.variables)

    def beside(self, exchange: Exchange[Operation]) -> tuple[object, ...]:
        outputs = {v for other in self.exchanges for v in other.x.outputs}
        return exchange.x.site, self.key(exchange.x), len(self.closure(self.given(exchange.x)) & outputs)

    def converted(self, exchange: Exchange[Operation]) -> Iterator[tuple[Shape, Shape]]:
        for v in self.moved_from(self.given(exchange.x)):
            if (x := self.producers.get(v)) is not None and x.op == "Cast":
                yield self.arrays[x.inputs[0]], self.arrays[v]

    def narrow_sums(self, loop: Loop[Operation] | None) -> Iterator[tuple[Shape, Operation]]:
        turning = loop if isinstance(loop, Turning) else None
        for i, v in enumerate(turning.carried if turning is not None else ()):
            if turning is not None and (shape := self.arrays[v]).is_narrow and self._adds_only(i, turning):
                yield shape, turning.operation
        written = {handle: x for handle, xs in self.touching.items() for x in xs[::-1] if x.op in WRITES}
        narrow = {h: (self.arrays[x.inputs[1]], x) for h, x in written.items()}
        first = min((x.device for shape, x in narrow.values() if shape.is_narrow), default="")
        for handle, (shape, x) in narrow.items():
            if shape.is_narrow and x.device == first and self._adds_to(handle, turning):
                yield shape, x if turning is None else turning.operation

    def exchanged(self, exchange: Exchange[Operation]) -> object:
        origins = tuple(tuple(self.origins(v)) for v in self.given(exchange.x))
        return (exchange.kind, self.key(exchange.x), origins) if all(len(found) == 1 for found in origins) else None

    def is_equal(self, exchange: Exchange[Operation]) -> bool:
        earlier = self.made_equal(exchange.x)
        passed = self.moved_from(self.given(exchange.x), linear=True) & earlier
        return bool(passed) and self.equal_on_all(exchange.x, earlier)

    def one_turn(self, loop: Loop[Operation]) -> str:
        inside = (x for x in self.operations if loop in x.site.turns)
        arrays = [self.arrays[v] for x in inside for v in x.outputs]
        made = sum(array.bytes for array in arrays)
        unknown = any(array.kind and not array.exact for array in arrays)
        return f", {loop.operation.name}, is counted as one iteration" if made >= COPIED or unknown else ""

    def _reducing(self) -> Iterator[Exchange[Operation]]:
        return (x for x in self.exchanges if x.kind in REDUCING and not x.few and x.members > 1)

    def _exchange(self, x: Operation) -> Exchange | None:
        if not x.collective or (x.op in SUMS_OF_DEVICES and not self._sums_devices(x)):
            return None
        taken = [self.arrays[v] for v in x.outputs]
        given = [self.arrays[v] for v in self.given(x)] or taken
        operand, result = (sum(array.bytes for array in arrays) for arrays in (given, taken))
        exact = all(array.exact for array in (*given, *taken))
        where = x.site.function or self.name
        return Exchange(where, x, x.loops, self.group(x), operand, result, exact, x.name)

    def _sums_devices(self, x: Operation) -> bool:
        """Whether each of an operation's inputs is made on a device of its own."""
        places = [self.places(v) - {""} for v in x.inputs]
        return len(places) > 1 and all(len(x) == 1 for x in places) and len(set.union(*places)) == len(places)

    def _only_added(self, values: list[Value], turning: Turning | None, x: Operation) -> bool:
        sums = self.sums(values, turning)
        if sums is None or not (sums.carried or sums.variables):
            return False
        carried = all(turning is not None and self._adds_only(i, turning) for i in sums.carried)
        return carried and all(self._adds_to(handle, turning, x) for handle in sums.variables)

    def _adds_only(self, index: int, turning: Turning) -> bool:
        """Whether each turn only adds to what a loop carries there."""
        if not self.arrays[turning.carried[index]].is_float:
            return False
        sums = self.sums([turning.carried[index]], turning)
        return sums is not None and sums.added and sums.carried == {index} and not sums.variables

    def _adds_to(self, handle: Value, turning: Turning | None, beside: Operation | None = None) -> bool:
        """Whether each turn, or each call, only adds to a variable; what calls add to, a branch reads and clears."""
        inside = [x for x in self.touching.get(handle, ()) if turning is None or turning in x.site.turns]
        made = self.producers.get(handle)
        if turning is not None and made is not None and turning in made.site.turns:
            return False
        around = set(beside.site.branches if beside is not None else ())
        always = [x for x in inside if set(x.site.branches) <= around]
        reads = [x for x in always if x.op == "ReadVariableOp" and not (turning is None and self._is_for_branches(x))]
        cleared = (
            [x for x in inside if x.op == "AssignVariableOp" and self._clears(x, handle)] if turning is None else []
        )
        if turning is None and not (cleared and self._is_read_in_branch(inside, around)):
            return False
        added, through = any(x.op in ("AssignAddVariableOp", "AssignSubVariableOp") for x in inside), set[Value]()
        for x in reads:
            sums = self.sums(x.outputs, turning)
            if sums is None or sums.carried or sums.variables - {handle}:
                return False
            added, through = added or sums.added, through | sums.values
        for x in always if turning is None else inside:
            if x.op == "AssignVariableOp" and x.inputs[1] not in through and x not in cleared:
                return turning is None and any(self._reads(v, handle) for v in self.closure([x.inputs[1]]))
            if x.op not in (*WRITES, "ReadVariableOp", "VariableShape", "VarIsInitializedOp"):
                return False
        return added or bool(cleared)

    def _is_for_branches(self, read: Operation) -> bool:
        """Whether only branches use what is read."""
        around = set(read.site.branches)

        def beside(v: Value) -> list[Operation]:
            return [x for x in self.uses.get(v, ()) if set(x.site.branches) <= around]

        def onward(v: Value) -> Iterator[Value]:
            yield from self.targets.get(v, ())
            yield from (after for x in beside(v) for after in x.outputs)

        used = walk(read.outputs, onward)
        return not used & self.escaping and all(x.op == "Identity" for v in used for x in beside(v))

    def _is_read_in_branch(self, touching: Iterable[Operation], around: set[tuple[int, int]]) -> bool:
        def used(x: Operation) -> bool:
            return any(self.uses.get(v) or self.targets.get(v) for v in x.outputs)

        reads = [x for x in touching if x.op == "ReadVariableOp" and used(x)]
        return any(not set(x.site.branches) <= around or self._is_for_branches(x) for x in reads)

    def _clears(self, x: Operation, handle: Value) -> bool:
        """Whether a variable gets, in a branch, what is not made of what it held."""
        given = self.moved_from(x.inputs[1:2])
        choices = [side for v in given if v in self.chosen for side in self.chosen[v][1]]
        sides = choices or (x.inputs[1:2] if x.site.branches else [])
        return any(not any(self._reads(v, handle) for v in self.moved_from([side], linear=True)) for side in sides)

    def _reads(self, v: Value, handle: Value | None) -> bool:
        x = self.producers.get(v)
        return x is not None and x.op == "ReadVariableOp" and handle is not None and self.variable(x) == handle

    def _choices(self, value: Value) -> Iterator[tuple[Value, list[Value], int | None]]:
        """The selects and conditionals that a value comes from: what decides, both sides, and how deep branches are."""
        for v in self.moved_from([value]):
            x = self.producers.get(v)
            if x is not None and x.op in SELECTS:
                yield x.inputs[0], x.inputs[1:], None
            elif v in self.chosen and len(self.chosen[v][1]) == 2:
                decision, sides = self.chosen[v]
                yield decision, sides, 1

    def _is_computed(self, side: Value, handle: Value | None, branches: int | None, at: Operation) -> bool:
        """Whether a side of a choice is computed whether it is chosen or not."""
        if branches is not None:
            # What a branch computes by itself runs only there: what it hands on is computed outside.
            made = [self.producers.get(v) for v in self.origins(side)]
            if any(x is None or not set(x.site.branches) <= set(at.site.branches) for x in made):
                return False
        computed = self.moved_from([side])
        sums = (self.producers.get(v) for v in computed)
        if any(x is not None and (x.op in LINEAR or x.op in OF_FIRST) for x in sums):
            return True
        # What the variable was before a select, and what it is after it was written.
        written = [x for x in self.touching.get(handle or -1, ()) if x.op in WRITES and x is not at]
        return any(self._reads(v, handle) for v in computed) and any(
            set(x.site.branches) <= set(at.site.branches) for x in written
        )

    def _counts(self, decision: Value) -> bool:
        """Whether integers alone decide, of which one is kept or given."""
        closure = self.closure([decision])
        kinds = [self.arrays[v] for v in closure]
        held = any(x.op in ("ReadVariableOp", "Placeholder") for v in closure if (x := self.producers.get(v)))
        return held and not any(array.is_float for array in kinds)
