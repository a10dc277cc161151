# pyright: standard
"""The input of a plan: a loss, an optimizer, and specs of parameters and batch on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradcombine.audit import Target
from gradcombine.backends.numpy_backend import BACKEND as NUMPY
from gradcombine.errors import attribute, invalid, require_integer, shown, within
from gradcombine.integrations.jax.arrays import examples, require_transformation, require_tree
from gradcombine.integrations.jax.loss import Loss, batch_positions
from gradcombine.integrations.jax.objective import Objective
from gradcombine.types import Array, Tree


@dataclass(frozen=True)
class Problem:
    """A loss, an optimizer and specs of their arguments on a mesh.

    Attributes:
      loss, weight, optimizer: as for `train_step`.
      params: specs on the mesh, replicated over ``axis``.
      batch: specs of the loss's arguments after the parameters, for one window of all replicas.
      rows: for each of them, whether it is divided into microbatches.
      microbatches: number of microbatches per window.
      mesh: the device mesh.
      axis: mesh axis of the replicas.
      here: whether the mesh is of this machine; `train_step`'s compiler options apply then.
    """

    loss: Loss
    weight: Callable[..., Tree] | None
    optimizer: optax.GradientTransformation
    params: Tree
    batch: tuple[Tree, ...]
    rows: tuple[bool, ...]
    microbatches: int
    mesh: Mesh
    axis: str
    here: bool

    @property
    def replicas(self) -> int:
        return self.mesh.shape[self.axis]

    def part(self, parts: int) -> tuple[Tree, ...]:
        """Returns specs of one of ``parts`` equal parts of a window's batch."""

        def one(x: Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype, sharding=x.sharding)

        return tuple(jax.tree.map(one, x) if divided else x for x, divided in zip(self.batch, self.rows, strict=True))

    def with_shardings(self, state: Tree) -> Tree:
        """Gives each leaf of a state the sharding of the parameter whose path is contained in the leaf's path.

        The accumulators of a step, in ``state.window.levels``, have a leading axis of replicas.
        """
        params = dict(jax.tree_util.tree_leaves_with_path(self.params))

        def one(path: tuple[object, ...], x: Array) -> jax.ShapeDtypeStruct:
            leading = (self.axis,) if path[:2] == LEVELS else ()
            shape = x.shape[len(leading) :]
            inner = (params.get(path[i:j]) for i in range(len(path) + 1) for j in range(i, len(path) + 1))
            spec = next((p.sharding.spec for p in inner if p is not None and p.shape == shape), P())
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, P(*leading, *spec)))

        return jax.tree_util.tree_map_with_path(one, state)


LEVELS = jax.tree_util.GetAttrKey("window"), jax.tree_util.GetAttrKey("levels")
"""Beginning of the path of a step's accumulators."""


def problem_of(
    loss: Callable[..., Tree] | Loss,
    params: Tree,
    batch: Tree,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int,
    target: Target,
    mesh: Any = None,
    axis: str = "data",
    weight: Callable[..., Tree] | None = None,
) -> Problem:
    require_transformation(optimizer)
    k = require_integer("microbatches as an integer of 1 or more", microbatches)
    args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    require_tree(params, args)
    mesh = _mesh(target, mesh, axis, (params, args))
    loss = Objective.of(loss, weight).loss
    positions = batch_positions(loss, [params, *args])
    rows = tuple(i + 1 in positions for i in range(len(args)))

    def placed(path: Any, x: Array, divided: bool = False) -> jax.ShapeDtypeStruct:
        if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
            with within(jax.tree_util.keystr(path)):
                x = NUMPY.asarray(x)
        sharding = getattr(x, "sharding", None)
        entries = [_axes(entry) for entry in sharding.spec] if isinstance(sharding, NamedSharding) else []
        for name in set(chain(*entries)) - set(mesh.shape):
            raise invalid(f"shardings over {', '.join(mesh.shape)}, the mesh's axes", name, jax.tree_util.keystr(path))
        # The strategies decide what is sharded over the replicas.
        entries = [tuple(name for name in names if name != axis) for names in entries]
        if divided:
            entries = [(axis, *(entries[0] if entries else ())), *entries[1:]]
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*entries)))

    if not jax.tree.leaves(params):
        raise invalid("parameters: a tree with an array", shown(params))
    n = examples(tuple(x for x, divided in zip(args, rows, strict=True) if divided))
    parts = k * mesh.shape[axis]
    if n == 0 or n % parts:
        raise invalid(f"a multiple of {parts} examples, for {mesh.shape[axis]} replicas with {k} microbatches each", n)
    specs = [
        jax.tree_util.tree_map_with_path(partial(placed, divided=divided), x)
        for x, divided in zip(args, rows, strict=True)
    ]
    params = jax.tree_util.tree_map_with_path(placed, params)
    here = target.figures is None or target.here
    return Problem(loss, weight, optimizer, params, tuple(specs), rows, k, mesh, axis, here)


