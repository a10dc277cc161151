"""Compiles functions for NVIDIA GPUs and TPU pods that this machine does not have."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from gradcombine.audit.program import FREE, Program
from gradcombine.audit.target import H100, gpu, tpu

__all__ = ["Compiled", "compile_for", "grid", "h100", "mesh", "spread", "tpu"]


def h100(devices: int = 1, hosts: int = 1) -> tuple[Any, ...]:
    """Topology of H100s: ``devices`` in each host."""
    return gpu(H100.read_text(), devices, hosts)


class Counted(Program):
    """A program with the counts that tests limit."""

    def bytes_moved(self, due: bool) -> int:
        """Bytes read and written by one call; an operation that reads a part of an array counts as reading all of it.

        Args:
          due: whether conditionals take their second branch, and loops of unknown length run once.
        """
        return self._moved(self.entry, due)

    def bytes_of_turn(self) -> int:
        """Bytes read and written by one iteration of each loop of the entry with more than one iteration."""
        entry = self.computations[self.entry].values()
        loops = (x for x in entry if self.repeats(self.entry, x))
        return sum(self._moved(body, True) for x in loops for body in x.called("body"))

    def copies(self, least: int = 1024) -> int:
        """Number of copies of arrays of at least ``least`` bytes."""
        return sum(x.opcode in ("copy", "copy-start") and x.bytes >= least for _, x, _ in self.executed())

    def collectives(self, least: int = 0) -> tuple[Counter[str], Counter[str]]:
        """Collectives inside loops of several iterations, and all others; of results of at least ``least`` bytes."""
        found: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        for _, x, loops in self.executed():
            if x.collective and x.bytes >= least:
                found[not loops][x.collective] += 1
        return found

    def conditionals(self) -> int:
        return sum(x.opcode == "conditional" for _, x, _ in self.executed())

    def _moved(self, name: str, due: bool) -> int:
        instructions = self.computations[name]
        total = 0
        for x in instructions.values():
            if x.opcode == "conditional":
                total += self._moved(self.bodies(x)[due], due)
            elif x.opcode == "while":
                trips = self.trips(name, x)
                total += (int(due) if trips is None else trips) * self._moved(x.called("body")[0], due)
            elif x.opcode == "call":
                total += sum(self._moved(body, due) for body in self.bodies(x))
            elif x.opcode not in FREE and not x.opcode.endswith("-done"):
                total += x.bytes + sum(instructions[operand].bytes for operand in x.operands)
        return total


class Compiled(NamedTuple):
    """A program compiled for another machine.

    Attributes:
      program: its HLO.
      temporary: bytes that it needs in addition to arguments and results.
    """

    program: Counted
    temporary: int


def compile_for(
    devices: Sequence[Any], function: Callable[..., Any], *args: Any, donate: Sequence[int] = (), **options: Any
) -> Compiled:
    """Compiles for one device, or for the mesh of the arguments' shardings.

    Args:
      devices: as returned by `h100` or `tpu`.
      function: function to compile.
      *args: trees of specs; ones without a sharding are placed on the first device.
      donate: indices of donated arguments.
      **options: compiler options.
    """

    def placed(x: Any) -> Any:
        sharding: Sharding = x.sharding or SingleDeviceSharding(devices[0])
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*jax.tree.map(placed, args))
    compiled = lowered.compile(compiler_options=options or None)
    return Compiled(Counted(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes)


def mesh(devices: Sequence[Any], name: str = "data", kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of all devices along one axis."""
    return Mesh(np.array(devices), (name,), axis_types=(kind,))


def grid(devices: Sequence[Any], axes: dict[str, int], kind: AxisType) -> Mesh:
    """A mesh of all devices along several axes."""
    return Mesh(np.array(devices).reshape(*axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def spread(over: Mesh, spec: PartitionSpec, values: Any) -> Any:
    """Specs of the values with this sharding."""
    sharding = NamedSharding(over, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), values)
