# pyright: standard
"""Runs a function on each replica of an axis that pmap, vmap or shard_map binds, or of a mesh axis under plain jit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import Array, Leaf, State, Tree


def unbound(over: Collective) -> JaxAxis | None:
    """The axis if no surrounding pmap, vmap or shard_map binds it; None for a bound axis and other collectives."""
    return over if isinstance(over, JaxAxis) and not over.is_bound() else None


def on_replicas(
    over: Collective,
    function: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    shared: Tree,
    batch: Tree = (),
    local: Tree = (),
) -> tuple[Tree, Tree]:
    """Runs ``function(shared, batch, local) -> (shared, local)`` on each replica.

    If pmap, vmap or shard_map binds the axes of ``over``, or ``over`` is not a JAX axis, this is a plain call. If they
    are axes of the arguments' mesh, the function is mapped over them by jax.shard_map, and the compiler handles all
    other axes.

    Args:
      function: has to return the same ``shared`` on all replicas.
      shared: passed to all replicas; arrays that are sharded over the axes are gathered.
      batch: arrays of which each replica gets a block along the first axis.
      local: arrays that differ between replicas, stacked along a leading axis, which the function does not see.

    Returns:
      The results of the function, with ``local`` stacked.
    """
    if (axis := unbound(over)) is None:
        return function(shared, batch, local)
    mesh, names = require_mesh(axis, (shared, batch, local)), axis.names
    replicas = math.prod(mesh.shape[name] for name in names)
    for path, shape in _shapes(batch):
        if not shape or shape[0] % replicas:
            expected = f"a number of examples that is divisible by the {replicas} replicas of {over!r}"
            raise invalid(expected, shape[0] if shape else "a scalar", path)
    for path, shape in _shapes(local):
        if shape[:1] != (replicas,):
            expected = f"a leading axis of {replicas} replicas, as in a state made by init on the mesh"
            raise invalid(expected, f"shape {shape}", path)
    leaves, structure = jax.tree.flatten(shared)
    arrays = [x for x in leaves if hasattr(x, "shape")]

    def on_one(arrays: list[Leaf], batch: Tree, local: Tree) -> tuple[Tree, Tree]:
        remaining = iter(arrays)
        # Leaves that are not arrays, such as flags in keyword arguments, stay static.
        shared = jax.tree.unflatten(structure, [next(remaining) if hasattr(x, "shape") else x for x in leaves])
        shared, local = function(shared, batch, jax.tree.map(lambda x: x[0], local))
        return shared, jax.tree.map(lambda x: x[None], local)

    sharded = P(names)
    mapped = jax.shard_map(
        on_one,
        mesh=mesh,
        in_specs=(P(), sharded, sharded),
        out_specs=(P(), sharded),
        axis_names=set(names),
        # The arguments themselves say which values vary over replicas; their types need not.
        check_vma=False,
    )
    arrays, batch, local = (
        jax.tree.map(lambda x, shards=shards: _reshard(mesh, x, names, shards), values)
        for values, shards in ((arrays, False), (batch, True), (local, True))
    )
    return jax.jit(mapped)(arrays, batch, local)


def require_jax_collective(over: Collective) -> None:
    """Raises for a collective of another framework."""
    if over.framework not in (None, "jax"):
        raise invalid("replicas of JAX: LOCAL or jax_axis(name)", over)


def require_mesh(over: JaxAxis, values: Tree) -> Mesh | AbstractMesh:
    """Like `find_mesh`, but raises if there is no mesh."""
    mesh = find_mesh(over, values)
    if mesh is None:
        expected = (
            "an axis that the surrounding pmap, vmap or shard_map binds, or one of the mesh of the arguments "
            "(jax.device_put) or in scope (jax.set_mesh)"
        )
        raise invalid(expected, f"{over!r}, and no mesh")
    return mesh


def find_mesh(over: JaxAxis, values: Tree) -> Mesh | AbstractMesh | None:
    """The mesh in scope or that of the values; None if there is none, as for values on one device.

    Raises:
      GradCombineError: for several meshes, and for a mesh without the axes of ``over``.
    """
    scope = jax.sharding.get_abstract_mesh()
    found: list[tuple[Mesh | AbstractMesh, str]] = [] if scope.empty else [(scope, "the mesh in scope")]
    found += [(mesh, path) for path, x in _arrays(values) if (mesh := _mesh(x)) is not None]
    if not found:
        return None
    first, first_path = found[0]
    for other, path in found:
        if other.abstract_mesh != first.abstract_mesh:
            raise invalid(f"arguments on {_described(first)}, as {first_path} is", _described(other), path)
    if not set(over.names) <= set(first.axis_names):
        raise invalid(f"axes of {_described(first)}, or ones that shard_map binds", repr(over))
    return next((mesh for mesh, _ in found if isinstance(mesh, Mesh)), first)


def with_mesh_of(specs: Tree, values: Tree) -> Tree:
    """Puts the devices of the inputs ``values`` into the output specs of an abstract evaluation.

    For arrays on explicit axes, jax.eval_shape returns shardings on an abstract mesh, and no array can be made from
    these outside ``jax.set_mesh``.
    """
    candidates = (_mesh(x) for _, x in _arrays(values))
    meshes = {mesh.abstract_mesh: mesh for mesh in candidates if isinstance(mesh, Mesh)}

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        old = x.sharding
        if not isinstance(old, NamedSharding) or old.mesh not in meshes:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(meshes[old.mesh], old.spec))

    return jax.tree.map(placed, specs)


def local_state(over: Collective, initial: Tree, params: Tree) -> Tree:
    """The initial ``local`` of `on_replicas`: marked as varying, or stacked along the mesh axis of the parameters."""
    if (axis := unbound(over)) is None:
        return mark_varying(over, initial)
    if find_mesh(axis, params) is None:  # init outside the mapped function
        return initial
    return on_replicas(over, lambda shared, *_: ((), shared[0]), (initial, params))[1]


def finalized(over: Collective, reduction: Reduction, state: State, params: Tree) -> Tree:
    """Finalizes a merged state, so that on a mesh XLA can turn the all-reduce into a reduce-scatter.

    An optimizer with a sharded state reads only a shard of the sums on each device. XLA reduce-scatters instead of
    all-reducing if the result has a single reader, which reads only a shard.

    Args:
      state: merged over the replicas, outside the mapped function.
      params: the parameters; "grads" of the result is sharded like them, if their shardings are known.
    """
    if (axis := unbound(over)) is None:
        return reduction.finalize(state)
    mesh = require_mesh(axis, (state, params))

    def value(state: State) -> Tree:
        return reduction.finalize(jax.tree.map(partial(_with_single_reader, mesh), state))

    combined = value(state)
    if not is_sharded(axis, params) or jax.tree.structure(combined["grads"]) != jax.tree.structure(params):
        return combined
    like = jax.tree.map(lambda x: jax.typeof(x).sharding, params)
    return combined | {"grads": jax.sharding.auto_axes(lambda state: value(state)["grads"], out_sharding=like)(state)}


def is_sharded(over: JaxAxis, params: Tree) -> bool:
    """Whether the types of the parameters show that they are sharded over the replicas (explicit axes only)."""
    specs = [jax.typeof(x).sharding.spec for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return any(set(over.names) & set(axes_of(entry)) for spec in specs for entry in spec)


def mark_varying(over: Collective, values: Tree) -> Tree:
    """Marks the leaves as varying over replicas; gradients with respect to them are then not summed over replicas."""
    arrays, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, over.mark_varying(arrays))


def _with_single_reader(mesh: Mesh | AbstractMesh, x: Array) -> Array:
    """Adds a sharding constraint, so that the compiler sees a single reader; not for explicit axes, typed already."""
    scope = jax.sharding.get_abstract_mesh()
    mesh = mesh if scope.empty else scope
    if mesh.explicit_axes or not isinstance(x, Tracer):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*[P.UNCONSTRAINED] * x.ndim)))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _reshard(mesh: Mesh | AbstractMesh, x: Leaf, names: tuple[str, ...], shards: bool) -> Array:
    """Shards an array over explicit axes along its first dimension, or gathers it; leaves automatic axes to XLA."""
    if not any(name in mesh.explicit_axes for name in names):
        return x
    if _mesh(x) is None:  # on one device, or a NumPy array
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, P(names) if shards else P()))
    entries = [tuple(name for name in axes_of(entry) if name not in names) for entry in jax.typeof(x).sharding.spec]
    if shards:
        entries[0] = (*names, *entries[0])
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*entries)))


def _arrays(values: Tree) -> Iterator[tuple[str, Array]]:
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if hasattr(x, "shape"):
            yield jax.tree_util.keystr(path), x


def _shapes(values: Tree) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The path and the shape of each leaf; () for one that is not an array."""
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        yield jax.tree_util.keystr(path), getattr(x, "shape", ())


def _mesh(x: Leaf) -> Mesh | AbstractMesh | None:
    """Mesh of an array or spec; None without one."""
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _described(mesh: Mesh | AbstractMesh) -> str:
    return f"a mesh of {', '.join(f'{name}={size}' for name, size in mesh.shape.items())}"
