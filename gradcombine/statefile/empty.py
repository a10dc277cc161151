"""Arrays of no elements, which some checkpoint libraries refuse."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.registry import owner
from gradcombine.types import Tree


@ordinary
def without_empty(state: Tree) -> Tree:
    """The tree with None in the place of each array that has no elements.

    States carry the dtype of a result as an empty array, where that is not the accumulator's. Orbax refuses to save
    arrays of size zero; None is nothing to it. It also widens NumPy scalars, so these become arrays of shape ().

    Args:
      state: any tree of arrays that holds states: an `AccumulateState`, or an optimizer state around one.

    Raises:
      GradCombineError: for a leaf that is no array.

    Bits: all that is left has the same ones.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.statefile import without_empty
    >>> state = gc.reductions.sum(output_dtype="float16").init(np.zeros(2, np.float32))
    >>> state.output.shape, without_empty(state).output
    ((0, 2), None)
    """
    leaves, structure = tree.flatten("statefile.without_empty", state)
    return tree.unflatten(structure, [None if _is_empty(leaf) else _array(leaf) for leaf in leaves])


@ordinary
def with_empty(state: Tree, like: Tree) -> Tree:
    """The inverse of `without_empty`: the tree with the empty arrays of ``like`` in their places again.

    Args:
      state: what `without_empty` returned, saved and restored.
      like: a tree of the same structure that has them, for instance a new state from the same ``init``.

    Raises:
      GradCombineError: for two structures.

    Bits: every other leaf is the same object.

    >>> import numpy as np, gradcombine as gc
    >>> from gradcombine.statefile import with_empty, without_empty
    >>> state = gc.reductions.sum(output_dtype="float16").init(np.zeros(2, np.float32))
    >>> with_empty(without_empty(state), like=state).output
    array([], shape=(0, 2), dtype=float16)
    """
    leaves, structure = tree.flatten("statefile.with_empty", like)
    saved = tree.flatten_as("statefile.with_empty", structure, state)
    return tree.unflatten(structure, [b if _is_empty(b) else a for a, b in zip(saved, leaves, strict=True)])


def _array(leaf: Any) -> Any:
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _is_empty(leaf: Any) -> bool:
    backend = None if leaf is None else owner(leaf)
    return backend is not None and 0 in backend.shape(leaf)
