# pyright: standard
"""Pytrees of gradients: flattens them to leaves with paths, compares their structures, and rebuilds them.

Containers are dicts, lists, tuples, NamedTuples and the node types that a loaded framework registers. A leaf is an
array, a Python number, a shape/dtype spec, or None for "no gradient". Dict keys are visited in sorted order, as in JAX
and tf.nest.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, starmap
from typing import Any

from gradcombine.backends.protocol import Backend, Split
from gradcombine.backends.registry import (
    LEAF_TYPES,
    NUMPY_TYPES,
    dtype_of,
    in_words,
    is_absent,
    is_array_of,
    loaded,
    owner,
    shape_of,
)
from gradcombine.errors import GradCombineError, invalid
from gradcombine.static import (  # noqa: F401 (pickled states refer to them by this module's name)
    Static,
    is_static,
    static_absence,
    static_dtype,
    static_rows,
)
from gradcombine.types import Array, Leaf, Tree


@dataclass(eq=False, repr=False, slots=True)
class Structure:
    """The containers of a tree, without its leaves. Two structures are equal if their trees match leaf by leaf.

    Attributes:
      kind: the type of the container; None for a leaf.
      names: the names of the children: the keys of a dict, the indices of a list, the fields of a NamedTuple.
      form: format string of a name in a path, for instance ``"[{!r}]"``.
      children: the structures of the children.
      static: metadata that must be equal for two containers to match.
      rebuild: makes the container from a sequence of children; None for a leaf.
    """

    kind: type | None = None
    names: tuple[Any, ...] = ()
    form: str = "{}"
    children: tuple[Structure, ...] = ()
    static: Any = None
    rebuild: Callable[[Sequence[Tree]], Tree] | None = None

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Structure)
            and self.kind is other.kind
            and self.names == other.names
            and self.static == other.static
            and self.children == other.children
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.keys, self.children))

    @property
    def keys(self) -> tuple[str, ...]:
        """The path element of each child, for instance ``"['w']"``."""
        return tuple([self.form.format(name) for name in self.names])

    def paths(self, prefix: str = "") -> Iterator[str]:
        """The printable path of each leaf, in the order of `flatten`."""
        if self.rebuild is None:
            yield prefix
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.paths(prefix + key)

    def containers(self, prefix: str = "") -> Iterator[tuple[str, type]]:
        """The path and the type of each container, outermost first."""
        if self.kind is not None:
            yield prefix, self.kind
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.containers(prefix + key)

    def path(self, i: int) -> str:
        """The path of leaf ``i``."""
        return next(islice(self.paths(), i, None))

    def __str__(self) -> str:
        return "a leaf" if self.kind is None else f"a {self.kind.__name__} of {len(self.names)}"


LEAF = Structure()
MOST_LEVELS = 100
"""Maximal depth of nested containers; bounds the recursion for a tree that contains itself."""
_DIFFERENCES_NAMED = 3


def flatten(tree: Tree, is_leaf: Callable[[Tree], bool] | None = None) -> tuple[list[Leaf], Structure]:
    """Returns the leaves of a tree, including None, and its structure.

    Raises:
      GradCombineError: for an object that is neither a container nor a leaf, for dict keys that cannot be sorted, and
        for containers nested deeper than `MOST_LEVELS`.
    """
    leaves: list[Leaf] = []
    return leaves, _visit(tree, leaves, is_leaf, 0)


def _visit(node: Tree, leaves: list[Leaf], is_leaf: Callable[[Tree], bool] | None, level: int) -> Structure:
    """Appends the leaves of a node, and returns its structure."""
    if node is None or type(node) in LEAF_TYPES or (is_leaf is not None and is_leaf(node)):
        leaves.append(node)
        return LEAF
    split = _split(node)
    if split is None:
        if owner(node) is None:
            raise invalid("an array, a number, None or a container of them", type(node).__name__)
        leaves.append(node)
        return LEAF
    if level == MOST_LEVELS:
        expected = f"at most {MOST_LEVELS} levels of containers"
        raise invalid(expected, "more (a tree that contains itself?)")
    children: list[Structure] = []
    for child in split.children:
        if type(child) in LEAF_TYPES or (is_leaf is not None and is_leaf(child)):
            leaves.append(child)
            children.append(LEAF)
            continue
        try:
            children.append(_visit(child, leaves, is_leaf, level + 1))
        except GradCombineError as error:
            error.within(split.form.format(split.names[len(children)]))
            raise
    return Structure(_container_type(node), split.names, split.form, tuple(children), split.static, split.rebuild)


def present(tree: Tree) -> list[tuple[str, Leaf]]:
    """The leaves other than None and a framework's marker of "no gradient", each with its path."""
    leaves, structure = flatten(tree)
    return [(path, leaf) for path, leaf in zip(structure.paths(), leaves, strict=True) if not is_absent(leaf)]


