"""A training step whose window extends over several calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import gradcombine as gc
from gradcombine.errors import GradCombineError, attribute, renamed
from gradcombine.integrations.jax.arrays import as_arrays, place_beside, require_tree
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.integrations.jax.on_replicas import on_replicas, own_state
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.jax.train_state import (
    StepFunctions,
    StepMetrics,
    TrainState,
    is_bound,
    keep_dtypes,
    loss_arguments,
    opened,
    optimize,
    owned,
    require_carry,
)
from gradcombine.places.time import require_state
from gradcombine.places.window import Window, widened
from gradcombine.reductions import dtypes
from gradcombine.reductions.numbered import NumberedState
from gradcombine.types import AccumulateState, Array, Tree

if TYPE_CHECKING:
    import optax


def over_calls(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    every: int | Callable[[Array], Any],
    max_every: int | None,
) -> StepFunctions:
    """One microbatch a call; at the end of a window the replicas exchange, and the optimizer runs."""
    of_gradients = objective.window(every, max_every, has_aux=False)
    with_aux = objective.window(every, max_every, has_aux=True)

    def init(params: Tree, *example: Any, carry: Tree = None, **kwargs: Any) -> TrainState:
        require_tree("train_step", example, carry, kwargs)
        require_carry(objective, carry)
        params = as_arrays(objective.operation, params)
        bound = is_bound(objective)
        combined = dtypes.of_weights(x.dtype for x in jax.tree.leaves(params))  # as wide as the widest parameter
        specs = {"grads": objective.like(params), "value": _scalar(combined), "weight": _scalar(np.float32)}
        if example or kwargs:
            alone = objective if bound else dataclasses.replace(objective, over=gc.LOCAL)
            called = loss_arguments(objective, params, carry, example)
            parts = jax.eval_shape(lambda *args, **kw: alone.contribution(args, kw).parts, *called, **kwargs)
            specs |= {"aux": parts["aux"]} if "aux" in parts else {}
        window = with_aux if "aux" in specs else of_gradients
        state, carry = jax.tree.map(jnp.asarray, window.init(specs)), owned(carry)
        levels, carry = own_state(objective.operation, objective.over, (state.levels, carry), params)
        return place_beside(params, TrainState(state._replace(levels=levels), owned(optimizer.init(params)), carry))

    def function(params: Tree, state: TrainState, *args: Any, **kwargs: Any) -> tuple[Tree, TrainState, StepMetrics]:
        require_tree("train_step", args, kwargs)
        state = opened(objective, state)
        params, has_aux = as_arrays(objective.operation, params), _has_aux(state.window)
        window = window_of(state, params)

        def contribute(called: list[Any], kwargs: dict[str, Any], position: Tree, own: Tree) -> tuple[Tree, Tree]:
            held, carry = AccumulateState(own[0], *position), own[1]
            added = contribution(held, carry, called, kwargs)
            if ("aux" in added.parts) != has_aux:
                expected = "a state made by step.init(params, *example), whose example shows the loss's aux"
                raise objective.error(expected, f"one made {'with' if has_aux else 'without'} aux")
            held, due = window.due(window.contribute(held, added.parts, added.weight))
            return (jnp.asarray(due), held.step, held.index), (held.levels, added.carry)

        # Updated outside of what runs at the end, and only read there: it stays in place.
        position, own = (state.window.step, state.window.index), (state.window.levels, state.carry)
        called = loss_arguments(objective, params, None, args)
        (due, *position), (levels, carry) = objective.on_replicas(contribute, called, kwargs, position, own)
        held, kept = AccumulateState(levels, *position), (params, state.opt_state)
        due = due if not window.ends_by_flush else False
        held, (params, opt_state), metrics = window.apply_if(due, held, close, kept, run_if)
        return params, TrainState(held, opt_state, carry), metrics

    def flush(params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        state = opened(objective, state)
        params = as_arrays(objective.operation, params)
        window, kept = window_of(state, params), (params, state.opt_state)

        def end(position: Tree, rows: Tree, levels: Tree) -> tuple[Tree, Tree]:
            held = window.own(AccumulateState(levels, *position))
            partial = window.is_partial(held)
            return (partial, window.end(held, partial).step), held.levels

        position = state.window.step, state.window.index
        (partial, ended), levels = on_replicas(
            objective.operation, objective.over, end, position, own=state.window.levels
        )
        held = state.window._replace(levels=levels)
        held, (params, opt_state), metrics = window.apply_if(partial, held, close, kept, run_if)
        return params, TrainState(held._replace(step=ended), opt_state, state.carry), metrics

    def close(kept: Tree, combined: dict[str, Tree]) -> tuple[Tree, StepMetrics]:
        (params, opt_state), told = optimize(optimizer, kept[0], kept[1], objective.told(combined))
        return (params, keep_dtypes(opt_state, kept[1])), told

    def window_of(state: TrainState, params: Tree) -> Window:
        return dataclasses.replace(with_aux if _has_aux(state.window) else of_gradients, params=params)

    def contribution(held: AccumulateState, carry: Tree, called: list[Any], kwargs: dict[str, Any]) -> Contribution:
        params = called[0]
        objective.batch_positions(called)  # refuses fewer arguments
        if objective.loss.carry_argnum is not None:
            called[objective.loss.carry_argnum] = carry
        if objective.loss.rng_argnum is not None:
            index, _ = of_gradients.next(held)
            called[objective.loss.rng_argnum] = objective.key(called, index, of_gradients.number(held))
        added = objective.contribution(called, kwargs)
        grads = added.parts["grads"]
        if jax.tree.structure(grads) == jax.tree.structure(params):
            # Where the structures differ, the window says where.
            grads = jax.tree.map(widened, grads, params)
        value = added.parts["value"].astype(dtypes.of_weights(leaf.dtype for leaf in jax.tree.leaves(params)))
        return added._replace(parts=added.parts | {"grads": grads, "value": value})

    return StepFunctions(init, function, flush)


def _has_aux(window: AccumulateState) -> bool:
    # Besides the gradients, the value and the weight, there is one part or more for each reduction of the aux.
    with renamed("train_step", ".window"):
        require_state(window)
    level = next(iter(window.levels), None)  # none of a step with microbatches
    parts = attribute(level.value if isinstance(level, NumberedState) else level, "parts")
    if not isinstance(parts, tuple):
        received = "none" if level is None else type(level).__name__
        raise GradCombineError("train_step", "a state that step.init made", received, ".window.levels")
    return len(parts) > 3


def _scalar(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)
