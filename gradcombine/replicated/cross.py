"""Cross-replica context: one read or write for all replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.replicated.layouts import Layout
from gradcombine.replicated.policy import Aggregation, Policy
from gradcombine.replicated.values import ReplicatedState, opened, written
from gradcombine.replicated.writes import Write, add, applied, own, replace, subtract
from gradcombine.types import Array, Tree


@dataclass(frozen=True)
class CrossContext:
    """The functions of one policy, over one layout."""

    policy: Policy
    layout: Layout

    @ordinary
    def assign(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        return self._write("replicated.cross.assign", replace, state, value)

    @ordinary
    def assign_add(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        self._require_components("replicated.cross.assign_add")
        return self._write("replicated.cross.assign_add", add, state, value)

    @ordinary
    def assign_sub(self, state: ReplicatedState, value: Tree) -> ReplicatedState:
        self._require_components("replicated.cross.assign_sub")
        return self._write("replicated.cross.assign_sub", subtract, state, value)

    @ordinary
    def read(self, state: ReplicatedState) -> Tree:
        operation = "replicated.cross.read"
        into = opened(operation, state)
        for leaf, path in zip(into.leaves, into.paths(), strict=True):
            if not is_absent(leaf):
                self.layout.shape(operation, into.backend, leaf, path)
        if not self.policy.on_read:
            return into.rebuild([x if is_absent(x) else self.layout.one(x) for x in into.leaves])
        reduction = self._require_reduction(operation)
        components = into.rebuild(own(self.layout, into.leaves))
        values, _ = tree.flatten(operation, self.layout.reduce(reduction, components))
        backend, pairs = resolve(operation, values), zip(values, into.leaves, strict=True)
        return into.rebuild([x if is_absent(x) else backend.cast(x, into.backend.dtype(c)) for x, c in pairs])

    def _write(self, operation: str, write: Write, state: ReplicatedState, value: Tree) -> ReplicatedState:
        into = opened(operation, state, value)
        if self.policy.on_read:
            self._require_reduction(operation)
        items = written(
            operation,
            into,
            value,
            self.layout,
            lambda component, path: self.layout.shape(operation, into.backend, component, path),
        )
        values: list[Any] = [None if x.array is None else self.layout.spread(into.backend, x.array) for x in items]
        if self.policy.on_read and self.policy.aggregation is Aggregation.SUM:
            values = [None if x is None else self._share(into.backend, x) for x in values]
        return applied(operation, self.policy, self.layout, write, into, values)

    def _share(self, backend: Backend, value: Array) -> Array:
        """Each replica's part of a value, so that the parts' sum is the value."""
        dtype, size = backend.dtype(value), self.layout.size()
        if dtypes.kind(dtype) != "integer":
            working = dtypes.working(dtype)
            return backend.divide(backend.cast(value, working), backend.full((), size, dtypes.part(working)))
        wide = backend.cast(value, dtypes.Settings().running(dtype))
        share, rest = wide // size, backend.cast(wide % size, dtypes.INT32)
        return backend.where(self.layout.rank(backend, value) < rest, share + 1, share)

    def _require_reduction(self, operation: str) -> Any:
        if self.policy.reduction is None:
            expected = (
                "aggregation sum, mean or only_first_replica, which say what the one value of the components is "
                "(in replica context, each replica reads and writes its own)"
            )
            raise GradCombineError(operation, expected, str(self.policy))
        return self.policy.reduction

    def _require_components(self, operation: str) -> None:
        if self.policy.on_read and self.policy.aggregation is Aggregation.SUM:
            expected = (
                "cross.assign of the new sum, or a write of each replica's own in replica context (the same addend on "
                "every component would count it once a replica)"
            )
            raise GradCombineError(operation, expected, str(self.policy))