def unflatten(structure: Structure, leaves: Iterable[Leaf]) -> Tree:
    """Builds the tree of this structure with these leaves."""
    remaining = iter(leaves)
    return next(remaining) if structure.rebuild is None else _build(structure, remaining)


def _build(node: Structure, remaining: Iterator[Leaf]) -> Tree:
    assert node.rebuild is not None
    return node.rebuild([next(remaining) if x.rebuild is None else _build(x, remaining) for x in node.children])


def flatten_as(structure: Structure, tree: Tree, is_leaf: Callable[[Tree], bool] | None = None) -> list[Leaf]:
    """Returns the leaves of a tree.

    Raises:
      GradCombineError: if the tree does not have this structure; its path is the first difference.
    """
    leaves: list[Leaf] = []
    if not _fill(structure, tree, leaves, is_leaf):
        raise difference(structure, flatten(tree, is_leaf)[1])
    return leaves


def _fill(expected: Structure, node: Tree, leaves: list[Leaf], is_leaf: Callable[[Tree], bool] | None) -> bool:
    """Appends the leaves of a node; returns whether it has this structure."""
    known_leaf = node is None or type(node) in LEAF_TYPES or (is_leaf is not None and is_leaf(node))
    split = None if known_leaf else _split(node)
    if split is None:
        leaves.append(node)
        return expected.rebuild is None and (known_leaf or owner(node) is not None)
    if expected.kind is not _container_type(node) or expected.names != split.names or expected.static != split.static:
        return False
    for child, inner in zip(split.children, expected.children, strict=True):
        if inner.rebuild is None and type(child) in LEAF_TYPES:
            leaves.append(child)
        elif not _fill(inner, child, leaves, is_leaf):
            return False
    return True


def map(
    function: Callable[[Leaf], Leaf] | Callable[[Leaf, Leaf], Leaf],
    tree: Tree,
    *others: Tree,
    is_leaf: Callable[[Tree], bool] | None = None,
) -> Tree:
    """The tree of ``function(leaf, *leaves_of_others)``; raises as `flatten_as` for trees of another structure."""
    leaves, structure = flatten(tree, is_leaf)
    columns = [flatten_as(structure, other, is_leaf) for other in others]
    return unflatten(structure, starmap(function, zip(leaves, *columns, strict=True)))


def split_as(prefix: Structure, tree: Tree) -> list[Tree]:
    """Returns the subtrees of a tree at the leaves of a prefix structure.

    Raises:
      GradCombineError: if the structure is not a prefix of the tree's; its path is the first difference.
    """
    subtrees: list[Tree] = []
    _take(prefix, tree, subtrees)
    return subtrees


def _take(expected: Structure, node: Tree, subtrees: list[Tree]) -> None:
    if expected.rebuild is None:
        subtrees.append(node)
        return
    split = _split(node)
    received = LEAF if split is None else _level(_container_type(node), split.names, split.form, split.static)
    wanted = _level(expected.kind, expected.names, expected.form, expected.static)
    if split is None or received != wanted:
        raise difference(wanted, received)
    for name, child, inner in zip(expected.names, split.children, expected.children, strict=True):
        if inner.rebuild is None:
            subtrees.append(child)
            continue
        try:
            _take(inner, child, subtrees)
        except GradCombineError as error:
            error.within(expected.form.format(name))
            raise


def static_of(leaf: Leaf, with_shape: bool = False) -> Any:
    """The constant for the dtype (and the shape) of a leaf, or for "no gradient"."""
    if leaf is None:
        return static_absence()
    backend = owner(leaf)
    if backend is None:
        raise invalid("an array, a number or None", type(leaf).__name__)
    if is_absent(leaf):
        return static_absence(backend.shape(leaf))
    return static_dtype(backend.dtype(leaf), backend.shape(leaf) if with_shape else None)


