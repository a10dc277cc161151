# pyright: standard
"""Lists: combines trees that are all available at once."""

from __future__ import annotations

from collections.abc import Iterable, Set

from gradcombine import reductions
from gradcombine.backends.registry import owner
from gradcombine.errors import invalid, operation, shown
from gradcombine.reductions.algebra import Reduction, derived
from gradcombine.settings import check
from gradcombine.types import Array, Order, Scalar, Tree

METHODS: dict[str, Order] = {"add_n": "sequential", "accumulate_n": "sequential", "tree": "tree"}
"""The order of each method of `add_n`."""

_TF_AGGREGATION_METHODS = ("add_n", "tree", "accumulate_n")
"""The methods by value of tf.AggregationMethod: ADD_N (and DEFAULT), EXPERIMENTAL_TREE, EXPERIMENTAL_ACCUMULATE_N."""

_SUM, _MEAN = reductions.sum(), reductions.mean()
_NOT_LISTS = (dict, str, bytes, bytearray, Set)


@operation("combine")
def combine(
    reduction: Reduction,
    values: Iterable[Tree],
    weights: Iterable[Scalar] | Array | None = None,
    order: Order = "sequential",
) -> Tree:
    """Combines a list of trees: ``finalize(update(... update(init, v_1, w_1) ..., v_n, w_n))``.

    Args:
      reduction: from `gradcombine.reductions`.
      values: one or more trees of the same structure, shapes and dtypes. None is "no gradient": a leaf that is None in
        all trees is None in the result; where it is None in some trees, the others are combined.
      weights: one scalar per tree, as a list or an array of shape (n,), finite and not negative; None: all 1. A tree of
        weight 0 changes nothing, even if it has NaNs.
      order: ``"sequential"``: left to right. ``"tree"``: the canonical binary tree over the indices, which rounds an
        element log2(n) times instead of n times, and gives the same bits if the list is split over time and replicas
        into blocks of a power of two.

    Returns:
      The combined tree.

    Raises:
      GradCombineError: for an empty list, trees that do not match, a wrong number of weights, an invalid weight, and
        arrays of two frameworks.

    Bits: as the reduction guarantees for the order.

    >>> import numpy as np, gradcombine as gc
    >>> gc.combine(gc.reductions.mean(), [{"w": np.float32([1, 2])}, {"w": np.float32([3, 4])}], weights=[1, 3])
    {'w': array([2.5, 3.5], dtype=float32)}
    """
    check(reduction=reduction, order=order)
    trees, scales = _as_lists(values, weights)

    def run(reduction: Reduction, trees: list[Tree], scales: list[Scalar]) -> Tree:
        return reduction.combine(trees, scales, order)

    return derived(reduction, run, trees, scales)


@operation("add_n", renames=True)
def add_n(values: Iterable[Tree], method: str | int = "add_n") -> Tree:
    """The sum of a list of trees.

    Args:
      values: as for `combine`.
      method: ``"add_n"`` or ``"accumulate_n"``: left to right; ``"tree"``: the canonical binary tree; or a value of
        tf.AggregationMethod. (TensorFlow itself implements EXPERIMENTAL_TREE and EXPERIMENTAL_ACCUMULATE_N as left to
        right additions, and ADD_N on CPU in blocks of eight terms.)

    Returns:
      The sum, in the dtype of the contributions.

    Raises:
      GradCombineError: for an unknown method, and as `combine`.

    Bits: as `gradcombine.reductions.sum`: those of the order, on every backend. A single tree is returned unchanged.

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
    return _SUM.combine(*_as_lists(values), METHODS[name])


@operation("tree_sum", renames=True)
def tree_sum(values: Iterable[Tree]) -> Tree:
    """The sum in the canonical order: ``add_n(values, method="tree")``.

    >>> import numpy as np, gradcombine as gc
    >>> gc.tree_sum([np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])])
    array([ 9., 12.], dtype=float32)
    """
    return _SUM.combine(*_as_lists(values), "tree")


@operation("mean", renames=True)
def mean(values: Iterable[Tree], weights: Iterable[Scalar] | Array | None = None) -> Tree:
    """The weighted mean of a list of trees: ``sum(w * g) / sum(w)``, divided once.

    Arguments and errors are those of `combine`; bits are those of `gradcombine.reductions.mean`.

    >>> import numpy as np, gradcombine as gc
    >>> gc.mean([np.float32([1, 2]), np.float32([4, 5])], weights=[3, 1])
    array([1.75, 2.75], dtype=float32)
    """
    return _MEAN.combine(*_as_lists(values, weights), "sequential")


def _as_lists(
    values: Iterable[Tree], weights: Iterable[Scalar] | Array | None = None
) -> tuple[list[Tree], list[Scalar]]:
    trees = _list("trees", values)
    if not trees:
        raise invalid("one tree or more", "an empty list")
    scales = [1] * len(trees) if weights is None else _weights(weights)
    if len(scales) != len(trees):
        raise invalid(f"{len(trees)} weights", len(scales))
    return trees, scales


def _list(what: str, values: Tree) -> list[Tree]:
    if type(values) in (list, tuple):
        return list(values)
    is_namedtuple = isinstance(values, tuple) and hasattr(values, "_fields")
    is_tree = is_namedtuple or isinstance(values, _NOT_LISTS) or owner(values) is not None
    if is_tree or not isinstance(values, Iterable):
        raise invalid(f"a list of {what}", type(values).__name__)
    return list(iter(values))  # not list(values), which would call the object's __len__


def _weights(weights: Iterable[Scalar] | Array) -> list[Scalar]:
    backend = None if type(weights) in (list, tuple) else owner(weights)
    if backend is None or len(backend.shape(weights)) != 1:
        return _list("weights", weights)
    array = backend.asarray(weights)
    return [array[i] for i in range(backend.shape(array)[0])]
