# pyright: standard
"""Local training on islands of replicas, with occasional all-reduces of their parameter differences (DiLoCo)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import in_words
from gradcombine.errors import invalid, operation, require_equal, require_integer, require_type
from gradcombine.integrations.jax.arrays import apply_updates, optimized, require_transformation
from gradcombine.integrations.jax.jax_window import run_if
from gradcombine.integrations.jax.on_replicas import mark_varying, require_jax_collective
from gradcombine.places.fragments import divided, due
from gradcombine.places.window import require_condition
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.weights import parse
from gradcombine.settings import check
from gradcombine.types import Array, Leaf, Order, Scalar, Tree

if TYPE_CHECKING:
    import optax


class OuterState(NamedTuple):
    """State of `outer`; the parameters of an island are kept outside it.

    Attributes:
      params: the outer parameters as of the last exchange, the same on all islands.
      inner: the states of the outer transformation, one per fragment; the same on all islands.
      weight: float32 of shape (fragments,), the weight of this island's steps since each fragment's last exchange.
      step: int32 scalar, the number of steps so far, which determines the schedule; the same on all islands.
    """

    params: Tree
    inner: tuple[Tree, ...]
    weight: Array
    step: Array


class Outer(NamedTuple):
    """Pure functions of an `OuterState`; made and described by `outer`."""

    init: Callable[[Tree], OuterState]
    update: Callable[..., tuple[Tree, OuterState]]
    join: Callable[..., tuple[Tree, OuterState]]


@operation("outer")
def outer(
    transformation: optax.GradientTransformation,
    every: int,
    over: Collective,
    *,
    reduction: Reduction | None = None,
    fragments: int = 1,
    order: Order = "sequential",
) -> Outer:
    """Local steps with an outer optimizer (DiLoCo): H steps on each island, then one all-reduce of their progress.

    After ``every`` steps, an island has moved from the outer parameters x to x_i. The outer transformation gets the
    weighted mean of ``x - x_i`` over the islands as its gradient; all islands continue from the x that it updates.

    Args:
      transformation: the outer one, for instance ``optax.sgd(0.7, momentum=0.9, nesterov=True)``. It gets trees like
        the parameters, with None in place of the leaves of other fragments.
      every: H, the number of steps between two exchanges of a fragment.
      over: the islands: a `gradcombine.jax_axis`, one island per index. Parallelism inside an island (data or model
        parallelism) uses other axes.
      reduction: combines the differences. None: `gradcombine.reductions.mean`. With a ``wire`` they are sent in fewer
        bits.
      fragments: F, the number of parts of the parameters, of full leaves and about equal bytes, from 1 to H. Every
        H / F steps the next fragment is exchanged, so each exchange sends 1 / F of the bytes, and each fragment is
        exchanged every H steps.
      order: of the sum over the islands, as for `gradcombine.all_reduce`.

    Returns:
      ``init(params) -> state``; ``update(params, state, weight=1.0) -> params, state``, for after each step of an
      island; and ``join(params, state, begins) -> params, state``: for use inside shard_map, pmap or vmap over the
      islands. There, ``params`` and the state's ``weight`` differ between islands; everything else in the state is the
      same. The argument ``weight`` of an update is the weight of the step, for instance its number of tokens. An island
      of weight 0 since the last exchange, such as a lost one, changes nothing, whatever its parameters contain. An
      island that joins or returns starts from the outer parameters by ``join``, with weight 0, if its ``begins`` is
      true, a boolean scalar that may differ between islands.

    Raises:
      GradCombineError: for invalid settings, and for parameters that are not floats.

    Bits: those of `gradcombine.all_reduce` of the differences in float32; in order ``"tree"``, the same on a mesh and
    in a simulation of the islands on one device.

    References: Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
    <https://arxiv.org/abs/2311.08105>`_, 2023, and `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025.

    >>> import gradcombine as gc, jax, jax.numpy as jnp, optax
    >>> from gradcombine.integrations.jax import outer
    >>> islands = outer(optax.sgd(1.0), every=2, over=gc.jax_axis("island"))
    >>> def train(speed):
    ...     params = jnp.float32(8)
    ...     state = islands.init(params)
    ...     for _ in range(2):
    ...         params, state = islands.update(params - speed, state, weight=1)
    ...     return params
    >>> jax.vmap(train, axis_name="island")(jnp.float32([1, 3])).tolist()
    [4.0, 4.0]
    """
    reduction = gc.reductions.mean() if reduction is None else reduction
    check(reduction=reduction, over=over, order=order)
    require_jax_collective(over)
    outer_optimizer = require_transformation(transformation)
    every = require_integer("1 step or more", every)
    count = require_integer(f"from 1 to {every} fragments", fragments, highest=every)

    def init(params: Tree) -> OuterState:
        leaves, structure = tree.flatten(params)
        for path, leaf in zip(structure.paths(), leaves, strict=True):
            dtype = None if leaf is None else jnp.asarray(leaf).dtype
            if dtype is not None and not (jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1):
                raise invalid("parameters that are floats of 16 bits or more", dtype, path)
        inner = tuple(outer_optimizer.init(fragment(structure, leaves, p)) for p in divided(sizes(leaves), count))
        # Copied, as a training step may donate the parameters.
        anchor = jax.tree.map(jnp.copy, params)
        return OuterState(anchor, inner, jnp.zeros(count, jnp.float32), jnp.zeros((), jnp.int32))

    def exchange(kept: tuple[Tree, Tree, Tree], weight: Array) -> tuple[tuple[Tree, Tree, Tree], tuple[()]]:
        params, anchors, inner = kept
        moved = tree.map(lambda a, p: None if a is None else difference(a, p).astype(jnp.float32), anchors, params)
        gradient = gc.all_reduce(reduction, moved, over, weight, order)
        gradient = tree.map(lambda x, g: None if x is None else g.astype(x.dtype), anchors, gradient)
        updates, inner = optimized(outer_optimizer, gradient, inner, anchors)
        new = apply_updates(anchors, updates)
        return (new, new, inner), ()

    def update(params: Tree, state: OuterState, weight: Scalar = 1.0) -> tuple[Tree, OuterState]:
        leaves, structure, anchors = beside_anchors(params, state, count)
        step, inner = state.step + 1, list(state.inner)
        added = parse(BACKEND, weight).cast(BACKEND, dtypes.FLOAT32)
        (weights,) = over.mark_varying([state.weight + added])
        ends = due(step, every, count)
        for f, part in enumerate(divided(sizes(leaves), count)):
            own, outer_params = (fragment(structure, of, part) for of in (leaves, anchors))
            kept = mark_varying(over, own), outer_params, inner[f]
            (*new, inner[f]), _ = run_if(ends[f], partial(exchange, weight=weights[f]), kept)
            new_leaves, new_anchors = (tree.flatten_as(structure, of) for of in new)
            for i in part:
                leaves[i], anchors[i] = new_leaves[i], new_anchors[i]
        weights = jnp.where(ends, jnp.zeros_like(weights), weights)
        state = OuterState(tree.unflatten(structure, anchors), tuple(inner), weights, step)
        return tree.unflatten(structure, leaves), state

    def join(params: Tree, state: OuterState, begins: Scalar) -> tuple[Tree, OuterState]:
        leaves, structure, anchors = beside_anchors(params, state, count)
        begins = require_condition("begins", begins)
        chosen = [None if x is None else jnp.where(begins, a, x) for x, a in zip(leaves, anchors, strict=True)]
        weight = jnp.where(begins, jnp.zeros_like(state.weight), state.weight)
        return tree.unflatten(structure, chosen), state._replace(weight=weight)

    named = operation("outer")
    return Outer(named(init), named(update), named(join))


def beside_anchors(params: Tree, state: object, fragments: int) -> tuple[list[Leaf], tree.Structure, list[Leaf]]:
    """The leaves and the structure of an island's parameters, and the leaves of the outer ones, which must match."""
    state = require_type("an OuterState", state, OuterState)
    require_equal("a state of {} fragments", fragments, len(state.inner), ".inner")
    leaves, structure = tree.flatten(params)
    anchors = tree.flatten_as(structure, state.params)
    for path, x, anchor in zip(structure.paths(), leaves, anchors, strict=True):
        require_equal("{}, as in the outer parameters", in_words(anchor), in_words(x), path)
    return leaves, structure, anchors


def fragment(structure: tree.Structure, leaves: list[Leaf], part: list[int]) -> Tree:
    """The tree with None in place of the other fragments' leaves: optimizers and wires may select leaves by path."""
    kept = set(part)
    return tree.unflatten(structure, [x if i in kept else None for i, x in enumerate(leaves)])


def difference(a: Array, b: Array) -> Array:
    """``a - b``, in at least float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return a.astype(wide) - b.astype(wide)


def sizes(leaves: list[Leaf]) -> list[int | None]:
    """Bytes of each leaf; None for an absent leaf."""
    return [None if leaf is None else jnp.asarray(leaf).nbytes for leaf in leaves]
