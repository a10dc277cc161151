"""What a write does to a component."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError
from gradcombine.reductions import dtypes
from gradcombine.replicated.layouts import Layout
from gradcombine.replicated.policy import Policy
from gradcombine.replicated.values import Opened, ReplicatedState
from gradcombine.types import Array

Write: TypeAlias = Callable[[Backend, Array, Array], Array]
"""``write(backend, component, value)``: the new component."""


def replace(backend: Backend, component: Array, value: Array) -> Array:
    """value"""
    return value


def add(backend: Backend, component: Array, value: Array) -> Array:
    """component + value"""
    return backend.add(component, value)


def subtract(backend: Backend, component: Array, value: Array) -> Array:
    """component - value"""
    with np.errstate(all="ignore"):  # as `Backend.add`
        return component - value


def applied(
    operation: str, policy: Policy, layout: Layout, write: Write, into: Opened, values: Sequence[Array | None]
) -> ReplicatedState:
    """The state after a write to every component; where the value is None, nothing is written."""
    backend = resolve(operation, [*into.leaves, *values])

    def leaf(component: Any, value: Array | None, path: str) -> Any:
        if is_absent(value):
            return component
        dtype = backend.dtype(component)
        if write is not replace and dtypes.kind(dtype) not in ("float", "complex", "integer"):
            raise GradCombineError(operation, "a variable of numbers", dtype, path)
        return write(backend, backend.asarray(component), backend.cast(backend.asarray(value), dtype))

    new = [leaf(*row) for row in zip(into.leaves, values, into.paths(), strict=True)]
    return ReplicatedState(into.rebuild(own(layout, new) if policy.on_read else new))


def own(layout: Layout, components: Sequence[Any]) -> list[Any]:
    """The components, marked as each replica's own."""
    marked = iter(layout.own([x for x in components if not is_absent(x)]))
    return [x if is_absent(x) else next(marked) for x in components]
