"""Gradient trees: taken apart into leaves with paths, compared, and put together again.

Containers are dicts, lists, tuples, NamedTuples and whatever node types a loaded framework registers. A leaf is an
array, a Python number, a shape/dtype spec, or None for "no gradient". Dict keys are visited in sorted order, as JAX and
tf.nest do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradcombine.backends.protocol import Split
from gradcombine.backends.registry import loaded, owner
from gradcombine.errors import GradCombineError
from gradcombine.types import Tree


@dataclass(frozen=True)
class Structure:
    """The containers of a tree without its leaves. Two structures are equal when their trees match leaf by leaf."""

    kind: type | None = None
    keys: tuple[str, ...] = ()
    children: tuple[Structure, ...] = ()
    static: Any = None
    rebuild: Callable[[Sequence[Any]], Any] | None = field(default=None, compare=False, repr=False)

    def paths(self, prefix: str = "") -> Iterator[str]:
        """One printable path a leaf, in the order of `flatten`."""
        if self.rebuild is None:
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(prefix + key)

    def __str__(self) -> str:
        if self.rebuild is None:
            return "*"
        inside = ", ".join(f"{key}: {child}" for key, child in zip(self.keys, self.children, strict=True))
        return f"{getattr(self.kind, '__name__', self.kind)}({inside})"


LEAF = Structure()
_NUMPY_LEAVES = (np.ndarray, np.generic, bool, int, float, complex)


def flatten(operation: str, tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a tree, None among them, and its structure.

    Raises:
      GradCombineError: for an object that is neither a container nor a leaf.
    """
    leaves: list[Any] = []

    def visit(node: Any, path: str) -> Structure:
        if is_leaf is not None and is_leaf(node):
            leaves.append(node)
            return LEAF
        split = _split(node)
        if split is None:
            if node is not None and owner(node) is None:
                expected = "an array, a number, None or a container of them"
                raise GradCombineError(operation, expected, type(node).__name__, path)
            leaves.append(node)
            return LEAF
        children = [visit(child, path + key) for key, child in zip(split.keys, split.children, strict=True)]
        return Structure(_kind(node), split.keys, tuple(children), split.static, split.rebuild)

    structure = visit(tree, "")
    return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """The tree of this structure with these leaves."""
    remaining = iter(leaves)

    def build(node: Structure) -> Any:
        if node.rebuild is None:
            return next(remaining)
        return node.rebuild([build(child) for child in node.children])

    return build(structure)


def flatten_as(operation: str, structure: Structure, tree: Tree) -> list[Any]:
    """The leaves of a tree that must have this structure.

    Raises:
      GradCombineError: where the structures part, with the path.
    """
    leaves, received = flatten(operation, tree)
    if received != structure:
        raise difference(operation, structure, received)
    return leaves


def split_as(operation: str, prefix: Structure, tree: Tree) -> list[Tree]:
    """The subtrees that stand where a prefix structure has its leaves.

    Raises:
      GradCombineError: where the tree does not begin as the prefix does, with the path.
    """
    found: list[Tree] = []

    def visit(expected: Structure, node: Any, path: str) -> None:
        if expected.rebuild is None:
            found.append(node)
            return
        split = _split(node)
        level = None if split is None else (_kind(node), split.keys, split.static)
        if split is None or level != (expected.kind, expected.keys, expected.static):
            received = type(node).__name__ if split is None else f"{_kind(node).__name__}({', '.join(split.keys)})"
            wanted = f"{getattr(expected.kind, '__name__', '')}({', '.join(expected.keys)})"
            raise GradCombineError(operation, wanted, received, path or "(root)")
        for key, child, inner in zip(expected.keys, split.children, expected.children, strict=True):
            visit(inner, child, path + key)

    visit(prefix, tree, "")
    return found


def difference(operation: str, expected: Structure, received: Structure, path: str = "") -> GradCombineError:
    """The error that says where two structures part first."""
    same_level = (expected.kind, expected.keys) == (received.kind, received.keys)
    if same_level:
        for key, a, b in zip(expected.keys, expected.children, received.children, strict=True):
            if a != b:
                return difference(operation, a, b, path + key)
    return GradCombineError(operation, f"the structure {expected}", str(received), path or "(root)")


def _kind(node: Any) -> type:
    # The wrappers that tf.Module puts around dicts and lists stand for plain ones.
    if isinstance(node, OrderedDict):
        return OrderedDict
    if isinstance(node, dict):
        return dict
    return list if isinstance(node, list) else type(node)


def _split(node: Any) -> Split | None:
    if node is None:
        return None
    if isinstance(node, tuple) and (names := getattr(node, "_fields", None)) is not None:
        cls: Any = type(node)
        return Split(tuple(f".{name}" for name in names), tuple(node), lambda children: cls(*children))
    if isinstance(node, (tuple, list)):
        keys = tuple(f"[{i}]" for i in range(len(node)))
        return Split(keys, tuple(node), tuple if isinstance(node, tuple) else list)
    if isinstance(node, dict):
        return _split_dict(node)
    backend = owner(node)
    # A registered node that wraps an array, as flax.nnx.Variable does, has a dtype and a shape as well.
    if backend is not None and (backend.name != "numpy" or isinstance(node, _NUMPY_LEAVES)):
        return None
    for backend in loaded():
        split = backend.split(node)
        if split is not None:
            return split
    return None


def _split_dict(node: dict[Any, Any]) -> Split:
    kind = _kind(node)
    names = list(node) if kind is OrderedDict else sorted(node, key=_sort_key)
    keys = tuple(f"[{name!r}]" for name in names)

    def rebuild(children: Sequence[Any]) -> Any:
        found = dict(zip(names, children, strict=True))
        return kind((name, found[name]) for name in node)

    return Split(keys, tuple(node[name] for name in names), rebuild)


def _sort_key(name: Any) -> tuple[str, Any]:
    return (type(name).__name__, name)
