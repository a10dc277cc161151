# pyright: standard
"""Replicas for optax: a transformation that combines their updates, and functions mapped over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps

import jax
import optax

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid, operation, require_function, require_integer, require_items
from gradcombine.integrations.jax.on_replicas import on_replicas, require_jax_collective
from gradcombine.integrations.optax.skip import SkipState
from gradcombine.reductions.algebra import Reduction
from gradcombine.settings import check
from gradcombine.types import AccumulateState, Order, Scalar, Tree


@operation("all_reduce")
def all_reduce(
    reduction: Reduction | None = None, *, over: Collective, order: Order = "sequential"
) -> optax.GradientTransformationExtraArgs:
    """Combines the updates of all replicas at every step.

    Args:
      reduction: combines the updates, from `gradcombine.reductions`; None: their mean.
      over, order: as for `gradcombine.all_reduce`.

    Returns:
      A stateless transformation. Its ``update`` takes the extra argument ``weight``, the weight of this replica.

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
    require_jax_collective(over)

    def update(
        updates: optax.Updates, state: optax.OptState, params: Tree = None, *, weight: Scalar = 1.0, **extra_args: Tree
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        return gc.all_reduce(reduction, updates, over=over, weight=weight, order=order), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


@operation("map_replicas")
def map_replicas(
    function: Callable[..., Tree], over: Collective, *, batch_argnums: int | Sequence[int] = ()
) -> Callable[..., Tree]:
    """Maps a training step that uses `accumulate` over replicas, under jit on a mesh.

    Under jit, gradients from jax.grad are already summed over devices, in each microbatch. In a mapped function, each
    replica has its gradients, and `accumulate` all-reduces them once per window.

    Args:
      function: a function of arrays. It has to return the same results on all replicas, except the window in the state
        of `accumulate`.
      over: as passed to `accumulate`: a `gradcombine.jax_axis` of axes of the arguments' mesh, or of the mesh in scope
        (jax.set_mesh).
      batch_argnums: positions of the arguments of which each replica gets a block along the first axis. All other
        arguments are the same on all replicas, and gathered if they are sharded over the axes.

    Returns:
      A function of the same arguments, mapped by jax.shard_map over these axes alone, without check_vma. In its states,
      ``window.levels`` and the ``detail`` of a skip function have a leading axis of replicas; so create the state by
      ``map_replicas(tx.init, over)(params)``, within jit only under ``jax.set_mesh``. If pmap, vmap or shard_map binds
      the axes, ``function`` is called as is.

    Raises:
      GradCombineError: for axes that are neither bound nor mesh axes, arguments on several meshes, a batch that is not
        divisible by the number of replicas, and a state without the axis of replicas.

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
    require_jax_collective(over)
    require_function("a function", function)
    expected = "batch_argnums that are positions of arguments"
    positions = [batch_argnums] if isinstance(batch_argnums, int) else require_items(expected, batch_argnums)
    positions = [require_integer(expected, i, lowest=0) for i in positions]

    @operation("map_replicas")
    @wraps(function)
    def mapped(*args: Tree, **kwargs: Tree) -> Tree:
        if max(positions, default=-1) >= len(args):
            raise invalid(f"positional arguments at {positions}", len(args))

        def on_one(shared: Tree, batch: list[Tree], local: list[Tree]) -> tuple[Tree, list[Tree]]:
            args, kwargs = _join_states(shared, local)
            for i, x in zip(positions, batch, strict=True):
                args[i] = x
            return _split_states(function(*args, **kwargs))

        shared, local = _split_states(([None if i in positions else x for i, x in enumerate(args)], kwargs))
        return _join_states(*on_replicas(over, on_one, shared, [args[i] for i in positions], local))

    return mapped


LOCAL_FIELDS = {AccumulateState: "levels", SkipState: "detail"}
"""The field of a state that differs between replicas, by the state's type."""


def _split_states(values: Tree) -> tuple[Tree, list[Tree]]:
    """Separates the fields of states that differ between replicas from values that are the same on all."""
    nodes = jax.tree.leaves(values, is_leaf=_is_state)
    local = [getattr(node, LOCAL_FIELDS[type(node)]) if _is_state(node) else None for node in nodes]
    return _join_states(values, [None] * len(local)), local


def _join_states(shared: Tree, local: list[Tree]) -> Tree:
    """Inverse of `_split_states`."""
    nodes, structure = jax.tree.flatten(shared, is_leaf=_is_state)
    pairs = zip(nodes, local, strict=True)
    joined = [node._replace(**{LOCAL_FIELDS[type(node)]: x}) if _is_state(node) else node for node, x in pairs]
    return jax.tree.unflatten(structure, joined)


def _is_state(node: Tree) -> bool:
    return type(node) in LOCAL_FIELDS
