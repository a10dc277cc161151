"""Replica context: each replica reads and writes for itself."""

from __future__ import annotations

from dataclasses import dataclass

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.registry import is_absent
from gradcombine.errors import GradCombineError
from gradcombine.replicated.layouts import Layout
from gradcombine.replicated.policy import Aggregation, Policy
from gradcombine.replicated.values import Opened, ReplicatedState, Written, opened, written
from gradcombine.replicated.writes import Write, add, applied, replace, subtract
from gradcombine.types import Array, Tree


@dataclass(frozen=True)
class ReplicaContext:
    """The functions of one policy, over one layout."""

    policy: Policy
    layout: Layout

    @ordinary
    def assign(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        return self._write("replicated.assign", replace, state, value)

    @ordinary
    def assign_add(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        return self._write("replicated.assign_add", add, state, value)

    @ordinary
    def assign_sub(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        return self._write("replicated.assign_sub", subtract, state, value)

    @ordinary
    def read(self, state: ReplicatedState) -> Tree:
        into = opened("replicated.read", state)
        return into.rebuild(into.leaves)

    def _write(self, operation: str, write: Write, state: ReplicatedState, value: Tree) -> ReplicatedState:
        into = opened(operation, state, value)
        self._require_aggregation(operation)
        items = written(operation, into, value, self.layout, lambda component, path: into.backend.shape(component))
        values = self._spread(into, items) if self.policy.on_read else self._combined(operation, into, items)
        return applied(operation, self.policy, self.layout, write, into, values)

    def _require_aggregation(self, operation: str) -> None:
        if self.policy.on_read or self.policy.reduction is not None:
            return
        if (size := self.layout.size()) > 1:
            expected = (
                "aggregation sum, mean or only_first_replica, which make one value of the replicas' values, or "
                "synchronization on_read, which keeps them apart, or cross.assign and its like for one value for all"
            )
            raise GradCombineError(operation, expected, f"{self.policy}, on {size} replicas")

    def _spread(self, into: Opened, items: list[Written]) -> list[Array | None]:
        return [self.layout.spread(into.backend, x.array) if x.number else x.array for x in items]

    def _combined(self, operation: str, into: Opened, items: list[Written]) -> list[Array | None]:
        """One value for every replica. A Python number is one already."""
        if self.policy.aggregation is Aggregation.SUM and self.layout.size() > 1:
            for item, path in zip(items, into.paths(), strict=True):
                if item.number:
                    expected = (
                        "an array of this replica's own (a Python number says the same on every replica: give it to "
                        "cross.assign and its like, or choose aggregation mean or only_first_replica)"
                    )
                    raise GradCombineError(operation, expected, f"a Python number, for {self.policy}", path)
        own = [None if item.number else item.array for item in items]
        if self.policy.reduction is None or all(map(is_absent, own)):
            return self._spread(into, items)
        combined, _ = tree.flatten(operation, self.layout.all_reduce(self.policy.reduction, into.rebuild(own)))
        spread = self._spread(into, items)
        return [x if is_absent(y) else y for x, y in zip(spread, combined, strict=True)]
