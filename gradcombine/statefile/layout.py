"""A state as named leaves: taken apart for a file, and the layout that a loaded one must have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from gradcombine import binary_counter, tree
from gradcombine.backends.registry import is_absent, load, owner
from gradcombine.errors import GradCombineError
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, BinaryCounter, State, Tree


class Layout(NamedTuple):
    """What a state is like, without its values.

    Attributes:
      structure: its containers.
      leaves: dtype and shape of each leaf by path, None for a leaf that is None.
      kinds: the class of each NamedTuple, by path.
    """

    structure: tree.Structure
    leaves: dict[str, tuple[np.dtype, tuple[int, ...]] | None]
    kinds: dict[str, str]


def layout(operation: str, state: State) -> Layout:
    """The layout of a state.

    Raises:
      GradCombineError: for two leaves whose paths read the same.
    """
    leaves, structure = tree.flatten(operation, state)
    described = dict(zip(structure.paths(), map(_described, leaves), strict=True))
    if len(described) != len(leaves):
        raise GradCombineError(operation, "leaves whose paths differ", f"{len(leaves) - len(described)} that do not")
    return Layout(structure, described, dict(_kinds(structure, "")))


def template(operation: str, reduction: Reduction, like: Tree, levels: int | None) -> State:
    """The empty state that the reduction makes for trees like ``like``, in NumPy arrays; a window if it has levels."""
    leaves, structure = tree.flatten(operation, like)
    part = reduction.init(tree.unflatten(structure, map(_spec, leaves)))
    if levels is None:
        return part
    zero = np.zeros((), np.int32)
    if levels == 1:
        return AccumulateState((part,), zero, zero)
    arrays, inner = tree.flatten(operation, part)
    stacked = tree.unflatten(inner, [np.broadcast_to(x, (levels, *np.shape(x))) for x in arrays])
    return AccumulateState(BinaryCounter(stacked, zero), zero, zero)


def on_host(operation: str, state: State) -> State:
    """The state in NumPy arrays.

    Raises:
      GradCombineError: for a value that is traced, or whose parts other processes hold.
    """
    leaves, structure = tree.flatten(operation, state)
    return tree.unflatten(
        structure, [_value(operation, x, path) for x, path in zip(leaves, structure.paths(), strict=True)]
    )


def require_state_of(operation: str, reduction: Reduction, state: State) -> None:
    """Refuses a state that is not one of this reduction, or several of them stacked in one tree."""
    if not isinstance(state, AccumulateState):
        _require_part(operation, reduction, state, "")
        return
    for name in ("step", "index"):
        position = np.asarray(getattr(state, name))
        if position.shape != () or position.dtype != np.int32:
            received = f"{position.dtype} of shape {position.shape}"
            raise GradCombineError(operation, "int32 of shape (), of one replica", received, f".{name}")
    if isinstance(state.levels, BinaryCounter):
        _require_part(operation, reduction, binary_counter.level(state.levels, 0), ".levels.stacked")
    else:
        _require_part(operation, reduction, state.levels[0], ".levels[0]")


def _require_part(operation: str, reduction: Reduction, part: State, path: str) -> None:
    # The empty state has the right shapes of weights and counts, which in stacked states have one more axis.
    right, received = layout(operation, reduction.clear(part)), layout(operation, part)
    for node in [*right.kinds, *received.kinds]:
        expected, found = right.kinds.get(node), received.kinds.get(node)
        if expected != found:
            raise GradCombineError(operation, f"{expected}, as these settings make it", str(found), path + node)
    for leaf in [*right.leaves, *received.leaves]:
        if (leaf in right.leaves) != (leaf in received.leaves):
            expected, found = ("a leaf", "none") if leaf in right.leaves else ("no leaf", "one")
            raise GradCombineError(operation, f"{expected}, as these settings make it", found, path + leaf)
        if received.leaves[leaf] != right.leaves[leaf]:
            raise difference(operation, path + leaf, right.leaves[leaf], received.leaves[leaf])


def difference(operation: str, path: str, expected: Any, received: Any) -> GradCombineError:
    """The error of a leaf with another dtype or shape."""
    return GradCombineError(operation, _named(expected), _named(received), path or "(root)")


def _named(described: tuple[Any, Any] | None) -> str:
    return "no gradient" if described is None or described[1] is None else f"{described[0]} of shape {described[1]}"


def _described(leaf: Any) -> tuple[np.dtype, tuple[int, ...]] | None:
    backend = None if leaf is None else owner(leaf)
    return None if backend is None else (backend.dtype(leaf), backend.shape(leaf))


def _spec(leaf: Any) -> Any:
    """An array of the leaf's shape that takes no memory."""
    if is_absent(leaf):
        return leaf
    described = _described(leaf)
    assert described is not None
    dtype, shape = described
    return np.broadcast_to(np.zeros((), dtype), shape)


def _value(operation: str, leaf: Any, path: str) -> Any:
    if leaf is None:
        return None
    backend = owner(leaf)
    assert backend is not None
    expected = "an array whose value this process has"
    try:
        value = backend.concrete(backend.asarray(leaf))
    except RuntimeError as error:
        raise GradCombineError(operation, expected, str(error), path) from None
    if value is None:
        raise GradCombineError(operation, expected, "a traced one", path)
    return load("numpy").asarray(value)


def _kinds(structure: tree.Structure, path: str) -> Iterator[tuple[str, str]]:
    if structure.kind is not None and hasattr(structure.kind, "_fields"):
        yield path, structure.kind.__name__
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from _kinds(child, path + key)
