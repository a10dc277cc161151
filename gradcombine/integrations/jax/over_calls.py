"""A training step whose window extends over several calls."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradcombine as gc
from gradcombine.integrations.jax.axes import own
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.integrations.jax.numbers import as_arrays
from gradcombine.integrations.jax.optimize import optimize
from gradcombine.integrations.jax.placement import place_beside
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.jax.train_state import (
    StepFunctions,
    StepMetrics,
    TrainState,
    is_bound,
    loss_arguments,
    owned,
    require_carry,
    require_train_state,
)
from gradcombine.integrations.jax.window import merged
from gradcombine.reductions import dtypes
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, Array, Tree


def over_calls(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    every: int | Callable[[Array], Any],
    max_every: int | None,
) -> StepFunctions:
    """One microbatch a call; at the end of a window the replicas exchange, and the optimizer runs."""

    def accumulator(reduction: Reduction) -> gc.Accumulator:
        return gc.accumulate(reduction, every, order=objective.order, max_every=max_every)

    accumulator(objective.reduction)  # a bad length is refused here, before there is a state

    def length(index: Array) -> Array:
        at = every(index) if callable(every) else operator.index(every)
        return jnp.maximum(jnp.asarray(at).astype(np.int32), 1)

    def init(params: Tree, *example: Any, carry: Tree = None, **kwargs: Any) -> TrainState:
        require_carry(objective, carry)
        params = as_arrays(params)
        bound = is_bound(objective)
        specs = {"grads": params, "value": _scalar(_value_dtype(params)), "weight": _scalar(np.float32)}
        if example or kwargs:
            alone = objective if bound else dataclasses.replace(objective, over=gc.LOCAL)
            called = loss_arguments(objective, params, carry, example)
            parts = jax.eval_shape(lambda *args, **kw: alone.contribution(args, kw).parts, *called, **kwargs)
            specs |= {"aux": parts["aux"]} if "aux" in parts else {}
        window = jax.tree.map(jnp.asarray, accumulator(objective.combined("aux" in specs)).init(specs))
        carry = owned(carry)
        if bound:
            window, carry = window._replace(levels=own(objective.over, window.levels)), own(objective.over, carry)
        return place_beside(params, TrainState(window, owned(optimizer.init(params)), carry))

    def function(params: Tree, state: TrainState, *args: Any, **kwargs: Any) -> tuple[Tree, TrainState, StepMetrics]:
        require_train_state(objective, state)
        params, window = as_arrays(params), state.window
        added = contribution(params, state, args, kwargs)
        if ("aux" in added.parts) != _has_aux(window):
            expected = "a state made by step.init(params, *example), whose example shows the aux that the loss returns"
            raise objective.error(expected, f"one made {'with' if _has_aux(window) else 'without'} aux")
        reduction = objective.combined(_has_aux(window))
        acc = accumulator(reduction)
        # Updated outside of what runs at the end, and only read there: it stays in place.
        window = acc.update(added.parts, window._replace(levels=own(objective.over, window.levels)), added.weight)
        ready = jnp.asarray(acc.ready(window))
        (params, opt_state), told = run_if(ready, apply(reduction, window), (params, state.opt_state))
        return params, TrainState(window, opt_state, added.carry), told

    def flush(params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        require_train_state(objective, state)
        params, window = as_arrays(params), state.window
        reduction = objective.combined(_has_aux(window))
        levels = own(objective.over, window.levels)
        full = length(window.index)
        partial = (window.step > 0) & (window.step < full)
        run = apply(reduction, window._replace(levels=levels))
        (params, opt_state), told = run_if(partial, run, (params, state.opt_state))
        # It counts as full: the next update begins another.
        window = AccumulateState(levels, jnp.where(partial, full, window.step), window.index)
        return params, TrainState(window, opt_state, state.carry), told

    def apply(reduction: Reduction, window: AccumulateState) -> Callable[[Tree], tuple[Tree, StepMetrics]]:
        return lambda kept: optimize(optimizer, kept[0], kept[1], merged(objective, reduction, window))

    def contribution(params: Tree, state: TrainState, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contribution:
        called = loss_arguments(objective, params, state.carry, args)
        objective.batch_positions(called)
        if objective.rng_argnum is not None:
            called[objective.rng_argnum] = key(called[objective.rng_argnum], state.window)
        added = objective.contribution(called, kwargs)
        grads, value = _widened(added.parts["grads"], params), added.parts["value"].astype(_value_dtype(params))
        return added._replace(parts=added.parts | {"grads": grads, "value": value})

    def key(rng: Array, window: AccumulateState) -> Array:
        full = window.step >= length(window.index)
        index = jnp.where(full, window.index + 1, window.index)
        number = objective.over.rank() * length(index) + jnp.where(full, 0, window.step)
        return jax.random.fold_in(jax.random.fold_in(rng, index), number)

    return StepFunctions(init, function, flush)


def _has_aux(window: AccumulateState) -> bool:
    # Besides the gradients, the value and the weight, there is one part or more for each reduction of the aux.
    return len(window.levels[0].parts) > 3


def _scalar(dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def _value_dtype(params: Tree) -> np.dtype:
    """In which losses are combined: float64 where a parameter is, else float32."""
    wide = any(leaf.dtype == np.float64 for leaf in jax.tree.leaves(params))
    return np.dtype(np.float64 if wide else np.float32)


def _widened(grads: Tree, params: Tree) -> Tree:
    """Gradients narrower than their parameters, in the parameters' dtype, which the window was made for."""

    def widen(grad: Any, param: Any) -> Any:
        wider = dtypes.kind(grad.dtype) == dtypes.kind(param.dtype) and np.can_cast(grad.dtype, param.dtype)
        return grad.astype(param.dtype) if wider else grad

    # Where the structures differ, the accumulator says where.
    same = jax.tree.structure(grads) == jax.tree.structure(params)
    return jax.tree.map(widen, grads, params) if same else grads
