# pyright: standard
"""Training steps as pure functions: a window spans several calls, or each call processes a full window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import gradcombine as gc
from gradcombine.backends.registry import require_numbers
from gradcombine.errors import invalid
from gradcombine.integrations.jax.arrays import (
    apply_updates,
    as_arrays,
    explain_rejection,
    optimized,
    place_beside,
    require_carry,
    require_tree,
)
from gradcombine.integrations.jax.jax_window import run_if
from gradcombine.integrations.jax.loss import batch_positions, folded_key
from gradcombine.integrations.jax.objective import Contribution, Objective
from gradcombine.integrations.jax.on_replicas import local_state, on_replicas, unbound, with_mesh_of
from gradcombine.integrations.jax.scan import scan_window
from gradcombine.places.time import require_counters
from gradcombine.places.window import Window, widened
from gradcombine.reductions import dtypes
from gradcombine.reductions.numbered import NumberedState
from gradcombine.types import AccumulateState, Array, Scalar, Tree

if TYPE_CHECKING:
    import optax


class TrainState(NamedTuple):
    """State of `train_step`.

    Attributes:
      window: the accumulated microbatches. ``window.levels`` differs between replicas, and is empty if every call
        processes a full window; ``step`` and ``index`` are the same on all replicas. After a window has been applied,
        its arrays are unspecified, as the all-reduce may have reused them; it only counts as full.
      opt_state: the optimizer's state.
      carry: the argument ``carry_argnum`` of the next microbatch, different on each replica; None without a carry.
    """

    window: AccumulateState
    opt_state: Tree
    carry: Tree


class StepMetrics(NamedTuple):
    """Metrics of the window that a call of `train_step` applied; zeros if it applied none.

    Attributes:
      applied: boolean scalar, whether the optimizer ran.
      value: the loss, combined like the gradients; for a loss of several terms, a dict by term.
      weight: the sum of the weights, float32; for a loss of several terms, a dict by denominator.
      aux: the loss's aux, combined by ``aux_reduction``; None if the loss returns none.
      grad_norm: for a `Loss` with ``grad_norm``, the 2-norm of the combined gradient over all leaves, in float32 or
        wider; else None.
      grad_norms: a dict by denominator, the norm of its part of the gradient; None if all parts share one accumulator.
    """

    applied: Array
    value: Array
    weight: Array
    aux: Tree
    grad_norm: Array | None = None
    grad_norms: dict[str, Array] | None = None


StepFunctions: TypeAlias = tuple[
    Callable[..., TrainState],
    Callable[..., tuple[Tree, TrainState, StepMetrics]],
    Callable[[Tree, TrainState], tuple[Tree, TrainState, StepMetrics]],
]
"""``init``, ``function`` and ``flush`` of a training step, not compiled."""


def optimize(
    objective: Objective, optimizer: optax.GradientTransformationExtraArgs, kept: Tree, combined: dict[str, Tree]
) -> tuple[tuple[Tree, Tree], StepMetrics]:
    """Runs the optimizer on the combined parts of a window.

    Args:
      kept: ``(params, opt_state)``.
      combined: the finalized parts of a `Contribution`.

    Returns:
      The new ``(params, opt_state)``, in their old dtypes, and the metrics.
    """
    (params, old_state), values = kept, objective.reported(combined)
    grads, structure = jax.tree.flatten(values["grads"])
    leaves, like = jax.tree.flatten(params)
    has_shards = structure == like and [*map(np.shape, grads)] != [*map(np.shape, leaves)]
    try:
        updates, opt_state = optimized(optimizer, values["grads"], old_state, params, value=values["total"])
        if has_shards and jax.tree.map(np.shape, updates) != jax.tree.map(np.shape, params):
            raise TypeError("updates of other shapes than the parameters")
    except (TypeError, ValueError) as error:
        if not has_shards:
            raise
        expected = (
            "an optimizer that gathers its updates, for gradients that are shards (zero.shard and zero.gather; or "
            "value_and_grad, or integrations.optax.accumulate around an optimizer of zero.shard(params, over))"
        )
        raise invalid(expected, str(error)) from error
    optional = (values.get(name) for name in ("aux", "grad_norm", "grad_norms"))
    metrics = StepMetrics(jnp.asarray(True), values["value"], values["weight"], *optional)
    return (apply_updates(params, updates), opt_state), metrics


def loss_arguments(objective: Objective, params: Tree, carry: Tree, args: Sequence[Tree]) -> list[Tree]:
    """Positional arguments of the loss: the step's, with the carry inserted at ``carry_argnum``."""
    loss_args = [params, *args]
    if objective.loss.carry_argnum is not None:
        loss_args.insert(objective.loss.carry_argnum, carry)
    return loss_args


