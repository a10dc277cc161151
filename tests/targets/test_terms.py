"""Several denominators with known totals need the memory of one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.reductions import Ratio
from tests.targets.compile_for import Compiled, compile_for, h100
from tests.targets.programs import CUBLAS, LAYERS, ROWS, WIDTH, K

pytestmark = [pytest.mark.targets, pytest.mark.usefixtures("standard_promotion")]

TERMS = {"fit": "rows", "long": "long rows", "weights": "microbatches"}


def sums(params: Any, x: Any, mask: Any) -> tuple[Any, Any]:
    for w in params:
        x = jnp.tanh(x @ w)
    rows = jnp.mean(x.astype(jnp.float32) ** 2, axis=1)
    long = mask * (jnp.arange(len(mask)) % 3 == 0)
    values = {"fit": jnp.sum(rows * mask), "long": jnp.sum(rows**2 * long), "weights": jnp.mean(rows)}
    return values, {"rows": jnp.sum(mask), "long rows": jnp.sum(long), "microbatches": 1}


def several(params: Any, x: Any, mask: Any) -> LossOutput:
    return LossOutput(*sums(params, x, mask))


def late(params: Any, x: Any, mask: Any) -> dict[str, Ratio]:
    """Two terms over the rows that a filter on the model's output keeps."""
    for w in params:
        x = jnp.tanh(x @ w)
    rows = jnp.mean(x.astype(jnp.float32) ** 2, axis=1)
    kept = mask * (rows < 0.5)
    return {"fit": Ratio(jnp.sum(rows * kept), jnp.sum(kept)), "long": Ratio(jnp.sum(rows**2 * kept), jnp.sum(kept))}


def one(params: Any, x: Any, mask: Any) -> LossOutput:
    values, weights = sums(params, x, mask)
    return LossOutput(sum(values.values()) / weights["rows"], weights["rows"])


def compiled(dtype: Any, loss: Any, **settings: Any) -> Compiled:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)] * LAYERS
    batch = [jax.ShapeDtypeStruct((K * ROWS, WIDTH), dtype), jax.ShapeDtypeStruct((K * ROWS,), jnp.float32)]
    return compile_for(h100(), value_and_grad(Loss(loss, **settings), K), params, *batch, **CUBLAS)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_known_totals_need_the_memory_of_one_denominator(dtype: Any) -> None:
    single = compiled(dtype, one)
    counted = compiled(dtype, several, terms=TERMS, totals="counted")
    unknown = compiled(dtype, several, terms=TERMS)
    assert counted.temporary <= 1.01 * single.temporary
    assert unknown.temporary > 1.5 * single.temporary  # an accumulator for each denominator
    moved = [x.program.bytes_of_turn() for x in (single, counted)]
    assert moved[1] <= 1.02 * moved[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_count_that_is_known_last_needs_the_memory_of_one_that_is_known_first(dtype: Any) -> None:
    """All terms over one denominator share one accumulator of raw sums, which is divided once."""
    single = compiled(dtype, one)
    unknown = compiled(dtype, late, terms={"fit": "kept", "long": "kept"})
    assert unknown.temporary <= 1.01 * single.temporary
