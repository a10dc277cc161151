# pyright: standard
"""Values and operations of a TensorFlow graph with all functions inlined, and how values flow through operations."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradcombine.audit.subject import ADDING, REDUCING, Loop, Shape, walk

ALL_REDUCES = (
    *("CollectiveReduce", "CollectiveReduceV2", "CollectiveReduceV3", "NcclAllReduce", "NcclReduce"),
    *("CrossReplicaSum", "XlaAllReduce", "DTensorAllReduce", "HorovodAllreduce", "HorovodGroupedAllreduce"),
)
COLLECTIVES = {
    **dict.fromkeys(ALL_REDUCES, "all-reduce"),
    **dict.fromkeys(("CollectiveGather", "CollectiveGatherV2", "DTensorAllGather"), "all-gather"),
    **dict.fromkeys(("HorovodAllgather", "HorovodGroupedAllgather"), "all-gather"),
    **dict.fromkeys(("CollectiveReduceScatterV2", "XlaReduceScatter", "DTensorReduceScatter"), "reduce-scatter"),
    **dict.fromkeys(("HorovodReducescatter", "HorovodGroupedReducescatter"), "reduce-scatter"),
    **dict.fromkeys(("CollectiveAllToAllV2", "CollectiveAllToAllV3", "AllToAll", "DTensorAllToAll"), "all-to-all"),
    "HorovodAlltoall": "all-to-all",
    **dict.fromkeys(("CollectiveBcastSend", "CollectiveBcastSendV2", "NcclBroadcast"), "collective-broadcast"),
    **dict.fromkeys(("CollectiveBcastRecv", "CollectiveBcastRecvV2", "HorovodBroadcast"), "collective-broadcast"),
    "CollectivePermute": "collective-permute",
}
"""Types of collectives, as HLO names them, by TensorFlow operation."""

SUMS_OF_DEVICES = {"AddN", "NcclReduce"}
"""Operations that may have one input from each device."""

EITHER = "Either"
"""An operation that inlining adds: an argument of a function, or a value of a loop, which is one of its inputs."""

CHOSEN = "Chosen"
"""An operation that inlining adds: an output of a conditional, of the predicate and the results of the branches."""

WRITES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
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


@dataclass(eq=False, slots=True)
class Value:
    """An output of an operation, or an argument of a function; each call of a function has its own.

    Attributes:
      number: unique in its graph.
      shape: of the array; its kind is empty for handles, strings and others.
      maker: the operation; None for an argument of an unknown operation's function.
      users: operations that take it.
    """

    number: int
    shape: Shape
    maker: Operation | None = None
    users: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class GraphLoop(Loop["Operation"]):
    """A loop of a graph.

    Attributes:
      initial: carried values before the first iteration.
      carried: carried values at the beginning of an iteration, and as arguments of the condition.
      results: carried values at the end of an iteration.
      condition: result of the condition; None for a loop over a dataset.
    """

    initial: list[Value] = field(default_factory=list)
    carried: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    condition: Value | None = None


@dataclass(frozen=True, eq=False)
class Site:
    """A call of a function.

    Attributes:
      function: its name; empty for the graph itself.
      loops: enclosing loops, outermost first.
      branches: enclosing branches, each as the indices of its conditional and of the branch.
      device: of the call.
      callers: enclosing functions.
    """

    function: str = ""
    loops: tuple[GraphLoop, ...] = ()
    branches: tuple[tuple[int, int], ...] = ()
    device: str = ""
    callers: tuple[str, ...] = ()


@dataclass(eq=False, slots=True)
class Operation:
    """An operation at its call site. Inputs do not include control dependencies."""

    op: str
    site: Site
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    node: Any = None

    def passed(self, output: Value) -> list[Value]:
        """The inputs one of which an output is, unchanged; empty if it is computed."""
        if self.op in ("Identity", "IdentityN"):
            return [self.inputs[self.outputs.index(output)]]
        return self.inputs if self.op == EITHER else self.inputs[1:] if self.op == CHOSEN else []

    @property
    def sent(self) -> list[Value]:
        """The inputs that a collective sends."""
        if self.op.startswith("HorovodGrouped"):
            return self.inputs
        return [] if "Recv" in self.op else self.inputs[:1]

    @property
    def variable(self) -> Value | None:
        """The variable handle in the first input; None if it may be one of several."""
        handles = origins(self.inputs[0])
        return handles.pop() if len(handles) == 1 else None

    @property
    def name(self) -> str:
        return f"{self.site.function}/{self.node.name}" if self.site.function else self.node.name

    op_name = name

    @property
    def collective(self) -> str:
        """The type of collective, or empty. Operations that may sum over devices count as all-reduces here."""
        return COLLECTIVES.get(self.op, "all-reduce" if self.op in SUMS_OF_DEVICES else "")

    @property
    def reduction(self) -> str:
        """How a collective combines values, for instance "max"; empty if its attributes do not show it."""
        named = (self.node.attr[name].s for name in ("merge_op", "reduction") if name in self.node.attr)
        return next(named, b"").decode().lower()

    @property
    def device(self) -> str:
        return self.node.device or self.site.device

    @property
    def loops(self) -> tuple[GraphLoop, ...]:
        """Enclosing loops of more than one iteration, outermost first."""
        return tuple(loop for loop in self.site.loops if loop.trips != 1)


def makers(values: Iterable[Value]) -> Iterator[Operation]:
    """The operations that make values, as far as they are known."""
    return (v.maker for v in values if v.maker is not None)


def origins(value: Value, known: Container[Value] = ()) -> set[Value]:
    """Follows a value back through functions, loops, branches and copies; stops at values in ``known``."""

    def before(v: Value) -> Sequence[Value]:
        return () if v in known or v.maker is None else v.maker.passed(v)

    return {v for v in walk([value], before) if not before(v)}


def closure(start: Iterable[Value], known: Container[Value] = ()) -> set[Value]:
    """All values that ``start`` depends on, except through variables; stops at values in ``known``."""
    return walk(start, lambda v: () if v in known or v.maker is None else v.maker.inputs)


def moved_from(start: Iterable[Value], linear: bool = False) -> set[Value]:
    """Follows values back through operations that move them; with ``linear``, through sums and collectives too."""

    def before(v: Value) -> list[Value]:
        return [y for x in makers([v]) for y in x.passed(v) or _inputs_of(x, linear)]

    return walk(start, before)


def linear_in(x: Operation, v: Value) -> list[Value] | None:
    """The outputs of an operation that are linear in the input ``v``; None if there are others."""
    if x.op == "IdentityN":
        return [output for output, value in zip(x.outputs, x.inputs, strict=True) if value == v]
    linear = x.inputs[1:] if x.op in SELECTS else _inputs_of(x, linear=True)
    return x.outputs if x.inputs.count(v) == linear.count(v) else None


def _inputs_of(x: Operation, linear: bool) -> list[Value]:
    """The inputs that an operation only moves; with ``linear``, those that it sums or scales, too."""
    if linear and COLLECTIVES.get(x.op) in REDUCING:
        return x.sent if x.reduction in ADDING else []
    table = SUMMED if linear else MOVED
    return x.inputs[table[x.op]] if x.op in table else []
