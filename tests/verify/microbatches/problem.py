"""A small regression with microbatches of different sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gradcombine.verify import StepReport, check_microbatches

EVERY = 4
PARAMS = {"b": np.full(1, 0.5, np.float32), "w": np.linspace(-1, 1, 6, dtype=np.float32)}
RNG = np.random.default_rng(0)


def examples(n: int) -> dict[str, np.ndarray]:
    return {"x": RNG.normal(size=(n, 6)).astype(np.float32), "y": RNG.normal(size=n).astype(np.float32)}


FULL = examples(14)
"""Microbatches of four and three examples."""
ALIKE = examples(16)
"""Microbatches of equal size."""


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def summed(params: Any, batch: Any) -> Any:
    return jnp.sum((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def schedule(count: Any) -> Any:
    return jnp.float32(0.1) / (1 + count).astype(jnp.float32)


def optimizer() -> optax.GradientTransformation:
    """Transformations that must be applied once per window."""
    return optax.chain(
        optax.clip_by_global_norm(0.5), optax.scale_by_adam(), optax.add_decayed_weights(0.1), optax.scale(-0.1)
    )


def weighted(microbatch: Any, last: bool) -> Mapping[str, Any]:
    return {"weight": np.float32(len(microbatch["y"])), "flush": last}


def check(batch: Any, inner: Any, accumulating: Any, **options: Any) -> StepReport:
    # optax.MultiSteps divides by an integer, which strict promotion rejects.
    with jax.numpy_dtype_promotion("standard"):
        return check_microbatches(
            options.pop("loss", loss),
            options.pop("params", PARAMS),
            batch,
            inner,
            accumulating,
            **{"microbatches": [EVERY], **options},
        )


class ByHandState(NamedTuple):
    acc: Any
    step: Any
    inner: Any


def by_hand(
    inner: Any,
    every: int,
    *,
    kept: bool = False,
    dropped: bool = False,
    stale: bool = False,
    cleared: bool = True,
    divisor: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Hand-written accumulation with optional bugs.

    Args:
      kept: the new inner state is kept at every microbatch.
      dropped: a partial window is cleared at the end without being applied.
      stale: a partial window is not applied and its sum stays in the accumulator.
      cleared: whether the sum is cleared at the end of a window.
      divisor: divisor of the sum; None: the number of microbatches.
    """

    def init(params: Any) -> ByHandState:
        return ByHandState(jax.tree.map(jnp.zeros_like, params), jnp.int32(0), inner.init(params))

    def update(updates: Any, state: Any, params: Any = None, *, last: Any, **extra_args: Any) -> Any:
        acc, step = jax.tree.map(jnp.add, state.acc, updates), state.step + 1
        full = step == every
        applied = full if dropped or stale else last
        by = jnp.float32(divisor) if divisor else step.astype(jnp.float32)
        result, after = inner.update(jax.tree.map(lambda x: x / by, acc), state.inner, params)
        behind = after if kept else jax.tree.map(lambda new, old: jnp.where(applied, new, old), after, state.inner)
        over = (full if stale else last) & cleared
        acc = jax.tree.map(lambda x: jnp.where(over, jnp.zeros_like(x), x), acc)
        return jax.tree.map(lambda x: jnp.where(applied, x, jnp.zeros_like(x)), result), ByHandState(
            acc, jnp.where(last, 0, step), behind
        )

    return optax.GradientTransformationExtraArgs(init, update)


def last_only(microbatch: Any, last: bool) -> Mapping[str, Any]:
    del microbatch
    return {"last": last}
