"""Programs compiled for other machines, and the numbers that the tests and the table read from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.audit.program import FREE, Program
from gradcombine.integrations.jax import LossOutput, train_step, value_and_grad
from tests.targets.compile_for import Compiled, compile_for, grid, h100, spread, tpu

K = 8
"""Number of microbatches."""
OVER = gc.jax_axis("data")
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
"""Uses cuBLAS, whose matrix products add to the accumulator in place."""
MIB = 2**20


def loss(params: Any, x: Any) -> Any:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def masked(params: Any, x: Any, mask: Any) -> Any:
    """The mean over the rows that the mask keeps, and their number."""
    for w in params:
        x = jnp.tanh(x @ w)
    kept = jnp.sum(mask)
    rows = jnp.mean(x.astype(jnp.float32) ** 2, axis=1)
    return jnp.sum(rows * mask) / kept, kept


def weighing(params: Any, x: Any, mask: Any) -> Any:
    return LossOutput(*masked(params, x, mask))


def by_hand(weighted: bool) -> Callable[..., Any]:
    """A hand-written scan: gradients of weighted losses, float32 accumulators, one division at the end."""

    def total(params: Any, *x: Any) -> Any:
        if not weighted:
            return loss(params, *x), jnp.float32(1)
        value, kept = masked(params, *x)
        return value * kept, kept

    def gradient(params: Any, *batch: Any) -> Any:
        def body(sums: Any, x: Any) -> Any:
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), sums, differentiated(params, *x)), None

        differentiated = jax.value_and_grad(total, has_aux=True)
        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params)
        stacked = tuple(x.reshape(K, -1, *x.shape[1:]) for x in batch)
        ((value, weight), grads), _ = jax.lax.scan(body, ((jnp.float32(0), jnp.float32(0)), zeros), stacked)
        return value / weight, jax.tree.map(lambda g, w: (g / weight).astype(w.dtype), grads, params)

    return gradient


def ours(weighted: bool) -> Callable[..., Any]:
    return value_and_grad(weighing if weighted else loss, K)


ROWS, WIDTH, LAYERS = 512, 2048, 4
"""Rows and width of a microbatch on one device, and number of layers."""


def scan(function: Callable[..., Any], dtype: Any, weighted: bool) -> Compiled:
    """Compiles a gradient in microbatches for one H100."""
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)] * LAYERS
    batch = [jax.ShapeDtypeStruct((K * ROWS, WIDTH), dtype), jax.ShapeDtypeStruct((K * ROWS,), jnp.float32)]
    return compile_for(h100(), function, params, *batch[: 1 + weighted], **CUBLAS)


class Machine(NamedTuple):
    """Devices and their layout along the axes of a mesh."""

    devices: Callable[[], Sequence[Any]]
    data: int
    model: int = 1
    options: dict[str, Any] = {}  # noqa: RUF012

    def mesh(self, kind: AxisType) -> Mesh:
        return grid(self.devices(), {"data": self.data, "model": self.model}, kind)


MACHINES = {
    "8 H100": Machine(lambda: h100(8), 8, options=CUBLAS),
    "8 H100, data 4 x model 2": Machine(lambda: h100(8), 4, 2, CUBLAS),
    "64 hosts of 8 H100": Machine(lambda: h100(8, 64), 512, options=CUBLAS),
    "TPU v5e:4x4": Machine(lambda: tpu("v5e:4x4"), 16),
    "TPU v5p:8x8x8": Machine(lambda: tpu("v5p:8x8x8"), 512),
}
MESH_WIDTH, MESH_ROWS = 1024, 64
"""Width of a layer, and rows of a microbatch on one device."""


class Placed(NamedTuple):
    """How a batch and parameters are sharded over a mesh.

    Attributes:
      kind: type of the mesh's axes.
      params: sharding of the parameters and the optimizer state; over "model" on a mesh that has it.
      over: replicas passed to the library.
    """

    kind: AxisType = AxisType.Auto
    params: P = P()
    over: Any = OVER


def on_mesh(machine: Machine, placed: Placed, **settings: Any) -> Compiled:
    """Compiles a training step under plain jit with a batch that is sharded over "data"."""
    mesh = machine.mesh(placed.kind)
    params = [jax.ShapeDtypeStruct((MESH_WIDTH, MESH_WIDTH), jnp.float32)] * 3
    settings = settings or {"microbatches": K}
    step = train_step(loss, optax.adam(1e-3), over=placed.over, **settings)
    spec = placed.params if placed.params else P(None, "model" if machine.model > 1 else None)
    state = jax.eval_shape(train_step(loss, optax.adam(1e-3), **settings).init, params)
    placed_state = jax.tree.map(lambda x: spread(mesh, spec if x.ndim == 2 else P(), x), state)
    rest = [None if entry == "data" else entry for entry in spec]

    def of_each(x: Any) -> Any:
        split = P("data", *(rest if x.ndim == 2 else []))
        return spread(mesh, split, jax.ShapeDtypeStruct((machine.data, *x.shape), x.dtype))

    levels = jax.tree.map(of_each, state.window.levels)
    placed_state = placed_state._replace(window=placed_state.window._replace(levels=levels))
    rows = MESH_ROWS * machine.data * settings.get("microbatches", 1)
    batch = spread(mesh, P("data"), jax.ShapeDtypeStruct((rows, MESH_WIDTH), jnp.float32))
    args = spread(mesh, spec, params), placed_state, batch
    return compile_for(machine.devices(), step.function, *args, donate=(0, 1), **machine.options)


class Row(NamedTuple):
    """Costs of a window's compiled program on each device; sizes in MiB.

    Attributes:
      inside: exchanges of more than a few scalars in each microbatch.
      outside: exchanges once per window.
      rows: rows of a microbatch that a device computes.
      turn: memory traffic of a microbatch; known for GPUs only.
      rest: memory traffic of the window outside its microbatches.
      temporary: memory in addition to arguments and results.
      copies: copies of arrays.
    """

    inside: Counter[str]
    outside: Counter[str]
    rows: int
    turn: float | None
    rest: float | None
    temporary: float
    copies: int


FEW_SCALARS = 256
"""Size, in bytes, of the largest exchange that is not counted."""


def widest(program: Program, width: int) -> int:
    """The largest number of rows, other than ``width``, of a result of this width inside a loop."""
    made = (x for _, x, looped in program.executed() if looped and x.opcode not in FREE)
    rows = (shape.dims[-2] for x in made for shape in x.shapes if len(shape.dims) == 2 and shape.dims[-1] == width)
    return max((n for n in rows if n != width), default=0)


def row_of(compiled: Compiled, width: int) -> Row:
    program = compiled.program
    inside, outside = program.collectives(least=FEW_SCALARS)
    turn = program.bytes_of_turn()
    sizes: list[float | None] = [turn / MIB, (program.bytes_moved(True) - K * turn) / MIB]
    if program.for_tpu:  # copies between its memories do not count as traffic
        sizes = [None, None]
    moved = (None if size is None else round(size, 1) for size in sizes)
    temporary = round(compiled.temporary / MIB, 1)
    return Row(inside, outside, widest(program, width), *moved, temporary, program.copies())
