"""Updates on their way into a window, and its result on its way to the inner transformation."""

from __future__ import annotations

from typing import Any

import jax
import optax

from gradcombine import tree
from gradcombine.backends.registry import is_absent
from gradcombine.types import AccumulateState, BinaryCounter, Tree
from gradcombine.window import Window, widened


def gradients_like(params: Tree) -> Tree:
    """What the gradients are shaped like: the parameters, of optax.lookahead the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def in_dtypes_of_window(window: Window, updates: Tree, state: AccumulateState) -> tuple[Tree, Tree]:
    """The updates in the dtypes that the window was made for, and specs of what the reduction gives to the updates.

    Specs are None where the window was made for such updates, and nothing has to be cast.

    Raises:
      GradCombineError: for updates of another structure, and for ones that are combined over the replicas already.
    """
    _require_unreduced(window, updates)
    begun = state.levels.stacked if isinstance(state.levels, BinaryCounter) else state.levels[0]
    made_for_such = jax.eval_shape(window.reduction.init, updates)
    if jax.tree.structure(made_for_such) == jax.tree.structure(begun) and _dtypes(made_for_such) == _dtypes(begun):
        return updates, None
    specs, structure = tree.flatten(window.operation, jax.eval_shape(window.accumulator.value, state))
    leaves = tree.flatten_as(window.operation, structure, updates)
    results = jax.eval_shape(window.reduction.finalize, made_for_such)
    outputs = tree.flatten_as(window.operation, structure, results)
    # Results of one dtype are of updates that the window takes as they are.
    targets = [
        spec if spec is not None and output is not None and output.dtype != spec.dtype else None
        for spec, output in zip(specs, outputs, strict=True)
    ]
    return tree.unflatten(structure, map(widened, leaves, targets)), results


def _require_unreduced(window: Window, updates: Tree) -> None:
    leaves, structure = tree.flatten(window.operation, updates)
    pairs = [(path, x) for path, x in zip(structure.paths(), leaves, strict=True) if not is_absent(x)]
    window.over.require_unreduced(window.operation, [path for path, _ in pairs], [leaf for _, leaf in pairs])


def _dtypes(state: Tree) -> list[Any]:
    return [leaf.dtype for leaf in jax.tree.leaves(state)]


def cast_as(values: Tree, specs: Tree) -> Tree:
    """The values in the dtypes of a tree of arrays or specs; what is None there keeps its own."""
    if specs is None:
        return values
    leaves, structure = tree.flatten("accumulate", values)
    pairs = zip(leaves, tree.flatten_as("accumulate", structure, specs), strict=True)
    cast = (x if x is None or spec is None else x.astype(spec.dtype) for x, spec in pairs)
    return tree.unflatten(structure, cast)


def keep_dtypes(new: Tree, old: Tree) -> Tree:
    """A state in the dtypes that it had: some transformations promote theirs, which no conditional or scan allows."""

    def keep(x: Any, like: Any) -> Any:
        expected, received = getattr(like, "dtype", None), getattr(x, "dtype", None)
        return x if expected is None or received is None or expected == received else x.astype(expected)

    return jax.tree.map(keep, new, old)
