"""Data-flow graph of a compiled program, through loops, branches and fusions.

The nodes are arrays: the leaves of the results of all operations. A computation occurs once, even if it is called
several times.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, product, starmap
from typing import NamedTuple

import numpy as np

from gradcombine.audit.hlo import Instruction, iota, numbers
from gradcombine.audit.program import Program
from gradcombine.audit.subject import Shape, walk

MOVING = {
    *("get-tuple-element", "tuple", "bitcast", "bitcast-convert", "copy", "convert", "reshape", "transpose", "slice"),
    *("dynamic-slice", "concatenate", "pad", "while", "fusion", "call", "parameter", "optimization-barrier"),
    *("all-gather", "collective-permute", "all-to-all"),
}
"""Operations that only move values; includes their ``-start`` and ``-done`` variants."""

LINEAR = MOVING | {"add", "subtract", "negate", "broadcast", "dynamic-update-slice", "conditional", "select"}
"""Operations that commute with sums of their operands."""

CALLED = ("body", "condition", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
"""Attributes that refer to computations."""

Node = int
Through = Callable[[Node], bool]


def joined(computation: dict[str, Instruction], x: Instruction) -> Instruction:
    """A copy of an array in place of the slices in which a TPU prefetches it; other operations as they are."""
    if x.opcode != "custom-call" or '"ConcatBitcast"' not in x.attributes:
        return x
    parts = [computation[name] for name in x.operands]
    for _ in computation:  # at most: slices in a damaged program may form a cycle
        if not all(part.opcode in ("slice", "slice-start", "slice-done") for part in parts):
            break
        parts = [computation[part.operands[0]] for part in parts]
    is_whole = len({part.name for part in parts}) == 1 and parts[0].shapes[0].elements == x.shapes[0].elements
    return x._replace(opcode="copy", operands=(parts[0].name,)) if is_whole else x


def anywhere(node: Node) -> bool:
    return True


class Place(NamedTuple):
    """The operation of a node, and the index of the node among the leaves of its result."""

    computation: str
    x: Instruction
    leaf: int

    @property
    def shape(self) -> Shape:
        return self.x.shapes[self.leaf]


class Edges:
    """Adjacency lists in compressed sparse row form."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray, nodes: int) -> None:
        self._ends = ends[np.argsort(starts, kind="stable")]
        self._first = np.searchsorted(np.sort(starts), np.arange(nodes + 1)).astype(np.intc)

    def __getitem__(self, node: Node) -> list[Node]:
        return self._ends[self._first[node] : self._first[node + 1]].tolist()


