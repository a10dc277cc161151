"""Bytes that replicas send through a wire, in programs for 8 and 512 H100s and for 512 TPU chips."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from gradcombine import wires
from tests.targets.compile_for import Compiled, compile_for, h100, mesh, spread, tpu

pytestmark = pytest.mark.targets

ELEMENTS = 1 << 23
OVER = gc.jax_axis("data")
WIRES = {"bfloat16": wires.cast("bfloat16"), "8 bits": wires.blocks(8), "4 bits": wires.blocks(4)}
TARGETS = {"8 H100s": partial(h100, 8), "512 H100s": partial(h100, 8, 64), "512 chips": partial(tpu, "v5p:8x8x8")}


def compiled(target: str, wire: wires.Wire | None) -> tuple[Compiled, int]:
    """Compiles the mean of a matrix; returns the program and the number of replicas."""
    devices = TARGETS[target]()
    replicas, n = mesh(devices), len(devices)
    reduction = gc.reductions.mean(wire=wire)

    def mean(x: Any, weight: Any) -> Any:
        return gc.all_reduce(reduction, {"w": x[0]}, over=OVER, weight=weight[0])

    shape = (n, 1024, ELEMENTS // 1024)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((n,), jnp.float32)]
    function = jax.shard_map(mean, mesh=replicas, in_specs=P("data"), out_specs=P())
    return compile_for(devices, function, *spread(replicas, P("data"), args)), n


def sent(made: Compiled, n: int) -> dict[str, float]:
    """Bytes that each replica sends per element, by collective; for a gather, those of its result."""
    entry = made.program.computations[made.program.entry]
    rounds = {"all-reduce": 2.0, "all-to-all": 1.0, "all-gather": float(n)}
    total: dict[str, float] = {}
    for _, x, _ in made.program.executed():
        if x.collective:
            given = sum(entry[operand].bytes for operand in x.operands)
            total[x.collective] = total.get(x.collective, 0) + rounds[x.collective] * given * (n - 1) / n / ELEMENTS
    return total


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("target", ["8 H100s", "512 H100s"])
def test_bytes_of_the_narrow_type(target: str, name: str) -> None:
    """2 (n - 1) / n bytes per element, plus one scale per block; a float32 all-reduce sends 8 (n - 1) / n."""
    wire = WIRES[name]
    made, n = compiled(target, wire)
    bytes_sent = sent(made, n)
    expected = wires.bytes_sent(wire, ELEMENTS, n)["parts"] / ELEMENTS
    assert set(bytes_sent) == {"all-to-all", "all-gather", "all-reduce"}
    assert sum(bytes_sent.values()) == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(2 * (n - 1) / n * (wire.bits / 8 + (wire.size > 0) / 128), rel=1e-5)
    assert bytes_sent["all-reduce"] <= 1e-4  # the weight and the count
    # The received codes are not accompanied by a float32 array.
    assert made.temporary <= 1.1 * max(1, wire.bits / 8) * ELEMENTS


def test_a_wide_exchange_sends_four_times_as_much() -> None:
    made, n = compiled("8 H100s", None)
    assert sent(made, n)["all-reduce"] == pytest.approx(8 * (n - 1) / n, rel=1e-5)


@pytest.mark.parametrize("name", ["bfloat16", "8 bits"])
def test_a_pod_of_tpus_sends_codes(name: str) -> None:
    """XLA for TPU turns any gather over this mesh into an all-reduce, here one of codes."""
    wire = WIRES[name]
    made, n = compiled("512 chips", wire)
    bytes_sent = sent(made, n)
    narrow = wires.bytes_sent(wire, ELEMENTS, n)["parts"] / ELEMENTS / 2
    assert bytes_sent["all-to-all"] == pytest.approx(narrow, rel=1e-5)
    assert sum(bytes_sent.values()) - bytes_sent["all-to-all"] <= 2 * narrow + 1e-4
