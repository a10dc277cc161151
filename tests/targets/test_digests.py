"""Memory traffic of digests on an H100: each leaf is read once, and nothing of its size is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import gradcombine as gc
from tests.targets.compile_for import compile_for, h100, mesh, spread, tpu

pytestmark = pytest.mark.targets

SHAPES = ((4096, 1024), (1024, 2048), (2048,))


def norm(leaves: Any) -> Any:
    return jnp.stack([jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves])


def specs(dtype: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in SHAPES]


def size(leaves: list[Any]) -> int:
    return sum(x.size * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_leaf_is_read_once(dtype: Any) -> None:
    leaves = specs(dtype)
    mine, theirs = (compile_for(h100(), function, leaves) for function in (gc.digest, norm))
    assert mine.program.bytes_moved(True) <= 1.01 * size(leaves)
    assert mine.program.bytes_moved(True) <= 1.1 * theirs.program.bytes_moved(True)
    assert mine.temporary <= 0.01 * size(leaves)


def test_a_chip_of_a_tpu_holds_no_leaf_again() -> None:
    leaves = specs(jnp.bfloat16)
    # Blocks of its vector memory, independent of the leaves.
    assert compile_for(tpu("v5e:2x2"), gc.digest, leaves).temporary <= 0.02 * size(leaves)


def test_shards_exchange_their_sums_alone() -> None:
    devices = h100(8)
    leaves = spread(mesh(devices), P("data"), specs(jnp.float32))
    compiled = compile_for(devices, gc.digest, leaves)
    assert compiled.program.bytes_moved(True) <= 1.05 * size(leaves) / 8
    assert compiled.temporary <= 0.01 * size(leaves)
