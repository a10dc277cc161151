# pyright: standard
"""Lists: combining trees that are all available at once."""

from __future__ import annotations

from collections.abc import Iterable, Set
from functools import partial
from typing import Any

from gradcombine import reductions, tree
from gradcombine.backends.registry import owner
from gradcombine.errors import invalid, operation, renamed, shown
from gradcombine.pairwise import fold_pairwise
from gradcombine.reductions.algebra import Reduction, derived
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Array, Order, State, Tree

METHODS: dict[Any, Order] = {"add_n": "sequential", "accumulate_n": "sequential", "tree": "tree"}
"""The method names of `add_n`. tf.AggregationMethod's values (0: ADD_N and DEFAULT, 1: EXPERIMENTAL_TREE,
2: EXPERIMENTAL_ACCUMULATE_N) mean the same three."""

_TF_AGGREGATION_METHODS = ("add_n", "tree", "accumulate_n")
_NO_LISTS = (dict, str, bytes, bytearray, Set)


@operation("combine")
def combine(
    reduction: Reduction,
    values: Iterable[Tree],
    weights: Iterable[Any] | Array | None = None,
    order: Order = "sequential",
) -> Tree:
    """Combines a list of trees: ``finalize(update(... update(init, v_1, w_1) ..., v_n, w_n))``.

    Args:
      reduction: from `gradcombine.reductions`.
      values: one tree or more, of one structure, with leaves of equal shapes and dtypes. None is "no gradient": a leaf
        that is None in all of them is None in the result; one that is None in some adds nothing there.
      weights: one scalar per tree, as a list or an array of shape (n,), finite and not negative; None: all 1. A tree of
        weight 0 changes nothing, whatever it holds.
      order: ``"sequential"``: left to right. ``"tree"``: the canonical binary tree over the positions, with log2(n)
        roundings per element in place of n, and the same bits for any division of the list over time and replicas
        into blocks of a power of two.

    Returns:
      The combined tree.

    Raises:
      GradCombineError: for an empty list, trees that do not match, a wrong number of weights or a bad weight, arrays of
        two frameworks.

    Bits: as the reduction promises for a given order.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.mean(), [{"w": np.float32([1, 2])}, {"w": np.float32([3, 4])}], weights=[1, 3])
    {'w': array([2.5, 3.5], dtype=float32)}
    """
    return _combine(reduction, values, weights, order)


def _combine(reduction: Reduction, values: Any, weights: Any = None, order: Order = "sequential") -> Tree:
    check(reduction=reduction, order=order)
    trees = _list("trees", values)
    scales = [1] * len(trees) if weights is None else _weights(weights)
    if not trees:
        raise invalid("one tree or more", "an empty list")
    if len(scales) != len(trees):
        raise invalid(f"{len(trees)} weights", str(len(scales)))
    if reduction.derivative is None:
        return _combined(reduction, trees, scales, order)
    return derived(reduction, partial(_combined, order=order), trees, scales)


def _combined(reduction: Reduction, trees: list[Tree], scales: list[Any], order: Order) -> Tree:
    if reduction.takes_lists:
        many = reduction.update_many(None, trees, scales, order)
        if many is not None:
            return reduction.finalize(many)
    empty = reduction.init(_common(trees))
    if order == "tree":
        nodes = (reduction.update(empty, value, weight) for value, weight in zip(trees, scales, strict=True))
        return reduction.finalize(fold_pairwise(reduction.merge, nodes))
    state: State = empty
    for value, weight in zip(trees, scales, strict=True):
        state = reduction.update(state, value, weight)
    return reduction.finalize(state)


@operation("add_n")
def add_n(values: Iterable[Tree], method: str | int = "add_n") -> Tree:
    """The sum of a list of trees.

    Args:
      values: as for `combine`.
      method: ``"add_n"`` and ``"accumulate_n"``: a left chain; ``"tree"``: the canonical balanced tree. A value of
        tf.AggregationMethod is taken as the method that it names. (TensorFlow itself runs EXPERIMENTAL_TREE and
        EXPERIMENTAL_ACCUMULATE_N as left chains of binary additions, and ADD_N on CPU in blocks of eight terms.)

    Returns:
      The sum, of the contributions' dtype.

    Raises:
      GradCombineError: for an unknown method, and as `combine`.

    Bits: as `gradcombine.reductions.sum`: those of the order, on every backend. One tree passes through unchanged.

    References: `tf.AggregationMethod <https://www.tensorflow.org/api_docs/python/tf/AggregationMethod>`_.

    >>> import numpy as np, gradcombine as gc
    >>> gc.add_n([np.float32([1, 2]), np.float32([3, 4])], method="tree")
    array([4., 6.], dtype=float32)
    """
    name = method
    if isinstance(method, int) and not isinstance(method, bool) and 0 <= method < len(_TF_AGGREGATION_METHODS):
        name = _TF_AGGREGATION_METHODS[method]
    if not isinstance(name, str) or name not in METHODS:
        raise invalid(f"a method of {list(METHODS)} or a tf.AggregationMethod value", shown(method))
    with renamed("add_n"):
        return _combine(reductions.sum(), values, order=METHODS[name])


@operation("tree_sum")
def tree_sum(values: Iterable[Tree]) -> Tree:
    """The sum in the canonical order: ``add_n(values, method="tree")``.

    >>> import numpy as np, gradcombine as gc
    >>> gc.tree_sum([np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])])
    array([ 9., 12.], dtype=float32)
    """
    with renamed("tree_sum"):
        return _combine(reductions.sum(), values, order="tree")


@operation("mean")
def mean(values: Iterable[Tree], weights: Iterable[Any] | Array | None = None) -> Tree:
    """The weighted mean of a list of trees: ``sum(w * g) / sum(w)``, divided once.

    Args and errors as for `combine`; bits as for `gradcombine.reductions.mean`.

    >>> import numpy as np, gradcombine as gc
    >>> gc.mean([np.float32([1, 2]), np.float32([4, 5])], weights=[3, 1])
    array([1.75, 2.75], dtype=float32)
    """
    with renamed("mean"):
        return _combine(reductions.mean(), values, weights)


def _list(what: str, values: Any) -> list[Any]:
    if type(values) in (list, tuple):
        return list(values)
    named = isinstance(values, tuple) and hasattr(values, "_fields")
    if named or isinstance(values, _NO_LISTS) or owner(values) is not None or not isinstance(values, Iterable):
        raise invalid(f"a list of {what}", type(values).__name__)
    return list(iter(values))  # whose length is not what the object claims


def _weights(weights: Any) -> list[Any]:
    backend = None if type(weights) in (list, tuple) else owner(weights)
    if backend is None or len(backend.shape(weights)) != 1:
        return _list("weights", weights)
    with renamed("combine"):
        array = backend.asarray(weights)
    return [array[i] for i in range(backend.shape(array)[0])]


def _common(trees: list[Tree]) -> Tree:
    """The first tree, with each of its None leaves taken from the first tree that has a gradient there."""
    # What a row-sparse leaf stands for is the reduction's to say: it may take dense ones beside it.
    leaves, structure = tree.flatten(trees[0], is_row_sparse)
    for value in trees[1:]:
        others = tree.flatten_as(structure, value, is_row_sparse)
        leaves = [other if leaf is None else leaf for leaf, other in zip(leaves, others, strict=True)]
    return tree.unflatten(structure, leaves)
