"""Updates on their way into a window, and its result on its way to the inner transformation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import tree
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import load
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.reductions.weights import parse
from gradcombine.types import Tree


def gradients_like(params: Tree) -> Tree:
    """What the gradients are shaped like: the parameters, of optax.lookahead the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def widen(reduction: Reduction, updates: Tree, made_for: Tree, over: Collective) -> tuple[Tree, Tree]:
    """The updates in the dtypes that the window was made for, and specs of what the reduction gives to the updates."""
    specs, structure = tree.flatten("accumulate", made_for)
    leaves = tree.flatten_as("accumulate", structure, updates)
    own = [x for x in zip(structure.paths(), leaves, specs, strict=True) if x[1] is not None and x[2] is not None]
    over.require_unreduced("accumulate", [path for path, _, _ in own], [leaf for _, leaf, _ in own])
    given = jax.eval_shape(lambda: reduction.finalize(reduction.init(updates)))
    outputs = tree.flatten_as("accumulate", structure, given)

    def widened(leaf: Any, output: Any, spec: Any) -> Any:
        if leaf is None or spec is None or output.dtype == spec.dtype:
            return leaf
        wider = dtypes.kind(leaf.dtype) == dtypes.kind(spec.dtype) and np.can_cast(leaf.dtype, spec.dtype)
        return leaf.astype(spec.dtype) if wider else leaf

    return tree.unflatten(structure, map(widened, leaves, outputs, specs)), given


def cast_as(values: Tree, given: Tree) -> Tree:
    """The values in the dtypes of a tree of arrays or specs; a leaf that is None there keeps its own."""
    leaves, structure = tree.flatten("accumulate", values)
    specs = tree.flatten_as("accumulate", structure, given)
    pairs = zip(leaves, specs, strict=True)
    cast = (x if x is None or spec is None else x.astype(spec.dtype) for x, spec in pairs)
    return tree.unflatten(structure, cast)


def keep_dtypes(new: Tree, old: Tree) -> Tree:
    """A state in the dtypes that it had: some transformations promote theirs, which no conditional or scan allows."""

    def keep(x: Any, like: Any) -> Any:
        expected, received = getattr(like, "dtype", None), getattr(x, "dtype", None)
        return x if expected is None or received is None or expected == received else x.astype(expected)

    return jax.tree.map(keep, new, old)


def weight_unless(operation: str, left_out: Any, weight: Any) -> Any:
    """0 where a microbatch is left out, else its weight; a whole number stays one, for leaves of integers."""
    if isinstance(left_out, bool):
        return 0 if left_out else weight
    backend = load("jax")
    parsed = parse(operation, backend, weight)
    if parsed.known is None:
        array = jnp.asarray(parsed.array)
    elif parsed.is_integral and parsed.known < 2**31:
        array = jnp.asarray(int(parsed.known), jnp.int32)
    else:
        array = parsed.cast(backend, np.dtype(jnp.result_type(float)))
    return jnp.where(left_out, jnp.zeros_like(array), array)
