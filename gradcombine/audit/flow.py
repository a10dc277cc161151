"""Dependencies between the arrays of a compiled program, through loops, branches and fusions.

Every array is a node: one leaf of one operation's result. A computation counts once, however many operations call it.
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
    "get-tuple-element",
    "tuple",
    "bitcast",
    "bitcast-convert",
    "copy",
    "convert",
    "reshape",
    "transpose",
    "slice",
    "dynamic-slice",
    "concatenate",
    "pad",
    "while",
    "fusion",
    "call",
    "parameter",
    "optimization-barrier",
    "all-gather",
    "collective-permute",
    "all-to-all",
}
"""Operations that give the values they take; with ``-start`` and ``-done`` of the same names."""

LINEAR = MOVING | {"add", "subtract", "negate", "broadcast", "dynamic-update-slice", "conditional", "select"}
"""Operations in which it does not matter whether what they take is summed before or after."""

CALLED = ("body", "condition", "calls", "to_apply", "branch_computations", "true_computation", "false_computation")
"""Attributes that name computations."""

Node = int


class Place(NamedTuple):
    """A node, spelled out."""

    computation: str
    x: Instruction
    leaf: int

    @property
    def shape(self) -> Shape:
        return self.x.shapes[self.leaf]


class Edges:
    """Lists of nodes, one for each node, in two arrays: of edges, by the nodes that they start from."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray, nodes: int) -> None:
        self._ends = ends[np.argsort(starts, kind="stable")]
        self._first = np.searchsorted(np.sort(starts), np.arange(nodes + 1)).astype(np.intc)

    def __getitem__(self, node: Node) -> list[Node]:
        return self._ends[self._first[node] : self._first[node + 1]].tolist()


class Flow:
    """The arrays of a program, what each is made of and what is made of it."""

    def __init__(self, module: Program) -> None:
        self.module = module
        self.places: list[Place] = []
        self._first: dict[str, dict[str, Node]] = {}
        for name, instructions in module.computations.items():
            first = self._first[name] = {}
            for x in instructions.values():
                first[x.name] = len(self.places)
                self.places += [Place(name, x, leaf) for leaf in range(max(1, len(x.shapes)))]
        self._parameters = {
            (name, int(x.inside)): x
            for name, instructions in module.computations.items()
            for x in instructions.values()
            if x.opcode == "parameter"
        }
        every = ((name, x) for name, instructions in module.computations.items() for x in instructions.values())
        edges = array("i", chain.from_iterable(chain.from_iterable(starmap(self._connections, every))))
        pairs = np.frombuffer(edges, np.intc).reshape(-1, 2)
        self.sources = Edges(pairs[:, 1], pairs[:, 0], len(self.places))
        self.uses = Edges(pairs[:, 0], pairs[:, 1], len(self.places))

    def node(self, computation: str, x: Instruction, leaf: int = 0) -> Node:
        return self._first[computation][x.name] + leaf

    def results(self, computation: str) -> range:
        """The arrays that a computation gives."""
        return self.leaves(computation, self.module.computations[computation][self.module.roots[computation]])

    def reached(
        self, start: Iterable[Node], forward: bool, through: Callable[[Node], bool], within: set[str] | None = None
    ) -> set[Node]:
        """All nodes that depend on these, or that these depend on.

        Args:
          start: where to begin; these are among the answer.
          forward: to what depends on them; otherwise to what they depend on.
          through: whether to go on from a node.
          within: the computations to stay in; None for all.
        """
        begun, edges = set(start), self.uses if forward else self.sources

        def onward(node: Node) -> Iterable[Node]:
            if node not in begun and not through(node):
                return ()
            others = edges[node]
            return others if within is None else (x for x in others if self.places[x].computation in within)

        return walk(begun, onward)

    def opcode(self, node: Node) -> str:
        return self.places[node].x.opcode.removesuffix("-start").removesuffix("-done")

    def inner(self, computation: str) -> set[str]:
        """A computation and all that run inside of it."""
        computations = self.module.computations
        return walk([computation], lambda name: (of for x in computations[name].values() for of in x.called(*CALLED)))

    def leaves(self, name: str, x: Instruction) -> range:
        first = self.node(name, x)
        return range(first, first + max(1, len(x.shapes)))

    def _connections(self, name: str, x: Instruction) -> Iterator[tuple[Node, Node]]:
        """Pairs of a node and one that is made of it."""
        of = self.module.computations[name]
        operands = [of[operand] for operand in x.operands]
        nodes, given = self.leaves(name, x), [self.leaves(name, operand) for operand in operands]
        if x.opcode == "get-tuple-element":
            yield from zip(given[0][operands[0].leaf(x.number("index") or 0) :], nodes, strict=False)
        elif x.opcode in ("tuple", "optimization-barrier"):
            yield from zip(chain.from_iterable(given), nodes, strict=False)
        elif x.opcode == "while":
            body, condition = x.called("body")[0], x.called("condition")[0]
            results = self.results(body)
            yield from product(self.results(condition), nodes)
            for taken in (nodes, *(self.leaves(inner, self._parameters[inner, 0]) for inner in (body, condition))):
                yield from zip(given[0], taken, strict=False)
                yield from zip(results, taken, strict=False)
        elif x.opcode == "conditional":
            yield from product(given[0], nodes)
            for i, branch in enumerate(self.module.bodies(x)):
                yield from zip(self.results(branch), nodes, strict=False)
                # A predicate's operands name the true branch first.
                at = i + 1 if "branch_computations" in x.attributes else 2 - i
                yield from self._bound(branch, [given[at]])
        elif x.opcode in ("fusion", "call") or (x.opcode == "async-start" and "calls=" in x.attributes):
            inner = self.module.bodies(x)[0]
            # An asynchronous call gives its operands, its results, and a context.
            before = sum(map(len, given)) if x.opcode == "async-start" else 0
            yield from zip(self.results(inner), nodes[before:], strict=False)
            yield from self._bound(inner, given)
        elif x.opcode.endswith("-done"):
            yield from self._done(of, operands[0], given[0], nodes)
        elif x.collective and len(operands) > 1:
            for i, node in enumerate(nodes):
                yield from product(given[i % len(operands)], (node,))
        else:
            yield from product(chain.from_iterable(given), nodes)

    def _done(
        self, of: dict[str, Instruction], start: Instruction, given: range, nodes: range
    ) -> Iterator[tuple[Node, Node]]:
        if start.opcode == "async-start":
            given = given[sum(max(1, len(of[name].shapes)) for name in start.operands) :] or given
            yield from zip(given, nodes, strict=False)
        elif start.collective:
            yield from zip(given, nodes, strict=False)
        else:
            yield from product(given[:1], nodes)

    def _bound(self, inner: str, given: Sequence[range]) -> Iterator[tuple[Node, Node]]:
        """Pairs of arguments and parameters of a called computation."""
        for i, nodes in enumerate(given):
            if parameter := self._parameters.get((inner, i)):
                yield from zip(nodes, self.leaves(inner, parameter), strict=False)

    @cached_property
    def equality(self) -> Equality:
        return Equality(self)


