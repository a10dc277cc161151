"""The components of a variable, and writes to them: held to the variable's structure, shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import described, is_absent, resolve
from gradcombine.errors import GradCombineError, renamed, shown
from gradcombine.reductions import dtypes
from gradcombine.replicated.layouts import Layout
from gradcombine.replicated.policy import Policy
from gradcombine.types import Array, Tree

# A Python number may be written to a variable of its own kind or of one that contains it.
_KINDS = {bool: ("bool",), int: ("integer", "float", "complex"), float: ("float", "complex"), complex: ("complex",)}

Write: TypeAlias = Callable[[Backend, Array, Array], Array]
"""``write(backend, component, value)``: the new component."""


class ReplicatedState(NamedTuple):
    """The components of a variable, or of a tree of variables.

    Attributes:
      value: the tree of components: this replica's, or, over `stacked`, those of all replicas along a first axis.
    """

    value: Tree


class Opened(NamedTuple):
    """A state, taken apart."""

    backend: Backend
    structure: tree.Structure
    leaves: list[Any]

    def paths(self) -> list[str]:
        return list(self.structure.paths())

    def rebuild(self, leaves: list[Any]) -> Tree:
        return tree.unflatten(self.structure, leaves)


class Written(NamedTuple):
    """What is written to one variable of the tree.

    Attributes:
      array: of the variable's dtype, of the component's shape or of one value's; None: nothing is written.
      number: whether it was a Python number, which says the same on every replica.
    """

    array: Array | None
    number: bool = False


def opened(operation: str, state: Any, also: Tree = None) -> Opened:
    """The components, as arrays of the framework that they and ``also`` belong to."""
    if not isinstance(state, ReplicatedState):
        raise GradCombineError(operation, "a ReplicatedState", type(state).__name__)
    leaves, structure = tree.flatten(operation, state.value)
    backend = resolve(operation, [*leaves, *tree.flatten(operation, also)[0]])
    with renamed(operation):
        return Opened(backend, structure, [x if is_absent(x) else backend.asarray(x) for x in leaves])


def written(
    operation: str, into: Opened, value: Tree, layout: Layout, shape: Callable[[Array, str], tuple[int, ...]]
) -> list[Written]:
    """What ``value`` writes to each variable.

    Args:
      shape: of an array that may be written to a component, with its path.

    Raises:
      GradCombineError: for another structure, another shape or another dtype than the variables'.
    """
    values = tree.flatten_as(operation, into.structure, value)
    rows = zip(into.leaves, values, into.paths(), strict=True)
    return [_leaf(operation, into.backend, component, x, path, layout, shape) for component, x, path in rows]


def _leaf(operation: str, backend: Backend, component: Any, x: Any, path: str, layout: Layout, shape: Any) -> Written:
    if is_absent(x):
        return Written(None)
    if is_absent(component):
        raise GradCombineError(operation, "nothing, as where the state was made", "an array", path)
    dtype, one = backend.dtype(component), layout.shape(operation, backend, component, path)
    if type(x) in _KINDS:
        if one:
            raise GradCombineError(operation, f"shape {one}", f"the number {shown(x)}", path)
        return Written(_number(operation, backend, x, dtype, path), number=True)
    with renamed(operation, path):
        received = described(x).shape(x), described(x).dtype(x)
    expected = shape(component, path), dtype
    if expected != received:
        wanted, got = (f"shape {pair[0]} and dtype {pair[1]}" for pair in (expected, received))
        raise GradCombineError(operation, wanted, got, path)
    return Written(backend.asarray(x))


def _number(operation: str, backend: Backend, x: Any, dtype: np.dtype, path: str) -> Array:
    kind = dtypes.kind(dtype)
    try:
        if kind not in _KINDS[type(x)]:
            raise OverflowError
        with np.errstate(all="ignore"):
            return backend.asarray(np.asarray(x, dtype))
    except OverflowError:
        raise GradCombineError(operation, f"a number that a variable of {dtype} holds", shown(x), path) from None


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
    return ReplicatedState(into.rebuild(layout.mark_varying(new) if policy.on_read else new))