def copied(values: Tree) -> Tree:
    """Copies all arrays: some optimizers keep the parameters in their state, and a buffer can only be donated once."""
    return jax.tree.map(jnp.copy, as_arrays(values))


def require_init(objective: Objective, params: Tree, example: Sequence[Tree], carry: Tree, kwargs: Tree) -> Tree:
    """Checks the arguments of ``init``; returns the parameters as JAX arrays."""
    require_tree(example, carry, kwargs)
    has_carry = objective.loss.carry_argnum is not None
    if (carry is None) == has_carry:
        expected = "step.init(params, carry=...), for carry_argnum" if has_carry else "no carry"
        raise invalid(expected, "none" if carry is None else type(carry).__name__)
    params = as_arrays(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        require_numbers(leaf, jax.tree_util.keystr(path))
    return params


def require_train_state(state: Tree) -> TrainState:
    """Returns the state with its leaves as JAX arrays; raises unless it is a `TrainState`."""
    if not isinstance(state, TrainState) or not isinstance(state.window, AccumulateState):
        received = state.window if isinstance(state, TrainState) else state
        raise invalid("a TrainState, from step.init(params)", type(received).__name__)
    require_counters(state.window, ".window")
    return as_arrays(state)


def part_specs(
    objective: Objective, params: Tree, carry: Tree, example: Sequence[Tree], kwargs: Tree
) -> dict[str, Tree]:
    """Specs of the parts of a contribution; includes aux only if there is an example of the loss's arguments."""
    value_dtype = dtypes.of_weights(x.dtype for x in jax.tree.leaves(params))  # as wide as the widest parameter
    value, weight = (jax.ShapeDtypeStruct((), dtype) for dtype in (value_dtype, np.float32))
    specs = {"grads": objective.grads_like(params), "value": value, "weight": weight}
    if not example and not kwargs:
        return specs
    traceable, loss_args = objective, loss_arguments(objective, params, carry, example)
    traced = loss_args, kwargs
    if unbound(objective.over) is not None:  # outside of the mapped function, the loss cannot take sharded arguments
        traceable, traced = dataclasses.replace(objective, over=gc.LOCAL), jax.tree.map(_unsharded, traced)
    with explain_rejection(*traced):
        parts = jax.eval_shape(lambda args, kw: traceable.contribution(args, kw).parts, *traced)
    return specs | ({"aux": with_mesh_of(parts["aux"], (loss_args, kwargs))} if "aux" in parts else {})


def _unsharded(x: Tree) -> Tree:
    if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))  # random keys have none


def microbatch(
    objective: Objective, loss_args: list[Tree], kwargs: dict[str, Tree], index: Array, number: Array
) -> Contribution:
    """Computes a contribution in the dtypes of the parameters; folds window index and number into the random key."""
    params, at = loss_args[0], objective.loss.rng_argnum
    if at is not None:
        loss_args[at] = folded_key(objective.loss, loss_args, index, number)
    contribution = objective.contribution(loss_args, kwargs)
    grads = contribution.parts["grads"]
    if jax.tree.structure(grads) == jax.tree.structure(params):
        # For different structures, the window raises an error that names the leaf.
        grads = jax.tree.map(widened, grads, params)
    value = contribution.parts["value"].astype(dtypes.of_weights(leaf.dtype for leaf in jax.tree.leaves(params)))
    return contribution._replace(parts=contribution.parts | {"grads": grads, "value": value})


def holds_aux(window: AccumulateState) -> bool:
    """Whether a window accumulates the aux of a loss."""
    # After gradients, value and weight, there is at least one part for each reduction of the aux.
    level = next(iter(window.levels), None)  # None for a step with microbatches
    parts = getattr(level.value if isinstance(level, NumberedState) else level, "parts", None)
    if not isinstance(parts, tuple):
        received = "none" if level is None else type(level).__name__
        raise invalid("a state that step.init made", received, ".window.levels")
    return len(parts) > 3


