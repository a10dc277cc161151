"""What optax.tree_map_params asks of a state: to be made for a stand-in that has the place of all parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gradcombine.reductions.treewise import TreewiseState
from gradcombine.types import BinaryCounter, State, Tree


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

    def place(node: Any) -> Any:
        if isinstance(node, BinaryCounter):
            # Levels have an axis more than the parameters: what is meant for these does not fit them.
            return node._replace(stacked=node.filled)
        return node._replace(value=params, dtypes=node.count) if isinstance(node, TreewiseState) else node

    def is_leaf(node: Any) -> bool:
        return isinstance(node, (BinaryCounter, TreewiseState))

    return jax.tree.map(place, init(jnp.zeros(())), is_leaf=is_leaf)
