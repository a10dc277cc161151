# pyright: standard
"""Reads a TensorFlow graph and inlines the functions that it calls, without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gradcombine.audit.subject import Frame, Shape, own_line
from gradcombine.audit.tensorflow.constants import constant, trip_count
from gradcombine.audit.tensorflow.values import (
    CHOSEN,
    COLLECTIVES,
    EITHER,
    SELECTS,
    SUMS_OF_DEVICES,
    WRITES,
    GraphLoop,
    Operation,
    Site,
    Value,
    makers,
    origins,
)
from gradcombine.errors import invalid

WHILE = {"While", "StatelessWhile", "_While", "XlaWhile", "RiscWhile"}
BRANCHES = {"If", "StatelessIf", "_If", "XlaIf", "Case", "StatelessCase"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
OVER_DATA = {"ReduceDataset", "ScanDataset"}
"""Loops over a dataset, whose function takes the carried values, an element, and the captured values."""

FLOW_V1 = {"Enter", "RefEnter", "Merge", "RefMerge", "NextIteration", "RefNextIteration"}
PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}
BEFORE_LAYOUTS = {"Relayout", "RelayoutLike", "CopyToMesh"}

MAX_OPERATIONS = 2_000_000
"""Most operations of a graph after inlining."""

KINDS = [
    *("", "f32", "f64", "s32", "u8", "s16", "s8", "", "c64", "s64", "pred", "", "", "", "bf16", "", "", "u16", "c128"),
    *("f16", "", "", "u32", "u64", "f8e5m2", "f8e4m3fn", "", "", "", "s4", "u4"),
]
"""Element types as HLO names them, by TensorFlow's DataType enum; empty for handles, strings and others."""

MAX_DEPTH = 400
"""Most values of a computation that is compared between devices."""


