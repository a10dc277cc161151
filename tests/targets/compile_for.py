"""Compiles functions for NVIDIA GPUs and TPU pods that are not here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine.verify.audit.program import Program
from gradcombine.verify.audit.target import H100, gpu, tpu

__all__ = ["Compiled", "compile_for", "grid", "h100", "mesh", "spread", "tpu"]


def h100(devices: int = 1, hosts: int = 1) -> tuple[Any, ...]:
    """H100s, so many in each host."""
    return gpu(H100, devices, hosts)


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