def step_functions(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    every: int | Callable[[Array], Scalar],
    max_every: int | None,
    microbatches: int | None,
    interleaved: bool,
) -> StepFunctions:
    """Builds a training step; the arguments are those of `train_step`.

    A call with ``every`` adds one microbatch, and if it is the last of its window, all-reduces and optimizes. A call
    with ``microbatches`` scans a full window, all-reduces and optimizes. In the former, the accumulators are updated
    outside of the branch and only read inside it, so that XLA updates them in place.
    """
    close = partial(optimize, objective, optimizer)
    windows = {aux: objective.window(every, max_every, has_aux=aux) for aux in (False, True)}

    def window_of(state: TrainState, params: Tree) -> Window:
        return dataclasses.replace(windows[holds_aux(state.window)], params=params)

    def init(params: Tree, *example: Tree, carry: Tree = None, **kwargs: Tree) -> TrainState:
        """Initial state on the devices of the parameters; each replica gets its own levels and carry."""
        params = require_init(objective, params, example, carry, kwargs)
        window = AccumulateState((), np.int32(0), np.int32(0))
        if microbatches is None:
            specs = part_specs(objective, params, carry, example, kwargs)
            window = windows["aux" in specs].init(specs)
        levels, step, index = jax.tree.map(jnp.asarray, (window.levels, window.step, window.index))
        levels, carry = local_state(objective.over, (levels, copied(carry)), params)
        opt_state = copied(optimizer.init(params))
        return place_beside(params, TrainState(AccumulateState(levels, step, index), opt_state, carry))

    def function(params: Tree, state: TrainState, *args: Tree, **kwargs: Tree) -> tuple[Tree, TrainState, StepMetrics]:
        require_tree(args, kwargs)
        state, params = require_train_state(state), as_arrays(params)
        if microbatches is None:
            return add_microbatch(params, state, args, kwargs)
        return run_window(microbatches, params, state, args, kwargs)

    def run_window(
        count: int, params: Tree, state: TrainState, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[Tree, TrainState, StepMetrics]:
        loss_args, window = loss_arguments(objective, params, state.carry, args), state.window
        if window.levels:
            expected = "(), as in a state from step.init with microbatches, which accumulates nothing between calls"
            raise invalid(expected, "a window of a step with every", ".window.levels")
        batch_positions(objective.loss, loss_args)  # raises for missing arguments
        if objective.loss.rng_argnum is not None:
            loss_args[objective.loss.rng_argnum] = folded_key(objective.loss, loss_args, window.index)
        combined, carry, _ = scan_window(objective, count, interleaved, loss_args, kwargs)
        (params, opt_state), metrics = close((params, state.opt_state), combined)
        return params, TrainState(window._replace(index=window.index + 1), opt_state, carry), metrics

    def add_microbatch(
        params: Tree, state: TrainState, args: tuple[Tree, ...], kwargs: dict[str, Tree]
    ) -> tuple[Tree, TrainState, StepMetrics]:
        window, has_aux = window_of(state, params), holds_aux(state.window)

        def on_one(
            loss_args: list[Tree], kwargs: dict[str, Tree], counters: Tree, levels: Tree
        ) -> tuple[Tree, Tree, Tree]:
            held = AccumulateState(levels, *counters)
            contribution = microbatch(objective, loss_args, kwargs, window.next(held)[0], window.number(held))
            if ("aux" in contribution.parts) != has_aux:
                expected = "a state made by step.init(params, *example), whose example shows the loss's aux"
                raise invalid(expected, f"one made {'with' if has_aux else 'without'} aux")
            if objective.loss.carry_argnum is not None:
                require_carry(contribution.carry, loss_args[objective.loss.carry_argnum])
            held, due = window.due(window.contribute(held, contribution.parts, contribution.weight))
            return (jnp.asarray(due), held.step, held.index), held.levels, contribution.carry

        loss_args = loss_arguments(objective, params, state.carry, args)
        levels, *counters = state.window
        (due, *counters), levels, carry = objective.on_replicas(on_one, loss_args, kwargs, counters, levels)
        held, kept = AccumulateState(levels, *counters), (params, state.opt_state)
        due = due if not window.ends_by_flush else False
        held, (params, opt_state), metrics = window.apply_if(due, held, close, kept, run_if)
        return params, TrainState(held, opt_state, carry), metrics

    def flush(params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        if microbatches is not None:
            raise invalid("a step with every, for flush: with microbatches, each call ends its window", "microbatches")
        state, params = require_train_state(state), as_arrays(params)
        window, kept = window_of(state, params), (params, state.opt_state)

        def end(counters: Tree, batch: Tree, levels: Tree) -> tuple[Tree, Tree]:
            held = window.mark_varying(AccumulateState(levels, *counters))
            is_partial = window.is_partial(held)
            return (is_partial, window.end(held, is_partial).step), held.levels

        counters = state.window.step, state.window.index
        (is_partial, ended), levels = on_replicas(objective.over, end, counters, local=state.window.levels)
        held = state.window._replace(levels=levels)
        held, (params, opt_state), metrics = window.apply_if(is_partial, held, close, kept, run_if)
        return params, TrainState(held._replace(step=ended), opt_state, state.carry), metrics

    return init, function, flush
