"""A training step whose calls bring whole windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from gradcombine.integrations.jax.arrays import as_arrays, place_beside, require_tree
from gradcombine.integrations.jax.contribution import Objective
from gradcombine.integrations.jax.on_replicas import own_state
from gradcombine.integrations.jax.scan import scan_window
from gradcombine.integrations.jax.train_state import (
    StepFunctions,
    StepMetrics,
    TrainState,
    loss_arguments,
    opened,
    optimize,
    owned,
    require_carry,
)
from gradcombine.types import AccumulateState, Tree

if TYPE_CHECKING:
    import optax


def whole_windows(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    microbatches: int,
    interleaved: bool,
) -> StepFunctions:
    """All microbatches of a window in one call, in a scan; then the replicas exchange, and the optimizer runs."""

    def init(params: Tree, *example: Any, carry: Tree = None, **kwargs: Any) -> TrainState:
        require_tree("train_step", example, carry, kwargs)
        require_carry(objective, carry)
        params = as_arrays(objective.operation, params)
        carry = own_state(objective.operation, objective.over, owned(carry), params)
        window = AccumulateState((), jnp.zeros((), np.int32), jnp.zeros((), np.int32))
        return place_beside(params, TrainState(window, owned(optimizer.init(params)), carry))

    def function(params: Tree, state: TrainState, *args: Any, **kwargs: Any) -> tuple[Tree, TrainState, StepMetrics]:
        require_tree("train_step", args, kwargs)
        state = opened(objective, state)
        params, window = as_arrays(objective.operation, params), state.window
        called = loss_arguments(objective, params, state.carry, args)
        objective.batch_positions(called)
        if objective.loss.rng_argnum is not None:
            called[objective.loss.rng_argnum] = objective.key(called, window.index)
        values, carry, _ = scan_window(objective, microbatches, interleaved, called, kwargs)
        (params, opt_state), told = optimize(optimizer, params, state.opt_state, values)
        return params, TrainState(window._replace(index=window.index + 1), opt_state, carry), told

    def flush(params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        raise objective.error("flush of a step with every: a call with microbatches leaves no partial window", "one")

    return StepFunctions(init, function, flush)
