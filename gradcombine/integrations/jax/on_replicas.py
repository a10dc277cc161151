# pyright: standard
"""Runs a part of a program once on each replica of a mesh axis, whether or not something around it has bound it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine.backends.jax_collective import JaxAxis
from gradcombine.backends.jax_versions import varying
from gradcombine.backends.protocol import Collective
from gradcombine.errors import invalid
from gradcombine.places.window import Window
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, Array, Leaf, State, Tree

EXCHANGED_ALONE = 30 * 2**20
"""Bytes of a replica's array from which on XLA exchanges it by itself on GPUs, in place where nothing reads it again.

Smaller ones it copies into one array before, and they stay as they are.
"""


def on_replicas(
    over: Collective,
    function: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    whole: Tree,
    rows: Tree = (),
    own: Tree = (),
) -> tuple[Tree, Tree]:
    """``function(whole, rows, own) -> (whole, own)`` on each replica.

    Where the axes of ``over`` are bound by pmap, vmap or shard_map, and where ``over`` is not of JAX, that is a call.
    Where they are axes of the mesh that the arguments lie on, the function is mapped over them, by jax.shard_map over
    these axes alone: the compiler keeps the others.

    Args:
      over: the replicas.
      function: what it returns as ``whole`` is the same on all replicas.
      whole: what all replicas get alike; arrays that are split over the axes are gathered before.
      rows: arrays of which each replica gets a block of the first axis.
      own: arrays of each replica's own, stacked along a first axis, which the function does not see.

    Returns:
      What the function returns, ``own`` stacked again.
    """
    if not isinstance(over, JaxAxis) or over.is_bound():
        return function(whole, rows, own)
    mesh, names = require_mesh(over, (whole, rows, own)), over.names
    replicas = math.prod(mesh.shape[name] for name in names)
    for path, x in _arrays(rows):
        if x.shape[0] % replicas:
            expected = f"a number of examples that the {replicas} replicas of {over!r} can share"
            raise invalid(expected, x.shape[0], path)
    for path, x in _arrays(own):
        if x.shape[:1] != (replicas,):
            expected = f"what is each replica's own along a first axis of {replicas}, as an init on the mesh makes it"
            raise invalid(expected, f"shape {x.shape}", path)
    leaves, structure = jax.tree.flatten(whole)
    arrays = [x for x in leaves if hasattr(x, "shape")]

    def one(arrays: list[Leaf], rows: Tree, own: Tree) -> tuple[Tree, Tree]:
        back = iter(arrays)
        # What is no array, a flag in the keyword arguments for instance, is known here as it is outside.
        whole = jax.tree.unflatten(structure, [next(back) if hasattr(x, "shape") else x for x in leaves])
        result, owned = function(whole, rows, jax.tree.map(lambda x: x[0], own))
        return result, jax.tree.map(lambda x: x[None], owned)

    split = P(names)
    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P(), split, split),
        out_specs=(P(), split),
        axis_names=set(names),
        # What is each replica's own is known by its place here, not by its type.
        check_vma=False,
    )
    arrays, rows, own = (
        jax.tree.map(lambda x, at=at: _split(mesh, x, names, at), values)
        for values, at in ((arrays, False), (rows, True), (own, True))
    )
    return jax.jit(mapped)(arrays, rows, own)


def require_of_jax(over: Collective) -> None:
    """Raises for a collective that exchanges arrays of another framework."""
    if over.framework not in (None, "jax"):
        raise invalid("replicas of JAX: LOCAL or jax_axis(name)", over)


def require_mesh(over: JaxAxis, values: Tree) -> Mesh | AbstractMesh:
    """The mesh that `find_mesh` finds.

    Raises:
      GradCombineError: as `find_mesh`, and where there is none.
    """
    mesh = find_mesh(over, values)
    if mesh is None:
        expected = (
            "an axis that the surrounding pmap, vmap or shard_map binds, or one of the mesh that the arguments lie on "
            "(jax.device_put) or that is in scope (jax.set_mesh)"
        )
        raise invalid(expected, f"{over!r}, and no mesh")
    return mesh


def find_mesh(over: JaxAxis, values: Tree) -> Mesh | AbstractMesh | None:
    """The mesh that is in scope or that the values lie on, and has the axes; None for values on one device.

    Raises:
      GradCombineError: for several meshes, and for one that has not the axes.
    """
    meshes: dict[Any, tuple[Mesh | AbstractMesh, str]] = {}
    scope = jax.sharding.get_abstract_mesh()
    if not scope.empty:
        meshes[scope] = scope, "the mesh in scope"
    for path, x in _arrays(values):
        mesh = _mesh(x)
        if mesh is not None:
            # One with its devices, where there is one, stands for all that are equal to it.
            abstract = mesh.abstract_mesh
            meshes.setdefault(abstract, (mesh, path))
            if isinstance(mesh, Mesh):
                meshes[abstract] = mesh, meshes[abstract][1]
    if not meshes:
        return None
    (first, at), *others = meshes.values()
    if others:
        ((other, path), *_) = others
        raise invalid(f"arguments on {_described(first)}, as {at} is", _described(other), path)
    if not set(over.names) <= set(first.axis_names):
        raise invalid(f"axes of {_described(first)}, or ones that shard_map binds", repr(over))
    return first


def on_their_mesh(specs: Tree, values: Tree) -> Tree:
    """The specs of an abstract evaluation with the devices of the arrays that it was made of.

    Of arrays on explicit axes it gives shardings without devices, which nothing can be made like outside of
    ``jax.set_mesh``.
    """
    found = (_mesh(x) for _, x in _arrays(values))
    meshes = {mesh.abstract_mesh: mesh for mesh in found if isinstance(mesh, Mesh)}

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kind = x.sharding
        if not isinstance(kind, NamedSharding) or kind.mesh not in meshes:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(meshes[kind.mesh], kind.spec))

    return jax.tree.map(placed, specs)


def own_state(over: Collective, own: Tree, beside: Tree) -> Tree:
    """The initial state of each replica for `on_replicas`: typed as varying, or stacked along the mesh axis."""
    if not isinstance(over, JaxAxis) or over.is_bound():
        return mark_own(over, own)
    if find_mesh(over, beside) is None:  # made outside of the mapped function
        return own
    return on_replicas(over, lambda whole, *_: ((), whole[0]), (own, beside))[1]


def divided(over: Collective, reduction: Reduction, state: State, params: Tree) -> Tree:
    """The value of a state that the replicas have merged; where they are a mesh's, of which all see the whole.

    An optimizer whose state is split over the replicas needs a part of the sums alone, and XLA makes a reduce-scatter
    of an all-reduce of which only parts are read, all at one place.

    Args:
      over: as for `on_replicas`.
      reduction: the state's.
      state: outside of the mapped function.
      params: those whose gradients the value's part "grads" has: it is split as they are, where that is known.
    """
    if not isinstance(over, JaxAxis) or over.is_bound():
        return reduction.finalize(state)
    mesh = require_mesh(over, (state, params))

    def value(state: State) -> Tree:
        return reduction.finalize(jax.tree.map(partial(_once, mesh), state))

    combined = value(state)
    if not is_split(over, params) or jax.tree.structure(combined["grads"]) != jax.tree.structure(params):
        return combined
    like = jax.tree.map(lambda x: jax.typeof(x).sharding, params)
    return combined | {"grads": jax.sharding.auto_axes(lambda state: value(state)["grads"], out_sharding=like)(state)}


def is_split(over: JaxAxis, params: Tree) -> bool:
    """Whether parameters are split over the replicas, as far as their types say: those of explicit axes."""
    leaves = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return any(set(over.names) & set(_names(jax.typeof(x).sharding.spec)) for x in leaves)


@dataclass(frozen=True)
class ReplicatedWindow(Window):
    """A window whose exchange maps over the mesh, where nothing around it does.

    Attributes:
      params: whose gradients it holds, as for `divided`.
    """

    params: Tree = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_of_jax(self.over)

    def may_overwrite(self, array: Array) -> bool:
        if not isinstance(self.over, JaxAxis):
            return False
        if self.over.is_bound():
            return array.nbytes >= EXCHANGED_ALONE
        return array.nbytes >= EXCHANGED_ALONE * array.shape[0] and not is_split(self.over, self.params)

    def exchanged(self, state: AccumulateState, taken: Sequence[int] = ()) -> tuple[Tree, list[Array]]:
        if not isinstance(self.over, JaxAxis) or self.over.is_bound():
            return super().exchanged(state, taken)

        def on_each(position: Tree, rows: Tree, levels: Tree) -> tuple[State, list[Array]]:
            return self.merged(AccumulateState(levels, *position), taken)

        position = state.step, state.index
        merged, arrays = on_replicas(self.over, on_each, position, own=state.levels)
        return divided(self.over, self.reduction, merged, self.params), arrays


def mark_own(over: Collective, values: Tree) -> Tree:
    """The values, typed as this replica's own. Gradients with respect to such are its own too, and not summed yet."""
    arrays, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, over.mark_varying(arrays))


