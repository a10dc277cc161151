"""A list of trees, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.backends.protocol import Backend
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.errors import GradCombineError, renamed
from gradcombine.reductions import dtypes
from gradcombine.types import Array, Tree


def trees_of(operation: str, values: Any) -> list[Tree]:
    """The trees of a list.

    Raises:
      GradCombineError: for an empty list, or what is no list.
    """
    if not isinstance(values, (list, tuple)) or hasattr(values, "_fields"):
        raise GradCombineError(operation, "a list of trees", type(values).__name__)
    if not values:
        raise GradCombineError(operation, "one tree or more", "an empty list")
    return list(values)


def by_leaf(operation: str, values: Sequence[Tree], rule: Callable[[Backend, list[Array]], Array]) -> Tree:
    """The tree of ``rule(backend, terms)``, the terms of a leaf in the order of the trees; called in `flatten`'s order.

    Raises:
      GradCombineError: for trees of different structures, shapes or dtypes, and for a leaf that is None in some of them
        only.
    """
    trees = trees_of(operation, values)
    _, structure = tree.flatten(operation, trees[0])
    columns = list(zip(*(tree.flatten_as(operation, structure, value) for value in trees), strict=True))
    backend = resolve(operation, [leaf for column in columns for leaf in column])
    combined = []
    for column, path in zip(columns, structure.paths(), strict=True):
        absent = [is_absent(leaf) for leaf in column]
        if any(absent) and not all(absent):
            raise GradCombineError(operation, "a gradient in all trees or in none", f"{sum(absent)} without one", path)
        combined.append(column[0] if all(absent) else backend.asarray(rule(backend, _terms(operation, column, path))))
    return tree.unflatten(structure, combined)


def _terms(operation: str, column: Sequence[Any], path: str) -> list[Array]:
    backend = resolve(operation, column)
    with renamed(operation, path):
        terms = [backend.asarray(leaf) for leaf in column]
        expected, *others = ((backend.shape(term), backend.dtype(term)) for term in terms)
    if dtypes.kind(backend.dtype(terms[0])) not in dtypes.NUMERIC:
        raise GradCombineError(operation, "a dtype of numbers", backend.dtype(terms[0]), path)
    for received in others:
        if received != expected:
            described = "shape {} and dtype {}".format
            raise GradCombineError(operation, described(*expected), described(*received), path)
    return terms


def require_dtypes(operation: str, value: Tree, allowed: Sequence[str]) -> list[np.dtype]:
    """The dtypes of a tree's gradients, in the order of `flatten`.

    Raises:
      GradCombineError: for one that is not allowed.
    """
    leaves, structure = tree.flatten(operation, value)
    found = []
    for leaf, path in zip(leaves, structure.paths(), strict=True):
        if not is_absent(leaf):
            dtype = resolve(operation, [leaf]).dtype(leaf)
            if dtype.name not in allowed:
                raise GradCombineError(operation, f"a dtype of {', '.join(allowed)}", dtype, path)
            found.append(dtype)
    return found
