"""Replicas: combines contributions and partial states of devices and machines."""

from __future__ import annotations

from collections.abc import Sequence

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, load_collective, resolve
from gradcombine.errors import invalid, operation, require_distinct, shown, translate_errors, within
from gradcombine.places.time import replace_window, whole_window
from gradcombine.reductions.algebra import Reduction, derived
from gradcombine.settings import check
from gradcombine.sparse import is_row_sparse
from gradcombine.types import AccumulateState, Order, Scalar, State, Tree

LOCAL = Collective()
"""The collective of a single replica."""


@operation("jax_axis")
def jax_axis(names: str | Sequence[str]) -> Collective:
    """The collective of the replicas along one or several named axes of jax.pmap, jax.vmap or jax.shard_map.

    Args:
      names: an axis name, or several; the last one varies fastest in the ranks.

    >>> import gradcombine as gc
    >>> gc.jax_axis(("replica", "data"))
    jax_axis('replica', 'data')
    """
    expected = "an axis name, or several different ones"
    if not isinstance(names, (str, tuple, list)) or not names:
        raise invalid(expected, shown(names))
    if not isinstance(names, str):
        with translate_errors(expected, TypeError, received=shown(names)):  # a name that is not hashable
            require_distinct(expected, names)
    return load_collective("jax")(names)


@operation("tf_replicas")
def tf_replicas() -> Collective:
    """The collective of the replicas of the current tf.distribute strategy; of one replica if there is no strategy.

    >>> import gradcombine as gc
    >>> gc.tf_replicas()
    tf_replicas()
    """
    return load_collective("tensorflow")()


@operation("all_reduce")
def all_reduce(
    reduction: Reduction, value: Tree, over: Collective, weight: Scalar = 1.0, order: Order = "sequential"
) -> Tree:
    """All-reduces one contribution per replica: every replica gets the combined tree.

    Args:
      reduction: from `gradcombine.reductions`.
      value: the tree of this replica.
      over: the collective: `LOCAL`, `jax_axis` or `tf_replicas`.
      weight: the weight of this replica's contribution. A mean reduces numerators and weights together and divides
        once.
      order: ``"sequential"``: the all-reduce of the framework. ``"tree"``: the canonical binary tree over the ranks.

    Returns:
      The combined tree, the same on every replica.

    Raises:
      GradCombineError: as `combine`; for an unbound axis; outside of a replica context; and for a value that is already
        the same on all replicas by shard_map's types (check_vma), such as the gradient of a replicated parameter, which
        would be counted once per replica.

    Bits: order ``"tree"``: those of `combine` over the contributions by rank. Order ``"sequential"``: sums are rounded
    in an order that the framework chooses.

    >>> import numpy as np, gradcombine as gc
    >>> gc.all_reduce(gc.reductions.mean(), np.float32([1, 2]), over=gc.LOCAL)
    array([1., 2.], dtype=float32)
    """
    check(reduction=reduction, order=order, over=over)
    leaves, structure = tree.flatten(value)
    # The value may have NumPy leaves; collectives take arrays of the framework, as the rank is.
    backend = resolve([*leaves, over.rank()])
    present = [(i, path) for i, path in enumerate(structure.paths()) if not is_absent(leaves[i])]
    for i, path in present:
        with within(path):
            leaves[i] = leaves[i] if is_row_sparse(leaves[i]) else backend.asarray(leaves[i])
    over.require_unreduced((path, leaves[i]) for i, path in present)
    value = tree.unflatten(structure, leaves)

    def run(reduction: Reduction, value: Tree, weight: Scalar) -> Tree:
        state = reduction.update(reduction.init(value), value, weight)
        return reduction.all_finalize(state, over, order, weight)

    return derived(reduction, run, value, weight)


@operation("merge_replicas")
def merge_replicas(reduction: Reduction, state: State, over: Collective, order: Order = "sequential") -> State:
    """Merges one partial state per replica: every replica gets the merged state.

    Args:
      reduction: the reduction of the state.
      state: a state of the reduction, or of `accumulate`. The latter keeps its step and index, and its window, partial
        or full, is merged. All replicas must have the same step and index.
      over, order: as for `all_reduce`.

    Returns:
      The merged state, of the same type.

    Raises:
      GradCombineError: as `all_reduce`, and for a state of another reduction.

    Bits: in order ``"tree"``, if the windows were accumulated in order ``"tree"`` and all replicas have the same number
    of contributions, a power of two: those of `combine` in order ``"tree"`` over all contributions, replica 0 first.

    >>> import numpy as np, gradcombine as gc
    >>> acc = gc.accumulate(gc.reductions.mean(), every=2)
    >>> state = acc.update(np.float32([1, 2]), acc.init(np.zeros(2, np.float32)))
    >>> acc.value(gc.merge_replicas(gc.reductions.mean(), state, over=gc.LOCAL))
    array([1., 2.], dtype=float32)
    """
    check(reduction=reduction, order=order, over=over)
    if isinstance(state, AccumulateState):
        return replace_window(reduction, state, reduction.all_merge(whole_window(reduction, state), over, order))
    return reduction.all_merge(state, over, order)
