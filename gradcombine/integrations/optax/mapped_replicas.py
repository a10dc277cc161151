# pyright: standard
"""The replicas around optax transformations: their updates combined, and functions run on each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import jax
import optax

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import (
    invalid,
    operation,
    require_function,
    require_integer,
    require_items,
)
from gradcombine.integrations.jax.on_replicas import on_replicas, require_of_jax
from gradcombine.integrations.optax.skip import SkipState
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Order, Scalar, Tree


@operation("all_reduce")
def all_reduce(
    reduction: Reduction | None = None, *, over: Collective, order: Order = "sequential"
) -> optax.GradientTransformationExtraArgs:
    """Combines the updates of all replicas, at every step.

    Args:
      reduction: from `gradcombine.reductions`; None: their mean.
      over, order: as for `gradcombine.all_reduce`.

    Returns:
      A transformation without state. Its ``update`` takes ``weight=``, this replica's, as an extra argument.

    Raises:
      GradCombineError: as `gradcombine.all_reduce`.

    Bits: those of `gradcombine.all_reduce`.

    References: `optax.GradientTransformationExtraArgs
    <https://optax.readthedocs.io/en/latest/api/transformations.html>`_.

    >>> import gradcombine as gc, jax, jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import all_reduce
    >>> tx = optax.chain(all_reduce(over=gc.jax_axis("data")), optax.sgd(1.0))
    >>> def step(grads, examples):
    ...     return tx.update(grads, tx.init(grads), weight=examples)[0]
    >>> jax.vmap(step, axis_name="data")(jnp.float32([1, 5]), jnp.float32([3, 1])).tolist()
    [-2.0, -2.0]
    """
    reduction = gc.reductions.mean() if reduction is None else reduction
    check(reduction=reduction, order=order, over=over)
    require_of_jax(over)

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: Tree = None, *, weight: Scalar = 1.0, **extra_args: Tree
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        return gc.all_reduce(reduction, updates, over=over, weight=weight, order=order), state

    return optax.GradientTransformationExtraArgs(init, update)


@operation("map_replicas")
def map_replicas(
    function: Callable[..., Tree], over: Collective, *, batch_argnums: int | Sequence[int] = ()
) -> Callable[..., Tree]:
    """Runs a training step around `accumulate` on each replica, under jit on a mesh.

    Gradients that jax.grad returns under jit are summed over the devices already, in each microbatch. Those of a mapped
    function are each replica's own, and `accumulate` exchanges them once a window.

    Args:
      function: of arrays. What it returns is the same on all replicas, except what `accumulate` keeps of a window.
      over: the same as in `accumulate`: `gradcombine.jax_axis`, of axes of the mesh that the arguments lie on, or that
        is in scope (jax.set_mesh).
      batch_argnums: the positional arguments of which each replica gets a block along the first axis. All others are
        the same on all replicas, and gathered where they were split over the axes.

    Returns:
      A function of the same arguments, by jax.shard_map over these axes alone, without check_vma. In its states
      ``window.levels``, and of a skip function ``detail``, have a first axis of replicas; so the state is made by
      ``map_replicas(tx.init, over)(params)``. Where pmap, vmap or shard_map binds the axes: the function itself.

    Raises:
      GradCombineError: for axes that are neither bound nor of the mesh, arguments on several meshes, a batch that the
        replicas cannot share, and a state without the axis of replicas.

    >>> import gradcombine as gc, jax, jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import accumulate, map_replicas
    >>> over = gc.jax_axis("data")
    >>> tx = accumulate(optax.sgd(1.0), every=1, over=over)
    >>> def step(w, state, x):
    ...     grad = jax.grad(lambda w: jnp.mean(w * x))(w)
    ...     updates, state = tx.update(grad, state, w)
    ...     return optax.apply_updates(w, updates), state
    >>> with jax.set_mesh(jax.make_mesh((1,), ("data",))):
    ...     w = jnp.float32(1)
    ...     state = map_replicas(tx.init, over)(w)
    ...     w, state = jax.jit(map_replicas(step, over, batch_argnums=2))(w, state, jnp.float32([1, 2, 3, 6]))
    >>> float(w)
    -2.0
    """
    check(over=over)
    require_of_jax(over)
    require_function("a function", function)
    expected = "batch_argnums that are numbers of positional arguments"
    given = [batch_argnums] if isinstance(batch_argnums, int) else require_items(expected, batch_argnums)
    batch = [require_integer(expected, i, lowest=0) for i in given]

    @operation("map_replicas")
    @wraps(function)
    def mapped(*args: Tree, **kwargs: Tree) -> Tree:
        if max(batch, default=-1) >= len(args):
            raise invalid(f"positional arguments at {batch}", len(args))

        def one(whole: Tree, rows: list[Tree], parts: list[Tree]) -> tuple[Tree, list[Tree]]:
            called, named = _joined(whole, parts)
            for i, x in zip(batch, rows, strict=True):
                called[i] = x
            return _parted(function(*called, **named))

        whole, parts = _parted(([None if i in batch else x for i, x in enumerate(args)], kwargs))
        return _joined(*on_replicas(over, one, whole, [args[i] for i in batch], parts))

    return mapped


def _parted(values: Tree) -> tuple[Tree, list[Tree]]:
    """Splits values into the part that is equal on all replicas, and the parts of states that differ."""
    nodes, structure = jax.tree.flatten(values, is_leaf=_differs)
    parts = [getattr(node, _field(node)) if _differs(node) else None for node in nodes]
    common = [node._replace(**{_field(node): None}) if _differs(node) else node for node in nodes]
    return jax.tree.unflatten(structure, common), parts


def _joined(whole: Tree, parts: list[Tree]) -> Tree:
    nodes, structure = jax.tree.flatten(whole, is_leaf=_differs)
    pairs = zip(nodes, parts, strict=True)
    joined = [node._replace(**{_field(node): part}) if _differs(node) else node for node, part in pairs]
    return jax.tree.unflatten(structure, joined)


def _differs(node: Tree) -> bool:
    return isinstance(node, (AccumulateState, SkipState))


def _field(node: AccumulateState | SkipState) -> str:
    return "levels" if isinstance(node, AccumulateState) else "detail"
