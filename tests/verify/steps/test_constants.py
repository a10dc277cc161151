"""Epsilons that differ between one batch and microbatches, with an effect below the rounding tolerance."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradcombine.verify import Verdict, check_step

RNG = np.random.default_rng(0)
SHAPES = {"a": (6, 32), "w": (32,)}
PARAMS = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
BATCH = {name: RNG.normal(size=shape).astype(np.float32) for name, shape in {"x": (16, 6), "y": (16,)}.items()}


def made(k: int, epsilon: float, guard: bool = False) -> Any:
    """A step through a layer norm with this epsilon; `guard`: whether its divisor is clamped from below."""

    def loss(p: Any, part: Any) -> Any:
        h = part["x"] @ p["a"]
        h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + np.float32(epsilon))
        return ((h @ p["w"] - part["y"]) ** 2).mean()

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(k, -1, *x.shape[1:]), batch)
        total = jax.tree.map(lambda x: x.sum(0), jax.lax.map(lambda part: jax.grad(loss)(p, part), parts))
        count = jnp.maximum(jnp.float32(k), np.float32(1e-9)) if guard else jnp.float32(k)
        return jax.tree.map(lambda x: x / count, total)

    return step


def test_another_epsilon_is_told() -> None:
    report = check_step(lambda k: made(k, 1e-5 if k == 1 else 1e-6), PARAMS, BATCH)
    assert report.verdict is Verdict.CANNOT_TELL, report
    assert report.not_checked == (
        "constants: 1e-05 in one batch but 1e-06 in 4 microbatches, a difference that rounding may hide",
    )


@pytest.mark.parametrize("guard", [False, True], ids=["same", "guarded"])
def test_the_same_epsilon_passes_with_a_guard_in_addition(guard: bool) -> None:
    report = check_step(lambda k: made(k, 1e-5, guard and k > 1), PARAMS, BATCH)
    assert report.passes, report
