"""Where arrays lie: a state beside its parameters, and the arguments of a step beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine.errors import GradCombineError
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


@contextmanager
def usable(*values: Tree) -> Iterator[None]:
    """Says what is wrong with arguments that a compiled step has refused: buffers taken over before, other devices."""
    try:
        yield
    except GradCombineError:
        raise
    except (RuntimeError, ValueError) as error:
        leaves = [(path, x) for path, x in jax.tree_util.tree_leaves_with_path(values) if _is_known(x)]
        for path, x in leaves:
            if x.is_deleted():
                expected = "what the last call returned: it has taken over the parameters and the state that it got"
                raise GradCombineError("train_step", expected, "a donated buffer", _named(path)) from error
        committed = [(path, x.devices()) for path, x in leaves if x.committed]
        for path, devices in committed:
            if devices != (first := committed[0][1]):
                expected = f"arguments on the same devices, {_ids(first)} as in {_named(committed[0][0])}"
                raise GradCombineError("train_step", expected, _ids(devices), _named(path)) from error
        raise


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path[1:])


def _ids(devices: Iterable[Any]) -> str:
    return f"devices {sorted(device.id for device in devices)}"


def _is_known(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, Tracer)


def _whole(sharding: Sharding) -> Sharding | None:
    """Whole arrays on the same devices."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return SingleDeviceSharding(*sharding.device_set) if isinstance(sharding, SingleDeviceSharding) else None