class Inlined:
    """A graph with all function calls inlined.

    Args:
      name: of the graph.
      proto: a ``GraphDef`` with output shapes (``as_graph_def(add_shapes=True)``).
      results: returned values, as "operation:index". None: all values without a user.
      frames: returns the stack frames of an operation, innermost first, for a function ("" for the graph) and the
        operation's name.
      devices: of captured variables, by the names of their placeholders.

    Raises:
      GradCombineError: for control flow of TensorFlow 1, a missing function, or too many operations.
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
        self._effects = dict[str, bool]()
        self.operations = list[Operation]()
        self.values = list[Value]()
        self.escaping = set[Value]()
        """Values that are used in an unknown way, for instance as a result of the graph."""
        self.graph_loops = list[GraphLoop]()
        self.conditionals = list[Operation]()
        self.notes = dict[str, None]()
        find = self._inline(proto.node, Site(), {})
        if results is None:
            values = (x for op in self.operations if op.site.function == "" for x in op.outputs)
            self.escaping.update(x for x in values if not x.users)
        else:
            self.escaping.update(map(find, results))
        for loop in reversed(self.graph_loops):  # innermost first
            loop.trips = trip_count(loop)

    def source(self, x: Operation) -> str:
        """The user's source line of an operation."""
        return own_line(self._frames(x.site.function, x.node.name))

    def _inline(self, nodes: Iterable[Any], site: Site, arguments: dict[str, list[Value]]) -> Callable[[str], Value]:
        """Adds a function's operations; returns a function that looks up its values by name."""
        named = dict[str, tuple[Operation, dict[str, int]]]()
        for node in nodes:
            if node.op in FLOW_V1:
                raise invalid("a graph with functional control flow (While, If)", node.op)
            x, starts = Operation(node.op, site, node=node), dict[str, int]()
            shapes = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
            for argument in self._definition(node.op).output_arg:
                starts[argument.name] = len(x.outputs)
                for kind in self._types(argument, node):
                    shape = shapes[len(x.outputs)] if len(x.outputs) < len(shapes) else None
                    dims = None if shape is None or shape.unknown_rank else tuple(d.size for d in shape.dim)
                    exact = dims is not None and -1 not in dims
                    x.outputs.append(self._value(Shape(kind, tuple(map(abs, dims or ())), exact=exact), x))
            self.operations.append(x)
            named[node.name] = x, starts
        if len(self.operations) > MAX_OPERATIONS:
            raise invalid(f"a graph of at most {MAX_OPERATIONS:,} operations, functions included", "more")

        def find(name: str) -> Value:
            operation, *rest = name.split(":")
            if operation in arguments:
                return arguments[operation][int(rest[-1]) if rest else 0]
            if operation not in named:
                raise invalid("a complete graph", f"{operation} is missing in {site.function}")
            x, starts = named[operation]
            return x.outputs[(starts[rest[0]] if len(rest) == 2 else 0) + (int(rest[-1]) if rest else 0)]

        for x, _ in named.values():
            x.inputs = [find(name) for name in x.node.input if not name.startswith("^")]
        for x, _ in named.values():
            if not self._enter(x):
                self._use(x)
        return find

    def _use(self, x: Operation) -> None:
        for v in dict.fromkeys(x.inputs):
            v.users.append(x)

    def _enter(self, x: Operation) -> bool:
        """Inlines the functions that an operation calls; returns False if the operation itself is kept."""
        functions = self._functions(x.node)
        if x.op in WHILE:
            loop = self._new_loop(x, x.inputs)
            loop.results = self._call(x, functions["body"][0], loop.carried, loop)
            (loop.condition, *_) = self._call(x, functions["cond"][0], loop.carried, loop)
            for i, result in enumerate(loop.results):
                for after in (loop.carried[i], x.outputs[i]):
                    self._pass(x, after, loop.initial[i], result)
        elif x.op in BRANCHES:
            branches = [name for names in functions.values() for name in names]
            if "then_branch" in functions:
                branches = [*functions["else_branch"], *functions["then_branch"]]
            number = len(self.conditionals)
            self.conditionals.append(x)
            results = [
                self._call(x, name, self._passed(x, x.inputs[1:]), branch=(number, i))
                for i, name in enumerate(branches)
            ]
            for output, *given in zip(x.outputs, *results, strict=True):
                self._pass(x, output, x.inputs[0], *given, op=CHOSEN)
            x.inputs[0].users.append(x)  # even without an output
        elif x.op in CALLS or x.op in self._library:
            name = functions["f"][0] if x.op in CALLS else x.op
            for output, result in zip(x.outputs, self._call(x, name, self._passed(x, x.inputs)), strict=True):
                self._pass(x, output, result)
        elif x.op in OVER_DATA:
            self._over_data(x, functions["f"][0])
        else:
            # An unknown operation may call its functions any number of times.
            for name in (name for names in functions.values() for name in names if self._has_effects(name)):
                loop = self._new_loop(x)
                arguments = [self._argument(a) for a in self._library[name].signature.input_arg]
                self.escaping.update(self._call(x, name, arguments, loop))
            if x.op in PYTHON:
                self.notes[f"the Python code in {x.op}"] = None
            if x.op in BEFORE_LAYOUTS:
                self.notes["the collectives that DTensor adds at run time"] = None
            return False
        return True

    def _over_data(self, x: Operation, name: str) -> None:
        arguments = self._library[name].signature.input_arg
        carried, captured = (len(x.node.attr[key].list.type) for key in ("Tstate", "Targuments"))
        loop = self._new_loop(x, x.inputs[1 : 1 + carried])
        element = [self._argument(a) for a in arguments[carried : len(arguments) - captured]]
        captures = self._passed(x, x.inputs[1 + carried : 1 + carried + captured])
        results = self._call(x, name, [*loop.carried, *element, *captures], loop)
        loop.results = results[:carried]
        for i, result in enumerate(loop.results):
            self._pass(x, loop.carried[i], loop.initial[i], result)
            if x.op == "ReduceDataset":
                self._pass(x, x.outputs[i], loop.initial[i], result)
        self.escaping.update(results[carried:])

    def _call(
        self,
        x: Operation,
        name: str,
        given: list[Value],
        loop: GraphLoop | None = None,
        branch: tuple[int, int] | None = None,
    ) -> list[Value]:
        caller, function = x.site, self._library.get(name)
        if function is None:
            raise invalid(f"a graph with the function {name}", "none of this name")
        if name in caller.callers:
            raise invalid("a graph without recursive functions", name)
        if "_XlaMustCompile" in function.attr and function.attr["_XlaMustCompile"].b:
            self.notes[f"the code that XLA compiles for {name}: audit that tf.function separately"] = None
        loops = (*caller.loops, loop) if loop else caller.loops
        branches = (*caller.branches, branch) if branch else caller.branches
        site = Site(name, loops, branches, x.device, (*caller.callers, name))
        arguments = {x.name: [v] for x, v in zip(function.signature.input_arg, given, strict=True)}
        find = self._inline(function.node_def, site, arguments)
        return [find(function.ret[result.name]) for result in function.signature.output_arg]

    def _new_loop(self, x: Operation, initial: Sequence[Value] = ()) -> GraphLoop:
        loop = GraphLoop(x, None, list(initial), [self._value(v.shape) for v in initial])
        self.graph_loops.append(loop)
        return loop

    def _passed(self, x: Operation, given: Iterable[Value]) -> list[Value]:
        """Creates values for the arguments of a call."""
        passed = list[Value]()
        for v in given:
            passed.append(self._value(v.shape))
            self._pass(x, passed[-1], v)
        return passed

    def _pass(self, x: Operation, after: Value, *before: Value, op: str = EITHER) -> None:
        """Adds the operation that passes values of a call, loop or conditional ``x`` on as ``after``."""
        after.maker = Operation(op, x.site, list(before), [after])
        self._use(after.maker)
        if not after.shape.exact and not after.shape.dims:
            after.shape = after.maker.passed(after)[0].shape

    def _value(self, shape: Shape, maker: Operation | None = None) -> Value:
        self.values.append(Value(len(self.values), shape, maker))
        return self.values[-1]

    def _argument(self, definition: Any) -> Value:
        return self._value(Shape(_kind(definition.type), (), exact=False))

    @staticmethod
    def _functions(node: Any) -> dict[str, list[str]]:
        """The names of the functions in an operation's attributes, by attribute."""
        attributes = {name: (value.func, *value.list.func) for name, value in sorted(node.attr.items())}
        named = {name: [f.name for f in functions if f.name] for name, functions in attributes.items()}
        return {name: functions for name, functions in named.items() if functions}

    def _has_effects(self, name: str) -> bool:
        """Whether a function, or one that it calls, contains a collective or writes to a variable."""
        if name not in self._effects:
            self._effects[name] = False  # ends recursion
            nodes = self._library[name].node_def if name in self._library else ()
            called = (f for node in nodes for names in self._functions(node).values() for f in names)
            self._effects[name] = any(n.op in COLLECTIVES or n.op in WRITES for n in nodes) or any(
                map(self._has_effects, called)
            )
        return self._effects[name]

    def _definition(self, op: str) -> Any:
        if op in self._library:
            return self._library[op].signature
        if op not in self._definitions:
            from tensorflow.python.framework import op_def_registry  # pyright: ignore[reportMissingImports]

            definition = op_def_registry.get(op)
            if definition is None:
                raise invalid("operations that the installed TensorFlow knows", op)
            self._definitions[op] = definition
        return self._definitions[op]

    def _types(self, argument: Any, node: Any) -> list[str]:
        def value(name: str) -> Any:
            if name in node.attr:
                return node.attr[name]
            return next(x.default_value for x in self._definition(node.op).attr if x.name == name)

        if argument.type_list_attr:
            return [_kind(kind) for kind in value(argument.type_list_attr).list.type]
        kind = argument.type or (value(argument.type_attr).type if argument.type_attr else 0)
        return [_kind(kind)] * (value(argument.number_attr).i if argument.number_attr else 1)

    def places(self, v: Value) -> set[str]:
        """The devices on which a value is computed; for a value read from a variable, the variable's devices."""
        devices = set[str]()
        for x in makers(origins(v)):
            device = x.device or ("" if x.site.function else self._devices.get(x.node.name, ""))
            devices |= {device} if device or x.op != "ReadVariableOp" else self.places(x.inputs[0])
        return devices

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

    def are_equal(self, values: Iterable[Value], exchanged: set[Value]) -> bool:
        """Whether an array of each device is the same on all of them: it depends on ``exchanged`` values only.

        Constants may differ between the devices of a graph, so the computations of all devices are compared.
        """
        hashes = {self._hash(v, exchanged, {}) for v in values}
        return len(hashes) == 1 and None not in hashes

    def made_equal(self, x: Operation) -> set[Value]:
        """Results of other collectives over the same devices that are equal on all of them."""
        key, peers = self.key(x), self.peers(x)
        others = (y for y in self.operations if COLLECTIVES.get(y.op) in ("all-reduce", "all-gather"))
        return {v for y in others if y not in peers and self.key(y) == key for v in y.outputs}

    def peers(self, x: Operation) -> list[Operation]:
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


def _kind(number: int) -> str:
    return KINDS[number] if number < len(KINDS) else ""
