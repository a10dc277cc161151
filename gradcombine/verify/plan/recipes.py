"""Functions that a step needs beside the library's calls: a plan runs them, and prints them as code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine.backends.protocol import Collective
from gradcombine.integrations.jax import TrainState, zero
from gradcombine.types import AccumulateState


def split(values: Any, mesh: Mesh, axis: str) -> Any:
    """Shardings that split each array over one more axis, along the largest dimension that it divides."""

    def one(x: Any) -> NamedSharding:
        own = x.sharding.spec if isinstance(x.sharding, NamedSharding) else P()
        entries = [*own, *[None] * (x.ndim - len(own))]
        free = [i for i, n in enumerate(x.shape) if entries[i] is None and n and n % mesh.shape[axis] == 0]
        if free:
            entries[max(free, key=lambda i: x.shape[i])] = axis
        return NamedSharding(mesh, P(*entries))

    return jax.tree.map(one, values)


def shardings(values: Any) -> Any:
    """The shardings of arrays, for the results that replace them."""
    return jax.tree.map(lambda x: x.sharding, values)


def gathered(optimizer: optax.GradientTransformation, where: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state is split, and whose updates lie as the parameters do."""
    inner = optax.with_extra_args_support(optimizer)

    def lies(x: Any, sharding: NamedSharding) -> Any:
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        return (jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lies, updates, where), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def on_shards(optimizer: optax.GradientTransformation, over: Collective) -> optax.GradientTransformationExtraArgs:
    """An elementwise optimizer of shards, which gathers its updates."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return inner.init(zero.shard(params, over))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, state = inner.update(updates, state, zero.shard(params, over), **extra)
        return zero.gather(updates, params, over), state

    return optax.GradientTransformationExtraArgs(init, update)


def specs_of_shards(optimizer: optax.GradientTransformation, params: Any, mesh: Mesh, axis: str) -> TrainState:
    """How the state of a step is split whose optimizer is `on_shards`."""
    sizes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((-(-x.size // mesh.shape[axis]),), x.dtype), params)
    inner = jax.tree.map(lambda x: P(axis) if x.ndim else P(), jax.eval_shape(optimizer.init, sizes))
    window: Any = AccumulateState(P(axis), P(), P())  # pyright: ignore[reportArgumentType]
    return TrainState(window, inner, P())


def on_each(function: Callable[..., Any], mesh: Mesh, axis: str, specs: TrainState, rows: tuple[P, ...]) -> Any:
    """A step's function on each replica; what of a window is its own has a first axis outside, and so have metrics."""

    def change(state: Any, levels: Callable[[Any], Any]) -> Any:
        return state._replace(window=state.window._replace(levels=jax.tree.map(levels, state.window.levels)))

    def one(params: Any, state: Any, *batch: Any) -> Any:
        params, state, told = function(params, change(state, lambda x: x[0]), *batch)
        return params, change(state, lambda x: x[None]), jax.tree.map(lambda x: x[None], told)

    returned = (P(), specs, P(axis))
    return jax.shard_map(
        one, mesh=mesh, in_specs=(P(), specs, *rows), out_specs=returned, axis_names={axis}, check_vma=False
    )


def begun(init: Callable[..., Any], mesh: Mesh, axis: str, specs: TrainState) -> Any:
    """A step's init(params) in the same way."""

    def one(params: Any) -> Any:
        state = init(params)
        levels = jax.tree.map(lambda x: x[None], state.window.levels)
        return state._replace(window=state.window._replace(levels=levels))

    return jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=specs, axis_names={axis}, check_vma=False)


def own_key(function: Callable[..., Any], at: int, axis: str) -> Callable[..., Any]:
    """A function whose random key, an argument, is made each replica's own."""

    def called(*args: Any, **kwargs: Any) -> Any:
        own = jax.random.fold_in(args[at], jax.lax.axis_index(axis))
        return function(*args[:at], own, *args[at + 1 :], **kwargs)

    return called