class Flow:
    """The data-flow graph of a program."""

    def __init__(self, module: Program) -> None:
        self.module = module
        self.places: list[Place] = []
        self._first = dict[tuple[str, str], Node]()
        self._parameters = dict[tuple[str, int], Instruction]()
        instructions = [(name, joined(y, x)) for name, y in module.computations.items() for x in y.values()]
        for name, x in instructions:
            self._first[name, x.name] = len(self.places)
            self.places += [Place(name, x, leaf) for leaf in range(max(1, len(x.shapes)))]
            if x.opcode == "parameter":
                self._parameters[name, int(x.inside)] = x
        edges = array("i", chain.from_iterable(chain.from_iterable(starmap(self._edges, instructions))))
        starts, ends = np.frombuffer(edges, np.intc).reshape(-1, 2).T
        self.sources = Edges(ends, starts, len(self.places))
        self.uses = Edges(starts, ends, len(self.places))

    def node(self, computation: str, x: Instruction, leaf: int = 0) -> Node:
        return self._first[computation, x.name] + leaf

    def results(self, computation: str) -> range:
        """The results of a computation."""
        return self.leaves(computation, self.module.roots[computation])

    def reached(self, start: Iterable[Node], through: Through = anywhere, within: set[str] | None = None) -> set[Node]:
        """All nodes that depend on ``start``, inclusive.

        Args:
          start: nodes.
          through: whether to continue from a node outside of ``start``.
          within: computations to stay in; None for all.
        """
        return self._walk(self.uses, set(start), through, within)

    def closure(self, start: Iterable[Node], through: Through = anywhere, within: set[str] | None = None) -> set[Node]:
        """All nodes that ``start`` depends on, inclusive; arguments as for `reached`."""
        return self._walk(self.sources, set(start), through, within)

    def _walk(self, edges: Edges, start: set[Node], through: Through, within: set[str] | None) -> set[Node]:
        def onward(node: Node) -> Iterable[Node]:
            nodes = edges[node] if node in start or through(node) else ()
            return nodes if within is None else (n for n in nodes if self.places[n].computation in within)

        return walk(start, onward)

    def opcode(self, node: Node) -> str:
        return self.places[node].x.opcode.removesuffix("-start").removesuffix("-done")

    def inner(self, computation: str) -> set[str]:
        """A computation, and all computations that it calls, directly or indirectly."""
        computations = self.module.computations
        return walk([computation], lambda name: (c for x in computations[name].values() for c in x.called(*CALLED)))

    def leaves(self, name: str, x: Instruction) -> range:
        first = self.node(name, x)
        return range(first, first + max(1, len(x.shapes)))

    def _edges(self, name: str, x: Instruction) -> Iterator[tuple[Node, Node]]:
        """The edges into the results of an operation, and into the parameters of the computations that it calls."""
        computation = self.module.computations[name]
        operands = [computation[operand] for operand in x.operands]
        nodes, inputs = self.leaves(name, x), [self.leaves(name, operand) for operand in operands]
        if x.opcode == "get-tuple-element":
            yield from zip(inputs[0][operands[0].leaf(x.number("index") or 0) :], nodes, strict=False)
        elif x.opcode in ("tuple", "optimization-barrier"):
            yield from zip(chain.from_iterable(inputs), nodes, strict=False)
        elif x.opcode == "while":
            body, condition = x.called("body")[0], x.called("condition")[0]
            results = self.results(body)
            yield from product(self.results(condition), nodes)
            for carried in (nodes, *(self.leaves(inner, self._parameters[inner, 0]) for inner in (body, condition))):
                yield from zip(inputs[0], carried, strict=False)
                yield from zip(results, carried, strict=False)
        elif x.opcode == "conditional":
            yield from product(inputs[0], nodes)
            for i, branch in enumerate(self.module.bodies(x)):
                yield from zip(self.results(branch), nodes, strict=False)
                # With a boolean predicate, the operand of the true branch comes first, but `bodies` lists it last.
                operand = i + 1 if "branch_computations" in x.attributes else 2 - i
                yield from self._arguments(branch, [inputs[operand]])
        elif x.opcode in ("fusion", "call") or (x.opcode == "async-start" and "calls=" in x.attributes):
            inner = self.module.bodies(x)[0]
            # The result of async-start is a tuple of the operands, the results and a context.
            before = sum(map(len, inputs)) if x.opcode == "async-start" else 0
            yield from zip(self.results(inner), nodes[before:], strict=False)
            yield from self._arguments(inner, inputs)
        elif x.opcode.endswith("-done"):
            yield from self._done(computation, operands[0], inputs[0], nodes)
        elif x.collective and len(operands) > 1:
            for i, node in enumerate(nodes):
                yield from product(inputs[i % len(operands)], (node,))
        else:
            yield from product(chain.from_iterable(inputs), nodes)

    def _done(
        self, computation: dict[str, Instruction], start: Instruction, inputs: range, nodes: range
    ) -> Iterator[tuple[Node, Node]]:
        if start.opcode == "async-start":
            inputs = inputs[sum(max(1, len(computation[name].shapes)) for name in start.operands) :] or inputs
            yield from zip(inputs, nodes, strict=False)
        elif start.collective:
            yield from zip(inputs, nodes, strict=False)
        else:
            yield from product(inputs[:1], nodes)

    def _arguments(self, inner: str, inputs: Sequence[range]) -> Iterator[tuple[Node, Node]]:
        """Edges from the arguments of a call to the parameters of the called computation."""
        for i, nodes in enumerate(inputs):
            if parameter := self._parameters.get((inner, i)):
                yield from zip(nodes, self.leaves(inner, parameter), strict=False)

    @cached_property
    def equality(self) -> Equality:
        return Equality(self)


