# pyright: standard
"""Gradient trees as optax has them: what a window is made for, and the dtypes that its mean returns in."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import tree
from gradcombine.backends.registry import dtype_of, is_absent
from gradcombine.errors import translate_errors
from gradcombine.places.window import Window, widened
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.treewise import TreewiseState
from gradcombine.types import AccumulateState, BinaryCounter, State, Tree


def gradients_like(params: Tree) -> Tree:
    """A tree of the gradients' shapes: the parameters, of optax.lookahead the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _shapes(function: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Abstractly evaluates ``function``; raises for PRNG keys and unregistered leaf types."""
    with translate_errors("a tree of arrays of numbers"):
        return jax.eval_shape(function, value)


def in_dtypes_of_window(window: Window, updates: Tree, state: AccumulateState) -> tuple[Tree, Tree]:
    """The updates in the dtypes that the window was made for, and specs of what the reduction gives to the updates.

    Specs are None where the window was made for such updates, and nothing has to be cast.

    Raises:
      GradCombineError: for updates of another structure, and for ones that are combined over the replicas already.
    """
    _require_unreduced(window, numerators(updates))
    begun = state.levels.stacked if isinstance(state.levels, BinaryCounter) else state.levels[0]
    made_for_such = _shapes(window.reduction.init, updates)
    if jax.tree.structure(made_for_such) == jax.tree.structure(begun) and _dtypes(made_for_such) == _dtypes(begun):
        return updates, None
    specs, structure = tree.flatten(_shapes(window.accumulator.value, state))
    results = jax.eval_shape(window.reduction.finalize, made_for_such)
    outputs = tree.flatten_as(structure, results)
    # Results of one dtype are of updates that the window takes as they are.
    targets = [
        spec if spec is not None and output is not None and output.dtype != spec.dtype else None
        for spec, output in zip(specs, outputs, strict=True)
    ]

    def wide(gradients: Tree) -> Tree:
        leaves = tree.flatten_as(structure, gradients)
        return tree.unflatten(structure, map(widened, leaves, targets))

    if not isinstance(updates, dict) or not any(isinstance(x, Ratio) for x in updates.values()):
        return wide(updates), results
    return {name: x._replace(numerator=wide(x.numerator)) for name, x in updates.items()}, results


def numerators(updates: Tree) -> Tree:
    """The gradients, without what they are over where they are several."""

    def is_ratio(node: Tree) -> bool:
        return isinstance(node, Ratio)

    return jax.tree.map(lambda x: x.numerator if is_ratio(x) else x, updates, is_leaf=is_ratio)


def _require_unreduced(window: Window, updates: Tree) -> None:
    leaves, structure = tree.flatten(updates)
    pairs = [(path, x) for path, x in zip(structure.paths(), leaves, strict=True) if not is_absent(x)]
    window.over.require_unreduced([path for path, _ in pairs], [leaf for _, leaf in pairs])


def _dtypes(state: Tree) -> list[np.dtype]:
    return [dtype_of(leaf) for leaf in jax.tree.leaves(state)]


def cast_as(values: Tree, specs: Tree) -> Tree:
    """The values in the dtypes of a tree of arrays or specs; where that is None, they keep theirs."""
    if specs is None:
        return values
    leaves, structure = tree.flatten(values)
    pairs = zip(leaves, tree.flatten_as(structure, specs), strict=True)
    cast = (x if x is None or spec is None else x.astype(spec.dtype) for x, spec in pairs)
    return tree.unflatten(structure, cast)


def stands_in(params: Tree) -> bool:
    """Whether this is the registered node without children that ``optax.tree_map_params`` makes a state for."""
    if params is None or isinstance(params, (tuple, list, dict)):
        return False
    return not jax.tree.leaves(params, is_leaf=lambda node: node is not params)


def init_for(init: Callable[[Tree], State], params: Tree) -> State:
    """``init(params)``, or for a stand-in a state that has it where the accumulators are.

    ``optax.tree_map_params`` takes every place where the stand-in comes back for a tree of parameters, and every array
    for something else. The constants that remember the dtypes are the latter: one array stands for them.
    """
    if not stands_in(params):
        return init(params)

    def place(node: Tree) -> Tree:
        if isinstance(node, BinaryCounter):
            # Levels have an axis more than the parameters: what is meant for these does not fit them.
            return node._replace(stacked=node.filled)
        return node._replace(value=params, dtypes=node.count) if isinstance(node, TreewiseState) else node

    def is_leaf(node: Tree) -> bool:
        return isinstance(node, (BinaryCounter, TreewiseState))

    return jax.tree.map(place, init(jnp.zeros(())), is_leaf=is_leaf)
