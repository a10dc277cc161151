"""The mesh axes over which shard_map's type system (check_vma) says that a value may differ."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from gradcombine.backends.jax_backend import varying
from gradcombine.backends.protocol import Collective
from gradcombine.types import Tree


def own(over: Collective, values: Tree) -> Tree:
    """The values, typed as this replica's own. Gradients with respect to such are its own too, and not summed yet."""
    arrays, structure = jax.tree.flatten(values)
    return jax.tree.unflatten(structure, over.mark_varying(arrays))


def align(values: Tree, specs: Tree) -> Tree:
    """The values, typed to differ over the axes of their specs as well, as a scan or a conditional asks for."""

    def one(value: Any, spec: Any) -> Any:
        missing = tuple(varying(spec) - varying(value))
        return lax.pcast(value, missing, to="varying") if missing else value

    return jax.tree.map(one, values, specs)


def aligned(values: Tree, specs: Tree) -> bool:
    """Whether `align` would change nothing."""
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(specs), strict=True)
    return all(varying(spec) <= varying(value) for value, spec in pairs)
