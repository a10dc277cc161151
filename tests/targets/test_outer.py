"""Islands of 8 H100s on 64 hosts exchange nothing within a window and a part of the parameters at its end."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine.audit.hlo import groups
from gradcombine.integrations.jax import outer
from tests.targets.compile_for import compile_for, grid, h100, spread

pytestmark = pytest.mark.targets

HOSTS, DEVICES, EVERY = 64, 8, 32
SHAPE, LEAVES = (512, 512), 4
BYTES = LEAVES * SHAPE[0] * SHAPE[1] * 4


@pytest.mark.parametrize("fragments", [1, 4])
def test_what_crosses_islands(fragments: int) -> None:
    devices = h100(DEVICES, HOSTS)
    machines = grid(devices, {"island": HOSTS, "data": DEVICES}, AxisType.Auto)
    islands = outer(optax.sgd(0.7, momentum=0.9, nesterov=True), EVERY, gc.jax_axis("island"), fragments=fragments)

    def step(stacked: Any, state: Any, weight: Any, x: Any) -> Any:
        params, seen = jax.tree.map(lambda a: a[0], (stacked, weight))

        def loss(params: Any) -> Any:
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        grads = gc.all_reduce(gc.reductions.mean(), jax.grad(loss)(params), gc.jax_axis("data"))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        params, state = islands.update(params, state._replace(weight=seen), weight=x.shape[0])
        return jax.tree.map(lambda a: a[None], (params, state.weight)), state._replace(weight=0)

    specs = {f"w{i}": jax.ShapeDtypeStruct(SHAPE, jnp.float32) for i in range(LEAVES)}
    state = jax.eval_shape(islands.init, specs)
    own = jax.tree.map(lambda a: jax.ShapeDtypeStruct((HOSTS, *a.shape), a.dtype), (specs, state.weight))
    x = jax.ShapeDtypeStruct((HOSTS * DEVICES * 16, SHAPE[0]), jnp.float32)
    shared = state._replace(weight=jax.ShapeDtypeStruct((), jnp.float32))
    specs_in = (P("island"), P(), P("island"), P(("island", "data")))
    mapped = jax.shard_map(step, mesh=machines, in_specs=specs_in, out_specs=(P("island"), P()), check_vma=False)
    arguments = (own[0], shared, own[1], x)
    given = [spread(machines, spec, a) for spec, a in zip(specs_in, arguments, strict=True)]
    program = compile_for(devices, mapped, *given).program
    loops = [x.called("body")[0] for x in program.computations[program.entry].values() if x.opcode == "while"]
    assert len(loops) == fragments
    within = exchanged(program, program.entry)
    assert within and not any(crosses for crosses, _ in within)
    for body in loops:
        at_end = exchanged(program, body)
        assert all(crosses for crosses, _ in at_end)
        # At most four scalars more, such as the weight and the count.
        assert 0 <= sum(size for _, size in at_end) - BYTES // fragments <= 16


def exchanged(program: Any, name: str) -> list[tuple[bool, int]]:
    """For each collective of a computation: whether it crosses islands, and the bytes that a device contributes."""
    instructions = program.computations[name]
    return [
        (
            any(len({device // DEVICES for device in group}) > 1 for group in groups(x.attributes)),
            sum(instructions[operand].bytes for operand in x.operands),
        )
        for x in instructions.values()
        if x.collective
    ]
