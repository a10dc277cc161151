# pyright: standard
"""Parameter trees that only optax has: those of lookahead, and the stand-in of ``optax.tree_map_params``."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gradcombine.reductions.treewise import TreewiseState
from gradcombine.types import BinaryCounter, State, Tree


def gradients_like(params: Tree) -> Tree:
    """A tree with the structure and shapes of the gradients: the parameters, for optax.lookahead the fast ones."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def init_for(init: Callable[[Tree], State], params: Tree) -> State:
    """Returns ``init(params)``; for the stand-in of ``optax.tree_map_params``, a state with it as the accumulators.

    ``optax.tree_map_params`` treats every occurrence of the stand-in in the state as a tree of parameters, and every
    array as something else. The static dtypes of a state are represented by one such array.
    """
    # The stand-in is a pytree node of a class of optax' own, without children.
    is_container = params is None or isinstance(params, (tuple, list, dict))
    if is_container or jax.tree.leaves(params, is_leaf=lambda node: node is not params):
        return init(params)

    def insert_stand_in(node: Tree) -> Tree:
        if isinstance(node, BinaryCounter):
            # Stacked levels have one more axis than the parameters, and so must not be mapped with them.
            return node._replace(stacked=node.filled)
        return node._replace(value=params, dtypes=node.count) if isinstance(node, TreewiseState) else node

    def is_leaf(node: Tree) -> bool:
        return isinstance(node, (BinaryCounter, TreewiseState))

    return jax.tree.map(insert_stand_in, init(jnp.zeros(())), is_leaf=is_leaf)
