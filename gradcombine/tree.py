"""Gradient trees: taken apart into leaves with paths, compared, and put together again.

Containers are dicts, lists, tuples, NamedTuples and whatever node types a loaded framework registers. A leaf is an
array, a Python number, a shape/dtype spec, or None for "no gradient". Dict keys are visited in sorted order, as JAX and
tf.nest do.

A state has to know, long after its last contribution, in which dtype its result leaves, and which leaves have no
gradient. An array can say so only by being there, and what is neither array nor container does not pass through a
compiled function. But the type of a container does, in every framework: so each constant is an empty NamedTuple, of a
class of its own. Row-sparse arrays say their number of rows in the same way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gradcombine.backends.protocol import Backend, Split
from gradcombine.backends.registry import is_absent, loaded, owner
from gradcombine.errors import GradCombineError
from gradcombine.types import Array, Tree


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

    def path(self, i: int) -> str:
        """The path of leaf number i."""
        return next(islice(self.paths(), i, None))

    def __str__(self) -> str:
        return "a leaf" if self.kind is None else f"a {self.kind.__name__} of {len(self.keys)}"


LEAF = Structure()
MOST_LEVELS = 100
"""Containers inside one another; a tree that contains itself has no end."""
_DIFFERENCES_NAMED = 3
_NUMPY_LEAVES = (np.ndarray, np.generic, bool, int, float, complex)


def flatten(operation: str, tree: Tree, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """The leaves of a tree, None among them, and its structure.

    Raises:
      GradCombineError: for an object that is neither a container nor a leaf, for keys of a dict that cannot be sorted,
        and for more than `MOST_LEVELS` of containers, as in a tree that contains itself.
    """
    leaves: list[Any] = []

    def visit(node: Any, path: str, level: int) -> Structure:
        if is_leaf is not None and is_leaf(node):
            leaves.append(node)
            return LEAF
        split = _split(operation, node, path)
        if split is None:
            if node is not None and owner(node) is None:
                expected = "an array, a number, None or a container of them"
                raise GradCombineError(operation, expected, type(node).__name__, path)
            leaves.append(node)
            return LEAF
        if level == MOST_LEVELS:
            expected = f"at most {MOST_LEVELS} levels of containers"
            raise GradCombineError(operation, expected, "more (a tree that contains itself?)", path)
        below = zip(split.keys, split.children, strict=True)
        children = [visit(child, path + key, level + 1) for key, child in below]
        return Structure(_kind(node), split.keys, tuple(children), split.static, split.rebuild)

    structure = visit(tree, "", 0)
    return leaves, structure


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """The tree of this structure with these leaves."""
    remaining = iter(leaves)

    def build(node: Structure) -> Any:
        if node.rebuild is None:
            return next(remaining)
        return node.rebuild([build(child) for child in node.children])

    return build(structure)


def flatten_as(
    operation: str, structure: Structure, tree: Tree, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """The leaves of a tree that must have this structure.

    Raises:
      GradCombineError: where the structures part, with the path.
    """
    leaves, received = flatten(operation, tree, is_leaf)
    if received != structure:
        raise difference(operation, structure, received)
    return leaves


def split_as(operation: str, prefix: Structure, tree: Tree) -> list[Tree]:
    """The subtrees that stand where a prefix structure has its leaves.

    Raises:
      GradCombineError: where the tree does not begin as the prefix does, with the path.
    """
    subtrees: list[Tree] = []

    def visit(expected: Structure, node: Any, path: str) -> None:
        if expected.rebuild is None:
            subtrees.append(node)
            return
        split = _split(operation, node, path)
        received = LEAF if split is None else _level(_kind(node), split.keys, split.static)
        if split is None or received != _level(expected.kind, expected.keys, expected.static):
            raise difference(operation, _level(expected.kind, expected.keys, expected.static), received, path)
        for key, child, inner in zip(expected.keys, split.children, expected.children, strict=True):
            visit(inner, child, path + key)

    visit(prefix, tree, "")
    return subtrees


def select(backend: Backend, condition: Array, a: Tree, b: Tree) -> Tree:
    """``a`` where the scalar condition holds, else ``b``: picked where it is known, by `where` on each array if not."""
    known = backend.concrete(condition)
    if known is not None:
        return a if known else b
    lefts, structure = flatten("select", a)
    rights = flatten_as("select", structure, b)
    chosen = (x if x is None else backend.where(condition, x, y) for x, y in zip(lefts, rights, strict=True))
    return unflatten(structure, chosen)


def difference(operation: str, expected: Structure, received: Structure, path: str = "") -> GradCombineError:
    """The error that names the first places where two structures differ."""
    unequal = _differences(expected, received, path)
    at, wanted, got = next(unequal, (path, "the same nodes", "others"))
    also = [other for other, _, _ in islice(unequal, _DIFFERENCES_NAMED)]
    if also:
        more = sum(1 for _ in unequal)
        got += f"; they differ at {', '.join(also)} as well" + (f" and in {more} more places" if more else "")
    return GradCombineError(operation, f"the structure to have {wanted} here", got, at or "(root)")


def _differences(a: Structure, b: Structure, path: str) -> Iterator[tuple[str, str, str]]:
    """Path, expected and received of each place where two structures differ."""
    if a.kind is not b.kind:
        yield path, str(a), str(b)
    elif a.keys == b.keys:
        if a.static != b.static:
            yield path, f"{a} with the same static fields", "other ones"
        for key, x, y in zip(a.keys, a.children, b.children, strict=True):
            yield from _differences(x, y, path + key)
    else:
        lefts, rights = (dict(zip(x.keys, x.children, strict=True)) for x in (a, b))
        for key in lefts | rights:
            if key not in rights:
                yield path + key, str(lefts[key]), "nothing"
            elif key not in lefts:
                yield path + key, "nothing", str(rights[key])
            else:
                yield from _differences(lefts[key], rights[key], path + key)


def _level(kind: type | None, keys: tuple[str, ...], static: Any) -> Structure:
    """A structure one level deep."""
    return Structure(kind, keys, (LEAF,) * len(keys), static)


def _kind(node: Any) -> type:
    # The wrappers that tf.Module puts around dicts and lists stand for plain ones.
    if isinstance(node, OrderedDict):
        return OrderedDict
    if isinstance(node, dict):
        return dict
    return list if isinstance(node, list) else type(node)


def _split(operation: str, node: Any, path: str) -> Split | None:
    if node is None:
        return None
    if isinstance(node, tuple) and (names := getattr(node, "_fields", None)) is not None:
        cls: Any = type(node)
        return Split(tuple(f".{name}" for name in names), tuple(node), lambda children: cls(*children))
    if isinstance(node, (tuple, list)):
        keys = tuple(f"[{i}]" for i in range(len(node)))
        return Split(keys, tuple(node), tuple if isinstance(node, tuple) else list)
    if isinstance(node, dict):
        return _split_dict(operation, node, path)
    backend = owner(node)
    # A registered node that wraps an array, as flax.nnx.Variable does, has a dtype and a shape as well.
    if backend is not None and (backend.name != "numpy" or isinstance(node, _NUMPY_LEAVES)):
        return None
    if isinstance(node, Iterator):  # JAX warns of it
        return None
    for backend in loaded():
        split = backend.split(node)
        if split is not None:
            return split
    return None


def _split_dict(operation: str, node: dict[Any, Any], path: str) -> Split:
    kind = _kind(node)
    try:
        names = list(node) if kind is OrderedDict else _sorted(node)
    except TypeError:
        kinds = sorted({type(name).__name__ for name in node})
        raise GradCombineError(operation, "keys that can be sorted", f"keys of {', '.join(kinds)}", path) from None
    keys = tuple(f"[{name!r}]" for name in names)

    def rebuild(children: Sequence[Any]) -> Any:
        by_name = dict(zip(names, children, strict=True))
        return kind((name, by_name[name]) for name in node)

    return Split(keys, tuple(node[name] for name in names), rebuild)


def _sorted(names: Iterable[Any]) -> list[Any]:
    try:
        return sorted(names)
    except TypeError:  # keys of several types, which JAX refuses in its own trees
        return sorted(names, key=lambda name: (type(name).__name__, name))


class Static:
    """What the constants have in common; each is a NamedTuple without fields as well.

    Attributes:
      dtype: the dtype that it stands for; None where there is no gradient.
      shape: that it stands for; None where that is not part of it. Where there is no gradient: of the array that says
        so, as JAX's float0 does; None for None.
      rows: the number of rows that it stands for; None for another constant.
    """

    dtype: np.dtype | None
    shape: tuple[int, ...] | None
    rows: int | None

    def __repr__(self) -> str:
        return type(self).__name__

    def __reduce__(self) -> Any:
        if self.rows is not None:
            return static_rows, (self.rows,)
        return (static_absence, (self.shape,)) if self.dtype is None else (static_dtype, (str(self.dtype), self.shape))


@cache
def static_dtype(dtype: str | np.dtype[Any], shape: tuple[int, ...] | None = None) -> Any:
    """The constant that stands for a dtype, or for one and a shape.

    >>> static_dtype(np.dtype(np.float32)), static_dtype("bfloat16").dtype, static_dtype("float32", (2, 3))
    (float32, dtype(bfloat16), float32_2x3)
    """
    known: np.dtype[Any] = np.dtype(getattr(ml_dtypes, str(dtype), dtype))
    name = str(known) if shape is None else "_".join([str(known), "x".join(map(str, shape))])
    return _constant(name, dtype=known, shape=shape)


@cache
def static_absence(shape: tuple[int, ...] | None = None) -> Any:
    """The constant that stands for "no gradient".

    >>> static_absence(), static_absence((2, 3))
    (no_gradient, no_gradient_2x3)
    """
    name = "no_gradient" if shape is None else "_".join(["no_gradient", "x".join(map(str, shape))])
    return _constant(name, shape=shape)


@cache
def static_rows(rows: int) -> Any:
    """The constant that stands for a number of rows.

    >>> static_rows(1000), static_rows(1000).rows
    (rows_1000, 1000)
    """
    return _constant(f"rows_{rows}", rows=rows)


@cache
def _constant(
    name: str, dtype: np.dtype | None = None, shape: tuple[int, ...] | None = None, rows: int | None = None
) -> Any:
    meaning = {"__slots__": (), "dtype": dtype, "shape": shape, "rows": rows}
    return type(name, (Static, NamedTuple("Constant", [])), meaning)()


def is_static(node: Any) -> bool:
    return isinstance(node, Static)


def static_of(leaf: Any, with_shape: bool = False) -> Any:
    """The constant that stands for a leaf's dtype (and shape), or for its "no gradient"."""
    if leaf is None:
        return static_absence()
    backend = owner(leaf)
    if backend is None:
        raise GradCombineError("static", "an array, a number or None", type(leaf).__name__)
    if is_absent(leaf):
        return static_absence(backend.shape(leaf))
    return static_dtype(backend.dtype(leaf), backend.shape(leaf) if with_shape else None)