class Equality:
    """Computes which devices hold identical values of each array, by abstract interpretation of the program.

    A label is an array that maps each device to a class; devices of one class hold the same value. Labels are interned:
    ``of`` maps each node to the index of its label. The analysis starts from "equal on all devices" and refines labels
    to a fixed point.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.devices = flow, flow.module.devices
        self._known: dict[bytes, int] = {}
        self._labels: list[np.ndarray] = []
        self._joined: dict[tuple[int, int], int] = {}
        self.one = self._intern(np.zeros(self.devices, np.int64))
        self.all = self._intern(np.arange(self.devices))
        self.of = [self.one] * len(flow.places)
        self._solve()

    def classes(self, node: Node) -> int:
        """Number of different values that devices hold."""
        return int(self._labels[self.of[node]].max()) + 1

    def within(self, node: Node, groups: Iterable[Sequence[int]]) -> bool:
        """Whether the devices of each group hold the same value."""
        label = self._labels[self.of[node]]
        return all(len(set(label[list(group)].tolist())) == 1 for group in groups)

    def _intern(self, label: np.ndarray) -> int:
        _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
        # Number the classes by first occurrence, so that equal partitions of the devices are equal arrays.
        canonical = np.argsort(np.argsort(first))[inverse.reshape(-1)].astype(np.int64)
        key = canonical.tobytes()
        if key not in self._known:
            self._known[key] = len(self._labels)
            self._labels.append(canonical)
        return self._known[key]

    def _join(self, a: int, b: int) -> int:
        if a == b or b == self.one:
            return a
        key = (min(a, b), max(a, b))
        if key not in self._joined:
            self._joined[key] = self._intern(self._labels[a] * self.devices + self._labels[b])
        return self._joined[key]

    def _solve(self) -> None:
        waiting, queued = deque(range(len(self.of))), [True] * len(self.of)
        while waiting:
            node = waiting.popleft()
            queued[node] = False
            label = self._label(node)
            if label != self.of[node]:
                self.of[node] = label
                for user in self.flow.uses[node]:
                    if not queued[user]:
                        queued[user] = True
                        waiting.append(user)

    def _label(self, node: Node) -> int:
        name, x, _ = self.flow.places[node]
        module = self.flow.module
        if x.opcode == "parameter" and name == module.entry:
            return self._sharding(x)
        if x.opcode in ("partition-id", "replica-id", "rng", "infeed", "recv"):
            return self.all
        label = self.one
        for source in self.flow.sources[node]:
            label = self._join(label, self.of[source])
        return self._exchanged(x, label) if x.collective else label

    def _exchanged(self, x: Instruction, label: int) -> int:
        """The label of a collective's result, from that of its operands."""
        groups = self.flow.module.groups(x)
        old, new = self._labels[label], np.arange(self.devices) + 10**6
        if any(max(group) >= self.devices for group in groups):
            return self.all
        if x.collective == "collective-permute":
            new[:] = -1
            for source, target in groups:
                new[target] = old[source]
            return self._intern(new)
        seen: dict[tuple[int, ...], int] = {}
        for group in groups:
            operands = tuple(old[list(group)].tolist())
            # Groups with equal operands have equal results.
            first = seen.setdefault(operands if x.collective != "all-reduce" else tuple(sorted(operands)), group[0])
            is_common = x.collective in ("all-reduce", "all-gather", "collective-broadcast")
            for i, device in enumerate(group):
                new[device] = first * self.devices + (0 if is_common else i)
        return self._intern(new)

    def _sharding(self, x: Instruction) -> int:
        """The label of a parameter, from its sharding."""
        text = self.flow.module.sharding(x).strip("{}")
        if self.devices == 1 or text == "replicated":
            return self.one
        tiles = re.match(r"devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?$", text)
        if not tiles:
            return self.all  # other notations: conservatively, different values on all devices
        order = iota(numbers(tiles[2]), tiles[3])
        label = np.arange(self.devices).reshape(numbers(tiles[1]))
        if tiles[4]:
            label = np.broadcast_to(label[..., :1], label.shape)
        new = np.empty(self.devices, np.int64)
        new[order.reshape(-1)] = label.reshape(-1)
        return self._intern(new)
