# pyright: standard
"""A training step whose optimizer's state is sharded over the replicas: ZeRO stage 1; with sharded parameters, FSDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.integrations.jax import Loss, TrainState, train_step
from gradcombine.types import Array, Tree


def split(values: Tree, mesh: Mesh, axis: str) -> Tree:
    """Shardings of arrays or specs, each sharded over ``axis`` as well, along its largest divisible dimension."""

    def one(x: Array) -> NamedSharding:
        sharding = getattr(x, "sharding", None)  # traced arrays have none
        spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
        entries = [*spec, *[None] * (x.ndim - len(spec))]
        free = [i for i, n in enumerate(x.shape) if entries[i] is None and n and n % mesh.shape[axis] == 0]
        if free:
            entries[max(free, key=lambda i: x.shape[i])] = axis
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(one, values)


def shardings(values: Tree) -> Tree:
    return jax.tree.map(lambda x: x.sharding, values)


def resharded(optimizer: optax.GradientTransformation, targets: Tree) -> optax.GradientTransformationExtraArgs:
    """Gives the updates of an optimizer with sharded state the shardings of the parameters."""
    inner = optax.with_extra_args_support(optimizer)

    def reshard(x: Array, sharding: NamedSharding) -> Array:
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: object) -> tuple[Tree, Tree]:
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(reshard, updates, targets), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def sharded_step(
    loss: Callable[..., Tree] | Loss,
    optimizer: optax.GradientTransformation,
    targets: Tree,
    mesh: Mesh,
    axis: str,
    **settings: Any,
) -> tuple[Callable[..., TrainState], Callable[..., Tree]]:
    """Returns ``init(params, *example)``, and ``compiled(state)``, which returns a step and its flush.

    Args:
      loss, optimizer, settings: as for `train_step`.
      targets: shardings of the parameters, as the compiled step gets and returns them.
      mesh, axis: the mesh, and its axis of the replicas.
    """
    step = train_step(loss, resharded(optimizer, targets), over=gc.jax_axis(axis), **settings)

    def init(params: Tree, *example: Tree) -> TrainState:
        state = step.init(params, *example)
        return state._replace(opt_state=jax.device_put(state.opt_state, split(state.opt_state, mesh, axis)))

    def compiled(state: TrainState) -> tuple[Callable[..., Tree], Callable[..., Tree]]:
        outputs = targets, shardings(state), None
        call = jax.jit(step.function, donate_argnums=(0, 1), out_shardings=outputs)
        return call, jax.jit(step.flush_function, donate_argnums=(0, 1), out_shardings=outputs)

    return init, compiled
