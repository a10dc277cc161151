"""Sums, copies and collectives of the values of a graph, and values that devices compute alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gradcombine.audit.subject import REDUCING, walk
from gradcombine.audit.tensorflow.constants import constant
from gradcombine.audit.tensorflow.inlined import (
    COLLECTIVES,
    SUMS_OF_DEVICES,
    WRITES,
    Inlined,
    Operation,
    Turning,
    Value,
)

MOVES = {
    **dict.fromkeys(("Identity", "IdentityN", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"), 0),
    **dict.fromkeys(("Reshape", "Transpose", "Squeeze", "ExpandDims", "Slice", "StridedSlice", "SplitV"), 0),
    **dict.fromkeys(("Unpack", "Snapshot", "BroadcastTo", "Tile", "Pad", "PadV2"), 0),
    "Split": 1,
}
"""Operations that only move values, and which of their inputs they move."""

JOINS = {"Pack": 0, "ConcatV2": 1, "ParallelConcat": 0}
"""Operations that move all of their inputs but so many at the end."""

SUMS = {"Add", "AddV2", "AddN", "AccumulateNV2", "Sub"}
LINEAR = {*SUMS, "Neg", "Mul", "MulNoNan"}
OF_FIRST = {"RealDiv", "Div", "DivNoNan", "Sum", "Mean", "Cast"}
"""Linear operations of their first input."""

SELECTS = {"Select", "SelectV2"}
OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations that do not look at values."""

DEEPEST = 400
"""Values that are compared, to know that devices compute the same."""


@dataclass
class Sums:
    """Where values are added up, of which nothing else is made.

    Attributes:
      carried: which of what a loop carries.
      variables: handles of those that they are written or added to.
      values: all that were seen on the way.
      added: whether there was an addition.
    """

    carried: set[int] = field(default_factory=set)
    variables: set[Value] = field(default_factory=set)
    values: set[Value] = field(default_factory=set)
    added: bool = False