def _axes(entry: Any) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _mesh(target: Target, mesh: Any, axis: str, values: Tree) -> Any:
    """Returns a mesh of the target's devices for a mapping of axes to sizes, a mesh of any devices, or None."""
    if not isinstance(axis, str):
        raise invalid("the name of an axis", shown(axis))
    if mesh is None:
        shardings = (x.sharding for x in jax.tree.leaves(values) if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)))
        meshes = (x.mesh for x in shardings if isinstance(x, NamedSharding))
        mesh = next(meshes, {axis: len(target.devices)})
    if isinstance(mesh, Mapping):
        sizes = {str(name): require_integer(f"a size of mesh axis {name}", n) for name, n in mesh.items()}
        axis_types = (AxisType.Auto,) * len(sizes)
    elif attribute(mesh, "axis_types") is not None:
        sizes, axis_types = dict(mesh.shape), mesh.axis_types
    else:
        raise invalid("a mesh, or a mapping of its axes to their sizes", shown(mesh))
    count = math.prod(sizes.values())
    if count > len(target.devices):
        raise invalid(f"a mesh of at most {len(target.devices)} devices, as on {target.name}", f"a mesh of {count}")
    if axis not in sizes:
        raise invalid(f"an axis of the mesh, {', '.join(sizes)}", shown(axis))
    devices = np.array(target.devices[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=axis_types)


def plain(values: Tree) -> Tree:
    """Removes shardings from specs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values)


ELEMENTWISE = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "iota", "copy", "random_bits"}
"""Operations that change a shape without mixing elements."""


def across_elements(problem: Problem) -> str | None:
    """Returns the first operation of the optimizer that combines different elements; None if it is elementwise."""
    like = plain(problem.params)

    def update(grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        tx = optax.with_extra_args_support(problem.optimizer)
        return tx.update(grads, state, params, value=np.float32(0))

    traced = jax.make_jaxpr(update)(like, jax.eval_shape(problem.optimizer.init, like), like)
    return next(_mixing(traced.jaxpr), None)


def _mixing(jaxpr: Any) -> Iterator[str]:
    """Names of operations that combine elements: known ones, and those whose outputs are smaller than their inputs."""
    for equation in jaxpr.eqns:
        values = (getattr(x, "jaxpr", x) for x in jax.tree.leaves([*equation.params.values()]))
        inner = [x for x in values if hasattr(x, "eqns")]
        for x in inner:
            yield from _mixing(x)
        if inner or equation.primitive.name in ELEMENTWISE:
            continue
        inputs, outputs = (
            max((math.prod(x.aval.shape) for x in side if hasattr(x.aval, "shape")), default=1)
            for side in (equation.invars, equation.outvars)
        )
        if equation.primitive.name in ("dot_general", "sort", "conv_general_dilated") or inputs > outputs:
            yield equation.primitive.name