def select(backend: Backend, condition: Array, a: Tree, b: Tree) -> Tree:
    """``a`` if the scalar condition holds, else ``b``; a `where` on each array if the condition is traced."""
    known = backend.concrete(condition)
    if known is not None:
        return a if known else b
    return map(lambda x, y: x if x is None else backend.where(condition, x, y), a, b)


def require_alike(expected: Tree, received: Tree) -> None:
    """Raises unless ``received`` has the structure, shapes, dtypes and missing leaves of ``expected``."""
    leaves, structure = flatten(expected)
    for i, (x, y) in enumerate(zip(leaves, flatten_as(structure, received), strict=True)):
        if y is not None if x is None else not is_array_of(y, dtype_of(x), shape_of(x)):
            raise invalid("no array" if x is None else in_words(x), in_words(y), structure.path(i))


def difference(expected: Structure, received: Structure) -> GradCombineError:
    """The error for two different structures; names the first paths at which they differ."""
    differences = _differences(expected, received, "")
    first, wanted, got = next(differences, ("", "the same nodes", "others"))
    also = [other for other, _, _ in islice(differences, _DIFFERENCES_NAMED)]
    if also:
        more = sum(1 for _ in differences)
        got += f"; also different: {', '.join(also)}" + (f" and {more} more" if more else "")
    return invalid(f"the structure to have {wanted} here", got, first or "(root)")


def _differences(a: Structure, b: Structure, path: str) -> Iterator[tuple[str, str, str]]:
    """The path of each difference between two structures, with descriptions of the nodes of both."""
    if a.kind is not b.kind:
        yield path, str(a), str(b)
    elif a.names == b.names:
        if a.static != b.static:
            yield path, f"{a} with the same static fields", "different ones"
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


def _level(kind: type | None, names: tuple[Any, ...], form: str, static: Any) -> Structure:
    """A structure one level deep."""
    return Structure(kind, names, form, (LEAF,) * len(names), static)


def _container_type(node: Tree) -> type:
    cls = node.__class__  # not type(node): tf.Module wraps tuples in proxies
    if cls in (dict, list, tuple):
        return cls
    # tf.Module wraps dicts and lists in subclasses, which count as dict and list.
    if isinstance(node, OrderedDict):
        return OrderedDict
    if isinstance(node, defaultdict):
        return defaultdict
    if isinstance(node, dict):
        return dict
    return list if isinstance(node, list) else cls


def _split(node: Tree) -> Split | None:
    if isinstance(node, dict):
        return _split_dict(node)
    if isinstance(node, (tuple, list)):
        names = getattr(node, "_fields", None) if isinstance(node, tuple) else None
        if names is not None:
            cls: Any = _container_type(node)
            return Split(names, tuple(node), lambda children: cls(*children), form=".{}")
        rebuild = tuple if isinstance(node, tuple) else list
        return Split(tuple(range(len(node))), tuple(node), rebuild, form="[{}]")
    if node is None:
        return None
    backend = owner(node)
    # The NumPy backend owns all objects with a dtype and a shape, even registered nodes such as flax.nnx.Variable.
    if backend is not None and (backend.name != "numpy" or isinstance(node, NUMPY_TYPES)):
        return None
    if isinstance(node, Iterator):  # JAX warns about iterators
        return None
    for backend in loaded():
        split = backend.split(node)
        if split is not None:
            return split
    return None


def _split_dict(node: dict[Any, Any]) -> Split:
    cls, order = _container_type(node), tuple(node)
    try:
        names = order if cls is OrderedDict else tuple(_sorted(order))
    except TypeError:
        types = sorted({type(name).__name__ for name in node})
        raise invalid("keys that can be sorted", f"keys of {', '.join(types)}") from None
    make = partial(defaultdict, node.default_factory) if isinstance(node, defaultdict) else cls
    rebuild = partial(_dict_of, make, names, order)
    return Split(names, tuple([node[name] for name in names]), rebuild, form="[{!r}]")


def _dict_of(
    make: Callable[..., Tree], names: tuple[Any, ...], order: tuple[Any, ...], children: Sequence[Tree]
) -> Tree:
    """The dict of children, which are sorted by ``names``, with its keys in their original order."""
    by_name = dict(zip(names, children, strict=True))
    if make is dict and names == order:
        return by_name
    return make(zip(order, [by_name[name] for name in order], strict=True))


def _sorted(names: Iterable[Any]) -> list[Any]:
    try:
        return sorted(names)
    except TypeError:  # keys of several types
        return sorted(names, key=lambda name: (type(name).__name__, name))
