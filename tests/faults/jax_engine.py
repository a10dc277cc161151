"""JAX processes with one device each, which exchange windows through Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import faults, ledger
from tests.faults.training import Scheme


@jax.jit
def gradient(params: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"] - y) ** 2))(params)


@jax.jit
def descend(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - jnp.float32(0.125) * g, params, grads)


class Processes:
    """A collective over processes, for arrays outside compiled code.

    Args:
      devices: one per process, in the order of the processes.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.ranks = [device.process_index for device in devices]
        self._mesh = Mesh(np.array(devices), ("process",))

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> np.int32:
        return np.int32(self.ranks.index(jax.process_index()))

    def all_gather(self, arrays: Sequence[Any]) -> list[Any]:
        arrays = [np.asarray(x) for x in arrays]
        own = np.frombuffer(b"".join(x.tobytes() for x in arrays), np.uint8)
        rows = jax.make_array_from_process_local_data(NamedSharding(self._mesh, P("process")), own[None])
        everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(self._mesh, P()))
        found = np.asarray(jax.block_until_ready(everywhere(rows)).addressable_data(0))
        ends = np.cumsum([x.nbytes for x in arrays])[:-1]
        parts = np.split(found, ends, axis=1)
        return [np.ascontiguousarray(y).view(x.dtype).reshape(-1, *x.shape) for x, y in zip(arrays, parts, strict=True)]

    def all_sum(self, arrays: Sequence[Any]) -> list[Any]:
        return [x.sum(0, dtype=x.dtype) for x in self.all_gather(arrays)]

    def all_max(self, arrays: Sequence[Any]) -> list[Any]:
        return [x.max(0) for x in self.all_gather(arrays)]

    def reduce_scatter_map(self, function: Callable[..., Any], summed: Sequence[Any], common: Sequence[Any]) -> Any:
        return function(self.all_sum(summed), common)

    def mark_varying(self, arrays: Sequence[Any]) -> list[Any]:
        return list(arrays)

    def require_unreduced(self, leaves: Iterable[tuple[str, Any]]) -> None:
        return None


class JaxEngine:
    """One of several processes, which all restart when one is lost."""

    gradient = staticmethod(gradient)
    descend = staticmethod(descend)

    def __init__(self) -> None:
        self._merges: dict[Any, Callable[..., Any]] = {}

    def join(self, addresses: Sequence[str], rank: int) -> None:
        jax.distributed.initialize(addresses[0], len(addresses), rank, initialization_timeout=30)

    def wait_for_all(self) -> None:
        multihost_utils.sync_global_devices("recovered")

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(function)

    def merge(self, scheme: Scheme, held: Sequence[Any], assignment: ledger.Assignment) -> Any:
        key = tuple(map(tuple, assignment))
        if key not in self._merges:
            self._merges[key] = _merge(scheme, key, jax.devices())
        return self._merges[key](held)

    def find(self, values: Any, window: Any, twins: Any) -> faults.Faults:
        return faults.find(Processes(jax.devices()), values, window=window, twins=twins)


def _merge(scheme: Scheme, assignment: Any, devices: Sequence[Any]) -> Callable[..., Any]:
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    own = NamedSharding(mesh, P("data"))

    def merge(stacked: Any) -> Any:
        held = jax.tree.map(lambda x: x[0], stacked)
        return ledger.merge_held(scheme.reduction, held, assignment, gc.jax_axis("data"), scheme.order)

    merged = jax.jit(jax.shard_map(merge, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False))

    def call(held: Sequence[Any]) -> Any:
        stacked = jax.tree.map(lambda x: jax.make_array_from_process_local_data(own, np.asarray(x)[None]), list(held))
        result = jax.block_until_ready(merged(stacked))
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), result)

    return call
