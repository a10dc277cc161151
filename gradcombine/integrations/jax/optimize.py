"""What happens at the end of a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gradcombine.integrations.jax.axes import align
from gradcombine.integrations.jax.train_state import StepMetrics
from gradcombine.types import Array, Tree

Applied = tuple[Tree, Any, StepMetrics]
"""Parameters, optimizer state and metrics after a window."""


def optimize(
    optimizer: optax.GradientTransformationExtraArgs, params: Tree, opt_state: Any, values: dict[str, Tree]
) -> Applied:
    """Runs the optimizer on the combined parts of a window."""
    updates, opt_state = optimizer.update(values["grads"], opt_state, params, value=values["value"])
    told = StepMetrics(jnp.asarray(True), values["value"], values["weight"], values.get("aux"))
    return optax.apply_updates(params, updates), opt_state, told


def optimize_if(condition: Array, run: Callable[[], Applied], params: Tree, opt_state: Any) -> Applied:
    """``run()`` where the scalar condition holds; else parameters and state as they are, and zeros."""
    # Whatever `run` reads of the window, it reads as a constant: a buffer that passed through the conditional as an
    # argument and a result would be copied on every step.
    specs = jax.eval_shape(run)

    def wait() -> Applied:
        zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs[2])
        return align((params, opt_state, zeros), specs)

    return jax.lax.cond(condition, run, wait)
