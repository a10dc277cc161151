# pyright: standard
"""Reads a graph of TensorFlow that is not compiled, with the functions that it calls, without running it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gradcombine.audit.subject import Frame, Loop, Shape, own_line, walk
from gradcombine.errors import invalid

Value = int
"""The number of one output of one operation, where each call of a function counts anew."""

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
"""Kinds of collectives, as HLO names them, by TensorFlow's operations."""

SUMS_OF_DEVICES = {"AddN", "NcclReduce"}
"""Operations that may take one input of each device."""

WHILE = {"While", "StatelessWhile", "_While", "XlaWhile", "RiscWhile"}
BRANCHES = {"If", "StatelessIf", "_If", "XlaIf", "Case", "StatelessCase"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
OVER_DATA = {"ReduceDataset", "ScanDataset"}
"""Loops over a data set: their function takes what is carried, an element, and what it captures."""

WRITES = {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
FLOW_V1 = {"Enter", "RefEnter", "Merge", "RefMerge", "NextIteration", "RefNextIteration"}
PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
BEFORE_LAYOUTS = {"Relayout", "RelayoutLike", "CopyToMesh"}

MOST = 2_000_000
"""Operations, where each call of a function counts anew."""

KINDS = [
    *("", "f32", "f64", "s32", "u8", "s16", "s8", "", "c64", "s64", "pred", "", "", "", "bf16", "", "", "u16", "c128"),
    *("f16", "", "", "u32", "u64", "f8e5m2", "f8e4m3fn", "", "", "", "s4", "u4"),
]
"""Element types as HLO names them, by their numbers in TensorFlow; empty for handles, strings and other ones."""


@dataclass(eq=False)
class Turning(Loop["Operation"]):
    """A loop of a graph.

    Attributes:
      given: what it carries before the first turn.
      carried: the same at the beginning of a turn.
      results: the same at its end.
      asked: the same, as its condition takes it.
      proceed: the condition's result; None where data decide.
    """

    given: list[Value] = field(default_factory=list)
    carried: list[Value] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)
    asked: list[Value] = field(default_factory=list)
    proceed: Value | None = None


@dataclass(frozen=True, eq=False)
class Site:
    """A function where it is called.

    Attributes:
      function: its name; empty for the graph itself.
      turns: the loops around it, the outermost first.
      branches: those around it: the number of the conditional, and that of the branch.
      device: where it is called.
      callers: the functions around it.
    """

    function: str = ""
    turns: tuple[Turning, ...] = ()
    branches: tuple[tuple[int, int], ...] = ()
    device: str = ""
    callers: tuple[str, ...] = ()


@dataclass(eq=False)
class Operation:
    """One operation, where it stands; inputs are without those that only give an order."""

    node: Any
    site: Site
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    @property
    def op(self) -> str:
        return self.node.op

    @property
    def name(self) -> str:
        return f"{self.site.function}/{self.node.name}" if self.site.function else self.node.name

    @property
    def op_name(self) -> str:
        return self.name

    @property
    def collective(self) -> str:
        """The kind of collective that it is if it is one: sums of several devices' arrays are all-reduces."""
        return COLLECTIVES.get(self.op, "all-reduce" if self.op in SUMS_OF_DEVICES else "")

    @property
    def device(self) -> str:
        return self.node.device or self.site.device

    @property
    def loops(self) -> tuple[Turning, ...]:
        """The loops of more than one turn around it, the outermost first."""
        return tuple(turning for turning in self.site.turns if turning.trips != 1)


class Inlined:
    """A graph, with its functions in the place of their calls.

    Args:
      name: of the graph.
      proto: a ``GraphDef`` with the shapes of what operations give (``as_graph_def(add_shapes=True)``).
      results: the values that it returns, as "operation:number". None: those that nothing takes.
      frames: of a function ("" for the graph) and the name of an operation, the lines of source, the innermost first.
      devices: of variables that the graph captures, by the names of their placeholders.

    Raises:
      GradCombineError: control flow of version 1, a function that is missing, or more operations than can be read.
    """

    def __init__(
        self,
        name: str,
        proto: Any,
        results: Iterable[str] | None = None,
        frames: Callable[[str, str], Sequence[Frame]] = lambda function, operation: (),
        devices: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name, self._frames, self._devices = name, frames, devices
        self._library = {x.signature.name: x for x in proto.library.function}
        self._definitions = dict[str, Any]()
        self._acts = dict[str, bool]()
        self.operations = list[Operation]()
        self.arrays = list[Shape]()
        self.producers = dict[Value, Operation]()
        self.sources = dict[Value, list[Value]]()
        """Where values come from that nothing computes: arguments and results of functions, loops and branches."""
        self.targets = dict[Value, list[Value]]()
        """Values that come from each source, the inverse of `sources`."""
        self.uses = dict[Value, list[Operation]]()
        self.chosen = dict[Value, tuple[Value, list[Value]]]()
        """Of results of a conditional: what decides, and what each branch gives."""
        self.escaping = set[Value]()
        """Values that are needed where the graph does not tell."""
        self.turnings = list[Turning]()
        self.conditionals = list[Operation]()
        self.notes = dict[str, None]()
        find = self._inline(proto.node, Site(), {})
        if results is None:
            values = (x for op in self.operations if op.site.function == "" for x in op.outputs)
            self.escaping.update(x for x in values if x not in self.uses and x not in self.targets)
        else:
            self.escaping.update(map(find, results))

    def source(self, x: Operation) -> str:
        """The user's line of source of an operation of the graph."""
        return own_line(self._frames(x.site.function, x.node.name))

    def origins(self, value: Value, known: Container[Value] = ()) -> set[Value]:
        """Where a value is made: behind functions, loops, branches and copies; no further than what is known."""

        def before(v: Value) -> Iterable[Value]:
            x = self.producers.get(v)
            if v in known:
                return ()
            if v in self.sources:
                return self.sources[v]
            return [x.inputs[x.outputs.index(v)]] if x is not None and x.op in ("Identity", "IdentityN") else ()

        return {v for v in walk([value], before) if not before(v)}

    def _inline(self, nodes: Iterable[Any], site: Site, arguments: dict[str, list[Value]]) -> Callable[[str], Value]:
        """Adds a function's operations; returns what finds a value by its name in it."""
        named = dict[str, tuple[Operation, dict[str, int]]]()
        for node in nodes:
            if node.op in FLOW_V1:
                raise invalid("a graph whose loops and branches are functions (While, If)", node.op)
            x, starts = Operation(node, site), dict[str, int]()
            told = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
            for argument in self._definition(node.op).output_arg:
                starts[argument.name] = len(x.outputs)
                for kind in self._types(argument, node):
                    shape = told[len(x.outputs)] if len(x.outputs) < len(told) else None
                    dims = None if shape is None or shape.unknown_rank else tuple(d.size for d in shape.dim)
                    exact = dims is not None and -1 not in dims
                    x.outputs.append(self._value(Shape(kind, tuple(map(abs, dims or ())), exact=exact)))
            self.producers.update(dict.fromkeys(x.outputs, x))
            self.operations.append(x)
            named[node.name] = x, starts
        if len(self.operations) > MOST:
            raise invalid(f"a graph of at most {MOST:,} operations, functions included", "more")

        def find(name: str) -> Value:
            operation, *rest = name.split(":")
            if operation in arguments:
                return arguments[operation][int(rest[-1]) if rest else 0]
            if operation not in named:
                raise invalid("a graph that is whole", f"{operation} is missing in {site.function}")
            x, starts = named[operation]
            return x.outputs[(starts[rest[0]] if len(rest) == 2 else 0) + (int(rest[-1]) if rest else 0)]

        for x, _ in named.values():
            x.inputs = [find(name) for name in x.node.input if not name.startswith("^")]
        for x, _ in named.values():
            if not self._enter(x):
                for v in dict.fromkeys(x.inputs):
                    self.uses.setdefault(v, []).append(x)
        return find

    def _enter(self, x: Operation) -> bool:
        """Puts the functions that an operation calls in its place; False if the operation stands for itself."""
        functions = self._functions(x.node)
        if x.op in WHILE:
            turning = self._turning(x, x.inputs, len(x.inputs))
            turning.asked = [self._like(v) for v in x.inputs]
            turning.results = self._call(x, functions["body"][0], turning.carried, turning)
            (turning.proceed, *_) = self._call(x, functions["cond"][0], turning.asked, turning)
            for i, result in enumerate(turning.results):
                for after in (turning.carried[i], turning.asked[i], x.outputs[i]):
                    self._link(after, turning.given[i], result)
        elif x.op in BRANCHES:
            branches = [name for names in functions.values() for name in names]
            if "then_branch" in functions:
                branches = [*functions["else_branch"], *functions["then_branch"]]
            number = len(self.conditionals)
            self.conditionals.append(x)
            results = [
                self._call(x, name, self._passed(x.inputs[1:]), branch=(number, i)) for i, name in enumerate(branches)
            ]
            for output, *given in zip(x.outputs, *results, strict=True):
                self._link(output, *given)
                self.chosen[output] = x.inputs[0], given
            self.uses.setdefault(x.inputs[0], []).append(x)
        elif x.op in CALLS or x.op in self._library:
            name = functions["f"][0] if x.op in CALLS else x.op
            for output, result in zip(x.outputs, self._call(x, name, self._passed(x.inputs)), strict=True):
                self._link(output, result)
        elif x.op in OVER_DATA:
            self._over_data(x, functions["f"][0])
        else:
            for name in (name for names in functions.values() for name in names if self._is_of_interest(name)):
                turning = self._turning(x, (), 0)
                arguments = self._library[name].signature.input_arg
                given = [self._argument(a) for a in arguments]
                self.escaping.update(self._call(x, name, given, turning))
            if x.op in PYTHON:
                self.notes[f"what Python does in {x.op}"] = None
            if x.op in BEFORE_LAYOUTS:
                self.notes["what DTensor makes of layouts when it runs"] = None
            return False
        return True

    def _over_data(self, x: Operation, name: str) -> None:
        arguments = self._library[name].signature.input_arg
        carried, captured = (len(x.node.attr[key].list.type) for key in ("Tstate", "Targuments"))
        turning = self._turning(x, x.inputs[1:], carried)
        rest = [self._argument(a) for a in arguments[carried : len(arguments) - captured]]
        last = self._passed(x.inputs[1 + carried : 1 + carried + captured])
        results = self._call(x, name, [*turning.carried, *rest, *last], turning)
        turning.results = results[:carried]
        for i, result in enumerate(turning.results):
            self._link(turning.carried[i], turning.given[i], result)
            if x.op == "ReduceDataset":
                self._link(x.outputs[i], turning.given[i], result)
        self.escaping.update(results[carried:])

    def _call(
        self,
        x: Operation,
        name: str,
        given: list[Value],
        turning: Turning | None = None,
        branch: tuple[int, int] | None = None,
    ) -> list[Value]:
        around, function = x.site, self._library.get(name)
        if function is None:
            raise invalid(f"a graph with the function {name}", "none of this name")
        if name in around.callers:
            raise invalid("a graph of functions that do not call themselves", name)
        if "_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b:
            self.notes[f"what XLA makes of {name}: audit that tf.function by itself"] = None
        turns = (*around.turns, turning) if turning else around.turns
        branches = (*around.branches, branch) if branch else around.branches
        site = Site(name, turns, branches, x.device, (*around.callers, name))
        arguments = {x.name: [v] for x, v in zip(function.signature.input_arg, given, strict=True)}
        find = self._inline(function.node_def, site, arguments)
        return [find(function.ret[result.name]) for result in function.signature.output_arg]

    def _turning(self, x: Operation, given: Sequence[Value], count: int) -> Turning:
        turning = Turning(x, None, list(given[:count]))
        turning.carried = [self._like(v) for v in turning.given]
        self.turnings.append(turning)
        return turning

    def _passed(self, given: Iterable[Value]) -> list[Value]:
        """Arguments of a function, for each of its calls."""
        passed = list[Value]()
        for v in given:
            passed.append(self._like(v))
            self._link(passed[-1], v)
        return passed

    def _link(self, after: Value, *before: Value) -> None:
        self.sources.setdefault(after, []).extend(before)
        self.producers.pop(after, None)
        for v in before:
            self.targets.setdefault(v, []).append(after)
        if not self.arrays[after].exact and not self.arrays[after].dims:
            self.arrays[after] = self.arrays[before[0]]

    def _value(self, shape: Shape) -> Value:
        self.arrays.append(shape)
        return len(self.arrays) - 1

    def _argument(self, definition: Any) -> Value:
        return self._value(Shape(_kind(definition.type), (), exact=False))

    def _like(self, v: Value) -> Value:
        return self._value(self.arrays[v])

    def _functions(self, node: Any) -> dict[str, list[str]]:
        """The functions that attributes name, in the order of the operation's definition."""
        found = dict[str, list[str]]()
        for attribute in self._definition(node.op).attr if node.op not in self._library else ():
            if attribute.type == "func":
                found[attribute.name] = [node.attr[attribute.name].func.name]
            elif attribute.type == "list(func)":
                found[attribute.name] = [f.name for f in node.attr[attribute.name].list.func]
        return found

    def _is_of_interest(self, name: str) -> bool:
        """Whether a function, or one that it calls, exchanges or writes anything."""
        if name not in self._acts:
            self._acts[name] = False
            nodes = self._library[name].node_def if name in self._library else ()
            called = (f for node in nodes for names in self._functions(node).values() for f in names)
            self._acts[name] = any(n.op in COLLECTIVES or n.op in WRITES for n in nodes) or any(
                map(self._is_of_interest, called)
            )
        return self._acts[name]

    def _definition(self, op: str) -> Any:
        if op in self._library:
            return self._library[op].signature
        if op not in self._definitions:
            from tensorflow.python.framework import op_def_registry  # pyright: ignore[reportMissingImports]

            found = op_def_registry.get(op)
            if found is None:
                raise invalid("operations that the installed TensorFlow knows", op)
            self._definitions[op] = found
        return self._definitions[op]

    def _types(self, argument: Any, node: Any) -> list[str]:
        def told(name: str) -> Any:
            if name in node.attr:
                return node.attr[name]
            return next(x.default_value for x in self._definition(node.op).attr if x.name == name)

        if argument.type_list_attr:
            return [_kind(kind) for kind in told(argument.type_list_attr).list.type]
        kind = argument.type or (told(argument.type_attr).type if argument.type_attr else 0)
        return [_kind(kind)] * (told(argument.number_attr).i if argument.number_attr else 1)


def _kind(number: int) -> str:
    return KINDS[number] if number < len(KINDS) else ""