def align(values: Tree, specs: Tree) -> Tree:
    """The values, typed to differ over the axes of their specs as well, as a scan or a conditional asks for."""

    def one(value: Tree, spec: Tree) -> Tree:
        missing = tuple(varying(spec) - varying(value))
        return lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(one, values, specs)


def aligned(values: Tree, specs: Tree) -> bool:
    """Whether `align` would change nothing."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs), strict=True)
    return all(varying(spec) <= varying(value) for value, spec in pairs)


def _once(mesh: Mesh | AbstractMesh, x: Array) -> Array:
    """The array, which in the eyes of the compiler has one reader then; not on explicit axes, whose types say all."""
    scope = jax.sharding.get_abstract_mesh()
    mesh = mesh if scope.empty else scope
    if mesh.explicit_axes or not isinstance(x, Tracer):
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*[P.UNCONSTRAINED] * x.ndim)))


def _names(spec: P) -> Iterator[str]:
    for entry in spec:
        yield from entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _split(mesh: Mesh | AbstractMesh, x: Leaf, names: tuple[str, ...], first: bool) -> Array:
    """Reshards an array over axes along its first dimension, or not at all: only explicit axes need it."""
    if not any(name in mesh.explicit_axes for name in names):
        return x
    if _mesh(x) is None:  # of one device, or NumPy's
        return jax.sharding.reshard(jnp.asarray(x), NamedSharding(mesh, P(names) if first else P()))
    entries = [_without(entry, names) for entry in jax.typeof(x).sharding.spec]
    if first:
        kept = entries[0] if isinstance(entries[0], tuple) else () if entries[0] is None else (entries[0],)
        entries[0] = (*names, *kept)
    return jax.sharding.reshard(x, NamedSharding(mesh, P(*entries)))


def _without(entry: Any, names: tuple[str, ...]) -> Any:
    if isinstance(entry, tuple):
        return tuple(name for name in entry if name not in names) or None
    return None if entry in names else entry


def _arrays(values: Tree) -> Iterator[tuple[str, Array]]:
    for path, x in jax.tree_util.tree_leaves_with_path(values):
        if hasattr(x, "shape"):
            yield jax.tree_util.keystr(path), x


def _mesh(x: Leaf) -> Mesh | AbstractMesh | None:
    """Of one device or more, that an array or spec lies on."""
    if not isinstance(x, jax.Array) and not isinstance(x, jax.ShapeDtypeStruct):
        return None
    sharding = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None


def _described(mesh: Mesh | AbstractMesh) -> str:
    return f"a mesh of {', '.join(f'{name}={size}' for name, size in mesh.shape.items())}"
