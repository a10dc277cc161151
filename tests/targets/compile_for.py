"""XLA's compilers for machines that are not here: NVIDIA GPUs and TPU pods."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from tests.targets.hlo import Program

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 2 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""The facts of an H100 SXM, as a GpuTargetConfigProto."""


@cache
def h100(devices: int = 1, hosts: int = 1) -> tuple[Any, ...]:
    """H100s, so many in each host."""
    shape = f"1x{hosts}x{devices}"
    found = topologies.get_topology_desc(platform="cuda", topology_name="h100", target_config=H100, topology=shape)
    return tuple(found.devices)


@cache
def tpu(name: str) -> tuple[Any, ...]:
    """The chips of a slice, for instance ``"v5e:4x4"``."""
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)


class Compiled(NamedTuple):
    """A program for another machine.

    Attributes:
      program: its HLO.
      temporary: bytes that it needs beside arguments and results.
    """

    program: Program
    temporary: int


def compile_for(
    devices: Sequence[Any], function: Callable[..., Any], *args: Any, donate: Sequence[int] = (), **options: Any
) -> Compiled:
    """Compiles for one device, or for the mesh that the arguments' shardings name.

    Args:
      devices: of `h100` or `tpu`.
      function: to compile.
      *args: trees of specs; those without a sharding are put on the first device.
      donate: the arguments that are donated.
      **options: of the compiler.
    """

    def placed(x: Any) -> Any:
        sharding: Sharding = x.sharding or SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*jax.tree.map(placed, args))
    compiled = lowered.compile(compiler_options=options or None)
    return Compiled(Program(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes)


def mesh(devices: Sequence[Any], name: str = "data", kind: AxisType = AxisType.Auto) -> Mesh:
    """All devices along one axis."""
    return Mesh(np.array(devices), (name,), axis_types=(kind,))


def grid(devices: Sequence[Any], axes: dict[str, int], kind: AxisType) -> Mesh:
    """All devices along several axes."""
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def spread(over: Mesh, spec: PartitionSpec, values: Any) -> Any:
    """Specs with this sharding."""
    sharding = NamedSharding(over, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values)
