"""What happens at the end of a window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from gradcombine.integrations.jax.train_state import StepMetrics
from gradcombine.types import Tree

if TYPE_CHECKING:
    import optax


def optimize(
    optimizer: optax.GradientTransformationExtraArgs, params: Tree, opt_state: Any, values: dict[str, Tree]
) -> tuple[tuple[Tree, Any], StepMetrics]:
    """Runs the optimizer on the combined parts of a window: parameters, its state, and what is told of the window."""
    import optax

    updates, opt_state = optimizer.update(values["grads"], opt_state, params, value=values["value"])
    told = StepMetrics(jnp.asarray(True), values["value"], values["weight"], values.get("aux"))
    return (optax.apply_updates(params, updates), opt_state), told
