"""Compiles functions for NVIDIA GPUs and TPU pods that are not here."""

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
    """H100s, so many in each host."""
    return gpu(H100.read_text(), devices, hosts)


class Counted(Program):
    """A program, and numbers of it that have a limit."""

    def bytes_moved(self, due: bool) -> int:
        """Read and written by one call; an operation that reads a part of an array counts as reading all of it.

        Args:
          due: whether conditionals take their second branch, and loops of an unknown number of turns turn once.
        """
        return self._moved(self.entry, due)

    def bytes_of_turn(self) -> int:
        """Read and written by one turn of each loop of the entry that turns more than once."""
        entry = self.computations[self.entry].values()
        loops = (x for x in entry if self.repeats(self.entry, x))
        return sum(self._moved(body, True) for x in loops for body in x.called("body"))

    def copies(self, least: int = 1024) -> int:
        """Copies of arrays from so many bytes on."""
        return sum(x.opcode in ("copy", "copy-start") and x.bytes >= least for _, x, _ in self.executed())

    def collectives(self, least: int = 0) -> tuple[Counter[str], Counter[str]]:
        """Those inside of loops that turn more than once, and all others; of results from so many bytes on."""
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
    """A program for another machine.

    Attributes:
      program: its HLO.
      temporary: bytes that it needs beside arguments and results.
    """

    program: Counted
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
    return Compiled(Counted(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes)


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
