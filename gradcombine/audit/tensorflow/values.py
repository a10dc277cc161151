"""Data flow of a graph's values: sums, copies, collectives, and values that are equal on all devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from gradcombine.audit.subject import REDUCING, walk
from gradcombine.audit.tensorflow.constants import constant
from gradcombine.audit.tensorflow.inlined import (
    CHOSEN,
    COLLECTIVES,
    EITHER,
    SUMS_OF_DEVICES,
    WRITES,
    GraphLoop,
    Inlined,
    Operation,
    Value,
    makers,
    origins,
)

FIRST, ALL = slice(1), slice(None)

MOVED: dict[str, slice] = {
    **dict.fromkeys(("Identity", "StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"), FIRST),
    **dict.fromkeys(("Reshape", "Transpose", "Squeeze", "ExpandDims", "Slice", "StridedSlice", "SplitV"), FIRST),
    **dict.fromkeys(("Unpack", "Snapshot", "BroadcastTo", "Tile", "Pad", "PadV2"), FIRST),
    **dict.fromkeys(("IdentityN", "Pack", "ParallelConcat", EITHER), ALL),
    "Split": slice(1, 2),
    "ConcatV2": slice(-1),
    CHOSEN: slice(1, None),
}
"""The inputs that operations only move."""

SUMS = {"Add", "AddV2", "AddN", "AccumulateNV2", "Sub"}
SCALED = {"Mul", "MulNoNan"}
LINEAR: dict[str, slice] = {
    **dict.fromkeys((*SUMS, *SCALED, "Neg"), ALL),
    **dict.fromkeys(("RealDiv", "Div", "DivNoNan", "Sum", "Mean", "Cast"), FIRST),
}
"""The inputs in which operations are linear; in those of `SCALED`, each with the others fixed."""

SUMMED = MOVED | LINEAR

SELECTS = {"Select", "SelectV2"}
OF_SHAPES = {"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"}
"""Operations that depend only on the shape of their input."""

MAX_DEPTH = 400
"""Most values of a computation that is compared between devices."""


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


class Values(Inlined):
    """A graph with the data flow of its values."""

    def places(self, v: Value) -> set[str]:
        """The devices on which a value is computed; for a value read from a variable, the variable's devices."""
        devices = set[str]()
        for x in makers(origins(v)):
            device = x.device or ("" if x.site.function else self._devices.get(x.node.name, ""))
            devices |= {device} if device or x.op != "ReadVariableOp" else self.places(x.inputs[0])
        return devices

    def variable(self, x: Operation) -> Value | None:
        """The variable handle in an operation's first input; None if it may be one of several."""
        handles = origins(x.inputs[0])
        return handles.pop() if len(handles) == 1 else None

    def roots(self) -> list[str]:
        """Functions without a caller that contain collectives or write to variables."""
        nodes = [node for function in self._library.values() for node in function.node_def]
        called = {f for node in nodes for names in self._functions(node).values() for f in names}
        called |= {x.site.function for x in self.operations} | {node.op for node in nodes}
        return [name for name in self._library if name not in called and self._has_effects(name)]

    def named(self, x: Operation) -> dict[str, Value]:
        """An operation's inputs by name."""
        return dict(zip((argument.name for argument in self._definition(x.op).input_arg), x.inputs, strict=False))

    def group(self, x: Operation) -> list[tuple[int, ...]]:
        """The groups of devices of a collective; empty if their number is unknown."""
        if x.op in SUMS_OF_DEVICES:
            return [tuple(range(len(x.inputs)))]
        named = self.named(x)
        for name in ("group_size", "num_devices"):
            default = x.node.attr[name].i if name in x.node.attr else None
            size = constant(named[name]) if name in named else default
            if size is not None:
                return [tuple(range(int(size)))]
        table = constant(named["group_assignment"]) if "group_assignment" in named else None
        return [tuple(map(int, row)) for row in table] if table is not None and table.ndim == 2 and table.size else []

    def key(self, x: Operation) -> str:
        """A key that is equal for collectives over the same devices."""
        named = self.named(x)
        library = "" if x.op in SUMS_OF_DEVICES else x.op[:4]
        keys = [str(constant(named[name])) for name in ("group_key",) if name in named]
        keys += [str(sorted(v.number for v in origins(named[name]))) for name in ("communicator",) if name in named]
        return f"{library} {self.group(x)} {keys}"

    def collective_inputs(self, x: Operation) -> list[Value]:
        """The inputs that a collective sends."""
        if x.op.startswith("HorovodGrouped"):
            return x.inputs
        return [] if "Recv" in x.op else x.inputs[:1]

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
                    handle = self.variable(x)
                    if handle is None:
                        return None
                    sums.variables.add(handle)
                    sums.added |= x.op != "AssignVariableOp"
                elif (outputs := self.linear_in(x, v)) is not None:
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
            outputs = self.linear_in(users[0], v) if len(users) == 1 else None
            if outputs is None or len(outputs) != 1 or users[0].op in SCALED:
                break
            additions += [x for x in users if x.op in SUMS]
            (v,) = outputs
        return additions

    def _is_dead(self, x: Operation) -> bool:
        return x.op in MOVED and not any(v.users or v in self.escaping for v in x.outputs)

    def linear_in(self, x: Operation, v: Value) -> list[Value] | None:
        """The outputs of an operation that are linear in the input ``v``; None if there are others."""
        if x.op == "IdentityN":
            return [output for output, value in zip(x.outputs, x.inputs, strict=True) if value == v]
        linear = x.inputs[1:] if x.op in SELECTS else self._inputs_of(x, linear=True)
        return x.outputs if x.inputs.count(v) == linear.count(v) else None

    def _inputs_of(self, x: Operation, linear: bool) -> list[Value]:
        """The inputs that an operation only moves; with ``linear``, those that it sums or scales, too."""
        if linear and COLLECTIVES.get(x.op) in REDUCING:
            merge = x.node.attr["merge_op"].s if "merge_op" in x.node.attr else b"Add"
            return self.collective_inputs(x) if merge in (b"Add", b"") else []
        table = SUMMED if linear else MOVED
        return x.inputs[table[x.op]] if x.op in table else []

    def moved_from(self, start: Iterable[Value], linear: bool = False) -> set[Value]:
        """Follows values back through operations that move them; with ``linear``, through sums and collectives too."""

        def before(v: Value) -> list[Value]:
            return [y for x in makers([v]) for y in x.passed(v) or self._inputs_of(x, linear)]

        return walk(start, before)

    def equal_on_all(self, x: Operation, exchanged: set[Value]) -> bool:
        """Whether the operands of a collective are identical on all devices: they depend on ``exchanged`` values only.

        Constants may differ between the devices of a graph, so the computations of all devices are compared.
        """
        hashes = {tuple(self._hash(v, exchanged, {}) for v in self.collective_inputs(y)) for y in self._peers(x)}
        return len(hashes) == 1 and all(number is not None for inputs in hashes for number in inputs)

    def made_equal(self, x: Operation) -> set[Value]:
        """Results of other collectives over the same devices that are equal on all of them."""
        key, peers = self.key(x), self._peers(x)
        others = (y for y in self.operations if COLLECTIVES.get(y.op) in ("all-reduce", "all-gather"))
        return {v for y in others if y not in peers and self.key(y) == key for v in y.outputs}

    def _peers(self, x: Operation) -> list[Operation]:
        """The operations that execute a collective together, one per device."""
        by_device = dict[str, list[Operation]]()
        for y in self.operations:
            if y.op == x.op and y.op in COLLECTIVES:
                by_device.setdefault(y.device, []).append(y)
        index = by_device[x.device].index(x) if x.op in COLLECTIVES else 0
        return [operations[index] for operations in by_device.values() if len(operations) > index] or [x]

    def _hash(self, v: Value, known: set[Value], seen: dict[Value, int | None]) -> int | None:
        """Hashes the computation of a value; None if the value may differ between devices, or is too deep."""
        if v in seen:
            return seen[v]
        if len(seen) > MAX_DEPTH:
            return None
        seen[v] = -1  # ends the recursion around a loop
        x, parts = v.maker, tuple[object, ...]()
        if v in known:
            parts = ("exchanged",)
        elif x is not None and len(passed := x.passed(v)) == 1:
            seen[v] = self._hash(passed[0], known, seen)
            return seen[v]
        elif x is not None and x.op == "Const":
            parts = (x.node.attr["value"].tensor.SerializeToString(),)
        elif x is None or not x.inputs or self._may_differ(x):
            parts = (None,)
        else:
            hashes = [self._hash(y, known, seen) for y in x.inputs]
            parts = (None,) if None in hashes else (x.op, x.outputs.index(v), *hashes)
        seen[v] = None if None in parts else hash(parts)
        return seen[v]

    def _may_differ(self, x: Operation) -> bool:
        """Whether an operation may give different results for equal inputs: it is stateful, or a constant selects.

        The constant may depend on the replica id, which is a constant in each replica's graph.
        """
        if x.op in SELECTS and constant(x.inputs[0]) is not None:
            return True
        return x.op not in (EITHER, CHOSEN) and self._definition(x.op).is_stateful

    @cached_property
    def touching(self) -> dict[Value, list[Operation]]:
        """The operations that use a variable, by its handle."""
        touching = dict[Value, list[Operation]]()
        for v in self.values:
            if v.shape.kind == "" and v.users:
                for handle in origins(v):
                    touching.setdefault(handle, []).extend(x for x in v.users if x.op not in (EITHER, CHOSEN))
        return touching
