# pyright: standard
"""A training step whose accumulators and optimizer's state are sharded over the replicas: ZeRO stage 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, TrainState, train_step, zero
from gradcombine.reductions import Reduction
from gradcombine.types import AccumulateState, Array, Tree


def on_shards(optimizer: optax.GradientTransformation, axis: str) -> optax.GradientTransformationExtraArgs:
    """Runs an elementwise optimizer on each replica's shards of the gradients, and gathers the updates."""
    inner, over = optax.with_extra_args_support(optimizer), gc.jax_axis(axis)

    def init(params: Tree) -> Tree:
        return inner.init(zero.shard(params, over))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, zero.shard(params, over), **extra)
        return zero.gather(updates, params, over), state

    return optax.GradientTransformationExtraArgs(init, update)


def scattered_step(
    loss: Callable[..., Tree] | Loss,
    optimizer: optax.GradientTransformation,
    params: Tree,
    mesh: Mesh,
    axis: str,
    divided: Sequence[bool],
    reduction: Reduction | None = None,
    **settings: Any,
) -> tuple[Callable[..., Tree], ...]:
    """Returns ``init(params, *example)``, a compiled `train_step` on shards, and its flush.

    Outside of them, accumulators and metrics have a leading axis of replicas.

    Args:
      loss, optimizer, params, reduction, settings: as for `train_step`.
      mesh, axis: the mesh, and its axis of the replicas.
      divided: for each argument of the loss after the parameters, whether it is divided among the replicas.
    """
    reduction = zero.scattered(gc.reductions.mean() if reduction is None else reduction, gc.jax_axis(axis))
    step = train_step(loss, on_shards(optimizer, axis), reduction=reduction, **settings)
    key = Loss.of(loss).rng_argnum

    shards = jax.tree.map(lambda x: jax.ShapeDtypeStruct((-(-x.size // mesh.shape[axis]),), x.dtype), params)
    opt_state = jax.tree.map(lambda x: P(axis) if x.ndim else P(), jax.eval_shape(optimizer.init, shards))
    state = TrainState(AccumulateState(P(axis), P(), P()), opt_state, P())  # pyright: ignore[reportArgumentType]
    batch = [P(axis) if each else P() for each in divided]
    on_replicas = partial(jax.shard_map, mesh=mesh, axis_names={axis}, check_vma=False)

    def map_levels(function: Callable[[Array], Array], state: TrainState) -> TrainState:
        return state._replace(window=state.window._replace(levels=jax.tree.map(function, state.window.levels)))

    def init(params: Tree, *example: Tree) -> TrainState:
        return map_levels(lambda x: x[None], step.init(params, *example))

    def one(function: Callable[..., Tree], params: Tree, state: TrainState, *batch: Tree) -> tuple[Tree, Tree, Tree]:
        if batch and key is not None:  # each replica needs another random key
            own = jax.random.fold_in(batch[key - 1], jax.lax.axis_index(axis))
            batch = (*batch[: key - 1], own, *batch[key:])
        params, state, metrics = function(params, map_levels(lambda x: x[0], state), *batch)
        return params, map_levels(lambda x: x[None], state), jax.tree.map(lambda x: x[None], metrics)

    call, flush = (
        jax.jit(
            on_replicas(partial(one, function), in_specs=(P(), state, *rest), out_specs=(P(), state, P(axis))),
            donate_argnums=(0, 1),
        )
        for function, rest in ((step.function, batch), (step.flush_function, ()))
    )
    return jax.jit(on_replicas(init, in_specs=(P(), *batch), out_specs=state)), call, flush
