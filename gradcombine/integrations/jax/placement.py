"""Where a state lies beside its parameters."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine.types import Tree


def place_beside(params: Tree, state: Tree) -> Tree:
    """The state, what of it has no place yet on the devices of its parameters: the same on all of them.

    A compiled step puts all that it returns there. Counts that began elsewhere would let the second call compile the
    step once more.
    """
    shardings = {_whole(x.sharding) for x in jax.tree.leaves(params) if _is_known(x) and x.committed}
    (sharding,) = shardings if len(shardings) == 1 else (None,)
    if sharding is None:
        return state
    return jax.tree.map(lambda x: jax.device_put(x, sharding) if _is_known(x) and not x.committed else x, state)


def _is_known(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _whole(sharding: Sharding) -> Sharding | None:
    """Whole arrays on the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(*sharding.device_set) if isinstance(sharding, SingleDeviceSharding) else None
