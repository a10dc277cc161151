# pyright: standard
"""Conversions between optax's gradient trees and windows: structures, dtypes, and stand-ins for parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine import tree
from gradcombine.backends.registry import dtype_of
from gradcombine.errors import translate_errors
from gradcombine.places.window import Window, widened
from gradcombine.reductions.ratios import Ratio
from gradcombine.reductions.treewise import TreewiseState
from gradcombine.types import AccumulateState, BinaryCounter, State, Tree


def gradients_like(params: Tree) -> Tree:
    """A tree with the structure and shapes of the gradients: the parameters, for optax.lookahead the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def _eval_shape(function: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Abstractly evaluates ``function``; raises for PRNG keys and unregistered leaf types."""
    with translate_errors("a tree of arrays of numbers"):
        return jax.eval_shape(function, value)


def in_dtypes_of_window(window: Window, updates: Tree, state: AccumulateState) -> tuple[Tree, Tree]:
    """Casts updates to the dtypes of the window; also returns specs of the reduction's results for the original dtypes.

    The specs are None if the window was made for updates of these dtypes, and nothing has to be cast.

    Raises:
      GradCombineError: for updates of another structure, and for updates that are already combined over the replicas.
    """
    window.over.require_unreduced(tree.present(_numerators(updates)))
    held = state.levels.stacked if isinstance(state.levels, BinaryCounter) else state.levels[0]
    for_updates = _eval_shape(window.reduction.init, updates)
    if jax.tree.structure(for_updates) == jax.tree.structure(held) and _dtypes(for_updates) == _dtypes(held):
        return updates, None
    window_results, structure = tree.flatten(_eval_shape(window.accumulator.value, state))
    results = jax.eval_shape(window.reduction.finalize, for_updates)
    outputs = tree.flatten_as(structure, results)
    # The window accepts an update unchanged if its result has the dtype of the window's result.
    targets = [
        spec if spec is not None and output is not None and output.dtype != spec.dtype else None
        for spec, output in zip(window_results, outputs, strict=True)
    ]

    def widen(gradients: Tree) -> Tree:
        leaves = tree.flatten_as(structure, gradients)
        return tree.unflatten(structure, map(widened, leaves, targets))

    if not isinstance(updates, dict) or not any(isinstance(x, Ratio) for x in updates.values()):
        return widen(updates), results
    return {name: x._replace(numerator=widen(x.numerator)) for name, x in updates.items()}, results


def _numerators(updates: Tree) -> Tree:
    """Replaces `Ratio`s by their numerators, the gradients."""

    def is_ratio(node: Tree) -> bool:
        return isinstance(node, Ratio)

    return jax.tree.map(lambda x: x.numerator if is_ratio(x) else x, updates, is_leaf=is_ratio)


def _dtypes(state: Tree) -> list[np.dtype]:
    return [dtype_of(leaf) for leaf in jax.tree.leaves(state)]


def cast_as(values: Tree, specs: Tree) -> Tree:
    """Casts values to the dtypes of a tree of arrays or specs; None, for a leaf or for the tree, keeps the dtype."""
    if specs is None:
        return values
    return tree.map(lambda x, spec: x if x is None or spec is None else x.astype(spec.dtype), values, specs)


def is_stand_in(params: Tree) -> bool:
    """Whether ``params`` is the childless pytree node that ``optax.tree_map_params`` passes to ``init``."""
    if params is None or isinstance(params, (tuple, list, dict)):
        return False
    return not jax.tree.leaves(params, is_leaf=lambda node: node is not params)


def init_for(init: Callable[[Tree], State], params: Tree) -> State:
    """Returns ``init(params)``; for the stand-in of ``optax.tree_map_params``, a state with it as the accumulators.

    ``optax.tree_map_params`` treats every occurrence of the stand-in in the state as a tree of parameters, and every
    array as something else. The static dtypes of a state are represented by one such array.
    """
    if not is_stand_in(params):
        return init(params)

    def insert_stand_in(node: Tree) -> Tree:
        if isinstance(node, BinaryCounter):
            # Stacked levels have one more axis than the parameters, and so must not be mapped with them.
            return node._replace(stacked=node.filled)
        return node._replace(value=params, dtypes=node.count) if isinstance(node, TreewiseState) else node

    def is_leaf(node: Tree) -> bool:
        return isinstance(node, (BinaryCounter, TreewiseState))

    return jax.tree.map(insert_stand_in, init(jnp.zeros(())), is_leaf=is_leaf)