class Equality:
    """The devices that hold the same values, derived from the operations of the program.

    A label numbers the sets of devices that hold one and the same value.
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
        """How many different values devices hold."""
        return int(self._labels[self.of[node]].max()) + 1

    def within(self, node: Node, groups: Iterable[Sequence[int]]) -> bool:
        """Whether the devices of each group hold the same."""
        label = self._labels[self.of[node]]
        return all(len(set(label[list(group)].tolist())) == 1 for group in groups)

    def _intern(self, label: np.ndarray) -> int:
        _, first, inverse = np.unique(label, return_index=True, return_inverse=True)
        # Numbered as they come: the same sets of devices are the same label.
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
        """From "all are equal" until nothing changes any more."""
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
        groups = self.flow.module.groups(x)
        old, new = self._labels[label], np.arange(self.devices) + 10**6
        if any(max(group) >= self.devices for group in groups):
            return self.all
        if x.collective == "collective-permute":
            new[:] = -1
            for source, to in groups:
                new[to] = old[source]
            return self._intern(new)
        seen: dict[tuple[int, ...], int] = {}
        for group in groups:
            held = tuple(old[list(group)].tolist())
            # The first group that holds the same values has the same results.
            first = seen.setdefault(held if x.collective != "all-reduce" else tuple(sorted(held)), group[0])
            whole = x.collective in ("all-reduce", "all-gather", "collective-broadcast")
            for i, device in enumerate(group):
                new[device] = first * self.devices + (0 if whole else i)
        return self._intern(new)

    def _sharding(self, x: Instruction) -> int:
        text = self.flow.module.sharding(x).strip("{}")
        if self.devices == 1 or text == "replicated":
            return self.one
        tiles = re.match(r"devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?$", text)
        if not tiles:
            return self.all  # whatever else it says, no two devices are taken to hold the same
        order = iota(numbers(tiles[2]), tiles[3])
        label = np.arange(self.devices).reshape(numbers(tiles[1]))
        if tiles[4]:
            label = np.broadcast_to(label[..., :1], label.shape)
        new = np.empty(self.devices, np.int64)
        new[order.reshape(-1)] = label.reshape(-1)
        return self._intern(new)