class Values(Inlined):
    """A graph, and what becomes of its values."""

    def places(self, v: Value) -> set[str]:
        """The devices on which a value is made; what is read of a variable lies with the variable."""
        found = set[str]()
        for x in (self.producers[o] for o in self.origins(v) if o in self.producers):
            known = x.device or ("" if x.site.function else self._devices.get(x.node.name, ""))
            found |= {known} if known or x.op != "ReadVariableOp" else self.places(x.inputs[0])
        return found

    def variable(self, x: Operation) -> Value | None:
        """The handle that an operation takes first; None if it may be one of several."""
        found = self.origins(x.inputs[0])
        return found.pop() if len(found) == 1 else None

    def roots(self) -> list[str]:
        """Functions that nothing calls, but that exchange or write."""
        nodes = [node for function in self._library.values() for node in function.node_def]
        called = {f for node in nodes for names in self._functions(node).values() for f in names}
        called |= {x.site.function for x in self.operations} | {node.op for node in nodes}
        return [name for name in self._library if name not in called and self._is_of_interest(name)]

    def named(self, x: Operation) -> dict[str, Value]:
        """An operation's inputs by their names."""
        return dict(zip((argument.name for argument in self._definition(x.op).input_arg), x.inputs, strict=False))

    def group(self, x: Operation) -> list[tuple[int, ...]]:
        """The devices that exchange; empty where nothing tells how many there are."""
        if x.op in SUMS_OF_DEVICES:
            return [tuple(range(len(x.inputs)))]
        named = self.named(x)
        for name in ("group_size", "num_devices"):
            told = x.node.attr[name].i if name in x.node.attr else None
            size = constant(self, named[name], {}) if name in named else told
            if size is not None:
                return [tuple(range(int(size)))]
        table = constant(self, named["group_assignment"], {}) if "group_assignment" in named else None
        return [tuple(map(int, row)) for row in table] if table is not None and table.ndim == 2 and table.size else []

    def key(self, x: Operation) -> str:
        """Of what takes part together: equal for collectives over the same devices."""
        named = self.named(x)
        kind = "" if x.op in SUMS_OF_DEVICES else x.op[:4]
        told = [str(constant(self, named[name], {})) for name in ("group_key",) if name in named]
        told += [str(sorted(self.origins(named[name]))) for name in ("communicator",) if name in named]
        return f"{kind} {self.group(x)} {told}"

    def given(self, x: Operation) -> list[Value]:
        """The inputs of a collective on each device."""
        if x.op.startswith("HorovodGrouped"):
            return x.inputs
        return [] if "Recv" in x.op else x.inputs[:1]

    def sums(self, start: Iterable[Value], turning: Turning | None) -> Sums | None:
        """The sums that these values enter in an iteration or a call; None if anything else is computed from them."""
        found, waiting, products = Sums(), list(start), list[Operation]()
        while waiting:
            v = waiting.pop()
            if v in found.values:
                continue
            found.values.add(v)
            if v in self.escaping:
                return None
            if turning is not None and v in turning.results:
                found.carried |= {i for i, result in enumerate(turning.results) if result == v}
            left = turning.operation.outputs if turning is not None and v in turning.results else ()
            waiting += (after for after in self.targets.get(v, ()) if after not in left)
            for x in self.uses.get(v, ()):
                if x.op in OF_SHAPES:
                    continue
                if x.op in WRITES and v not in x.inputs[:1]:
                    handle = self.variable(x)
                    if handle is None:
                        return None
                    found.variables.add(handle)
                    found.added |= x.op != "AssignVariableOp"
                elif (outputs := self.linear_in(x, v)) is not None:
                    found.added |= x.op in SUMS
                    products += [x] * (x.op in ("Mul", "MulNoNan"))
                    waiting += outputs
                else:
                    return None
        if any(all(v in found.values for v in x.inputs) for x in products):
            return None
        return found

    def parts(self, x: Operation) -> list[Value]:
        """The arrays that a strategy has joined into a collective, end to end."""
        v = x.outputs[0]
        while len(users := self.uses.get(v, ())) == 1 and not self.targets.get(v):
            (user,) = users
            if user.op in ("Split", "SplitV"):
                return user.outputs
            if user.op not in MOVES or len(user.outputs) != 1:
                break
            (v,) = user.outputs
        return x.outputs

    def sums_of(self, v: Value) -> list[Operation]:
        """The additions that a value goes through, as long as it is used for nothing else."""
        found, seen = list[Operation](), set[Value]()
        while v not in seen and v not in self.escaping:
            seen.add(v)
            users, after = [x for x in self.uses.get(v, ()) if not self._is_dead(x)], self.targets.get(v, ())
            if len(users) + len(after) != 1:
                break
            outputs = self.linear_in(users[0], v) if users else after
            if outputs is None or len(outputs) != 1 or (users and users[0].op in ("Mul", "MulNoNan")):
                break
            found += [x for x in users if x.op in SUMS]
            (v,) = outputs
        return found

    def _is_dead(self, x: Operation) -> bool:
        return x.op in MOVES and not any(v in self.uses or v in self.targets or v in self.escaping for v in x.outputs)

    def linear_in(self, x: Operation, v: Value) -> list[Value] | None:
        """The outputs of an operation that are linear in an input; None if it is not linear in it."""
        at = [i for i, given in enumerate(x.inputs) if given == v]
        if x.op == "IdentityN":
            return [x.outputs[i] for i in at]
        if x.op in MOVES or x.op in OF_FIRST:
            return x.outputs if at == [MOVES.get(x.op, 0)] else None
        if x.op in JOINS:
            return x.outputs if max(at) < len(x.inputs) - JOINS[x.op] else None
        if x.op in SELECTS:
            return x.outputs if 0 not in at else None
        if x.op in LINEAR:
            return x.outputs
        if COLLECTIVES.get(x.op) in REDUCING:
            merged = x.node.attr["merge_op"].s if "merge_op" in x.node.attr else b"Add"
            return x.outputs if v in self.given(x) and merged in (b"Add", b"") else None
        return None

    def moved_from(self, start: Iterable[Value], linear: bool = False) -> set[Value]:
        """Where values were before they were moved; with ``linear``, before sums, products and collectives too."""

        def before(v: Value) -> Iterator[Value]:
            yield from self.sources.get(v, ())
            x = self.producers.get(v)
            if x is None:
                return
            if x.op == "IdentityN":
                yield x.inputs[x.outputs.index(v)]
            elif x.op in MOVES:
                yield x.inputs[MOVES[x.op]]
            elif x.op in JOINS:
                yield from x.inputs[: len(x.inputs) - JOINS[x.op]]
            elif linear and (x.op in LINEAR or x.op in OF_FIRST):
                yield from x.inputs if x.op in LINEAR else x.inputs[:1]
            elif linear and COLLECTIVES.get(x.op) in REDUCING:
                yield from self.given(x)

        return walk(start, before)

    def closure(self, start: Iterable[Value]) -> set[Value]:
        """All that values depend on, without what variables held."""

        def before(v: Value) -> Iterator[Value]:
            yield from self.sources.get(v, ())
            yield from self.producers[v].inputs if v in self.producers else ()
            yield from self.chosen[v][:1] if v in self.chosen else ()

        return walk(start, before)

    def equal_on_all(self, x: Operation, exchanged: set[Value]) -> bool:
        """Whether all devices give a collective the same: what is made of exchanged values and constants alone.

        Each device of a graph may have constants of its own, so that what they compute is compared.
        """
        recipes = {tuple(self._recipe(v, exchanged, {}) for v in self.given(y)) for y in self._beside(x)}
        return len(recipes) == 1 and all(recipe is not None for given in recipes for recipe in given)

    def made_equal(self, x: Operation) -> set[Value]:
        """The values that collectives over the same devices have made equal on all of them."""
        key, beside = self.key(x), self._beside(x)
        others = (y for y in self.operations if COLLECTIVES.get(y.op) in ("all-reduce", "all-gather"))
        return {v for y in others if y not in beside and self.key(y) == key for v in y.outputs}

    def _beside(self, x: Operation) -> list[Operation]:
        """The operations that run one collective together, one of each device."""
        by_device = dict[str, list[Operation]]()
        for y in self.operations:
            if y.op == x.op and y.op in COLLECTIVES:
                by_device.setdefault(y.device, []).append(y)
        place = by_device[x.device].index(x) if x.op in COLLECTIVES else 0
        return [found[place] for found in by_device.values() if len(found) > place] or [x]

    def _recipe(self, v: Value, known: set[Value], seen: dict[Value, int | None]) -> int | None:
        """A hash of how a value is computed; None for what may differ between devices, or is too deep."""
        if v in seen:
            return seen[v]
        if len(seen) > DEEPEST:
            return None
        seen[v] = -1  # a value that comes back around a loop
        x, parts = self.producers.get(v), tuple[object, ...]()
        if v in known:
            parts = ("exchanged",)
        elif x is not None and x.op in ("Identity", "IdentityN"):
            seen[v] = self._recipe(x.inputs[x.outputs.index(v)], known, seen)
            return seen[v]
        elif v in self.sources:
            decision = [self.chosen[v][0]] if v in self.chosen else []
            given = [self._recipe(y, known, seen) for y in (*decision, *self.sources[v])]
            parts = (None,) if None in given else ("either", *given)
        elif x is not None and x.op == "Const":
            parts = (x.node.attr["value"].tensor.SerializeToString(),)
        elif x is None or not x.inputs or self._definition(x.op).is_stateful or self._is_masked(x):
            parts = (None,)
        else:
            given = [self._recipe(y, known, seen) for y in x.inputs]
            parts = (None,) if None in given else (x.op, x.outputs.index(v), *given)
        seen[v] = None if None in parts else hash(parts)
        return seen[v]

    def _is_masked(self, x: Operation) -> bool:
        """Whether a constant chooses, which is the number of the replica where it is one of several."""
        return x.op in SELECTS and constant(self, x.inputs[0], {}) is not None

    @cached_property
    def touching(self) -> dict[Value, list[Operation]]:
        """The operations that take a variable's handle."""
        found = dict[Value, list[Operation]]()
        for v, users in self.uses.items():
            if self.arrays[v].kind == "":
                for handle in self.origins(v):
                    found.setdefault(handle, []).extend(users)
        return found
