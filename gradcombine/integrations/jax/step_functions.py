# pyright: standard
"""A training step as pure functions: windows over several calls, or a window in each call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import gradcombine as gc
from gradcombine.backends.registry import require_count
from gradcombine.errors import GradCombineError, invalid, within
from gradcombine.integrations.jax.arrays import as_arrays, keep_dtypes, place_beside, require_tree
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.integrations.jax.on_replicas import on_replicas, on_their_mesh, own_state
from gradcombine.integrations.jax.run_if import run_if
from gradcombine.integrations.jax.scan import scan_window
from gradcombine.places.time import require_state
from gradcombine.places.window import Window, widened
from gradcombine.reductions import dtypes
from gradcombine.reductions.numbered import NumberedState
from gradcombine.types import AccumulateState, Array, DType, Scalar, Tree

if TYPE_CHECKING:
    import optax


class TrainState(NamedTuple):
    """The state of `train_step`.

    Attributes:
      window: the microbatches so far. ``window.levels`` is each replica's own, and empty where every call is a whole
        window; ``step`` and ``index`` are the same on all replicas. Of a window that was applied nothing is promised
        but that it is full: over replicas, the exchange may have taken its arrays over.
      opt_state: the optimizer's.
      carry: what the next microbatch gets in the place ``carry_argnum``, each replica's own; None without one.
    """

    window: AccumulateState
    opt_state: Tree
    carry: Tree


class StepMetrics(NamedTuple):
    """Metrics of the window that a call of `train_step` has applied; zeros where it has applied none.

    Attributes:
      applied: boolean scalar, whether the optimizer has run.
      value: the loss, combined as the gradients are; of a loss of several terms, a dict of them.
      weight: the sum of weights, float32; of a loss of several terms, a dict by denominator.
      aux: combined by ``aux_reduction``. None where the loss returns none.
      grad_norm: of a `Loss` with ``grad_norm``, the 2-norm of the combined gradient over all leaves, float32 at least;
        else None.
      grad_norms: by denominator that of its part of the gradient; None where one accumulator has all parts.
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
"""``init``, ``function`` and ``flush`` of a training step: pure, and not compiled."""


def optimize(
    optimizer: optax.GradientTransformationExtraArgs, params: Tree, opt_state: Tree, values: dict[str, Tree]
) -> tuple[tuple[Tree, Tree], StepMetrics]:
    """Runs the optimizer on the combined parts of a window: parameters, its state, and what is told of the window."""
    import optax

    shards = [np.shape(x) for x in jax.tree.leaves(values["grads"])] != [np.shape(x) for x in jax.tree.leaves(params)]
    try:
        updates, opt_state = optimizer.update(values["grads"], opt_state, params, value=values["total"])
        if shards and jax.tree.map(np.shape, updates) != jax.tree.map(np.shape, params):
            raise TypeError("updates of other shapes than the parameters")
    except (TypeError, ValueError) as error:
        if not shards:
            raise
        expected = (
            "an optimizer that gathers its updates, for gradients that are shards (zero.shard and zero.gather; or "
            "value_and_grad, or integrations.optax.accumulate around an optimizer of zero.shard(params, over))"
        )
        raise invalid(expected, str(error)) from error
    others = (values.get(name) for name in ("aux", "grad_norm", "grad_norms"))
    told = StepMetrics(jnp.asarray(True), values["value"], values["weight"], *others)
    return (optax.apply_updates(params, updates), opt_state), told


def loss_arguments(objective: Objective, params: Tree, carry: Tree, args: Sequence[Tree]) -> list[Tree]:
    """The positional arguments of the loss: those of the step, with the carry in its place among them."""
    called = [params, *args]
    if objective.loss.carry_argnum is not None:
        called.insert(objective.loss.carry_argnum, carry)
    return called


def owned(values: Tree) -> Tree:
    """Copies: a donated buffer may belong to one argument only, and some optimizers begin with the parameters."""
    return jax.tree.map(jnp.copy, as_arrays(values))


def is_bound(objective: Objective) -> bool:
    """Whether the axis of the replicas is bound: outside of the mapped function it is not."""
    try:
        objective.over.size()
    except GradCombineError:
        return False
    return True


def require_init(objective: Objective, params: Tree, example: Sequence[Tree], carry: Tree, kwargs: Tree) -> Tree:
    """Checks the arguments of ``init``; returns the parameters as JAX arrays."""
    require_tree(example, carry, kwargs)
    carried = objective.loss.carry_argnum is not None
    if (carry is None) == carried:
        expected = "step.init(params, carry=...), for carry_argnum" if carried else "no carry"
        raise invalid(expected, "none" if carry is None else type(carry).__name__)
    return as_arrays(params)


def begun(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    params: Tree,
    window: AccumulateState,
    carry: Tree,
) -> TrainState:
    """The first state, each replica's part of it its own, beside the parameters."""
    own = jax.tree.map(jnp.asarray, window.levels), owned(carry)
    levels, carry = own_state(objective.over, own, params)
    window = AccumulateState(levels, jnp.asarray(window.step), jnp.asarray(window.index))
    return place_beside(params, TrainState(window, owned(optimizer.init(params)), carry))


def opened(objective: Objective, state: Tree) -> TrainState:
    """The state, of JAX's arrays; refuses what is not a `TrainState`."""
    if not isinstance(state, TrainState) or not isinstance(state.window, AccumulateState):
        received = state.window if isinstance(state, TrainState) else state
        raise invalid("a TrainState, from step.init(params)", type(received).__name__)
    for name in ("step", "index"):
        require_count(getattr(state.window, name), f".window.{name}")
    return as_arrays(state)


def parts_like(
    objective: Objective, params: Tree, carry: Tree, example: Sequence[Tree], kwargs: Tree
) -> dict[str, Tree]:
    """Trees like the parts of a contribution; with the aux where there is an example."""
    combined = dtypes.of_weights(x.dtype for x in jax.tree.leaves(params))  # as wide as the widest parameter
    specs = {"grads": objective.like(params), "value": _scalar(combined), "weight": _scalar(np.float32)}
    if not example and not kwargs:
        return specs
    alone = objective if is_bound(objective) else dataclasses.replace(objective, over=gc.LOCAL)
    called = loss_arguments(objective, params, carry, example)
    parts = jax.eval_shape(lambda *args, **kw: alone.contribution(args, kw).parts, *called, **kwargs)
    return specs | ({"aux": on_their_mesh(parts["aux"], (called, kwargs))} if "aux" in parts else {})


def microbatch(
    objective: Objective, called: list[Tree], kwargs: dict[str, Tree], index: Array, number: Array
) -> Contribution:
    """The contribution of one microbatch, with the key of its number in window ``index``, as wide as the parameters."""
    params = called[0]
    objective.batch_positions(called)  # refuses fewer arguments
    if objective.loss.rng_argnum is not None:
        called[objective.loss.rng_argnum] = objective.key(called, index, number)
    added = objective.contribution(called, kwargs)
    grads = added.parts["grads"]
    if jax.tree.structure(grads) == jax.tree.structure(params):
        # Where the structures differ, the window says where.
        grads = jax.tree.map(widened, grads, params)
    value = added.parts["value"].astype(dtypes.of_weights(leaf.dtype for leaf in jax.tree.leaves(params)))
    return added._replace(parts=added.parts | {"grads": grads, "value": value})


def over_calls(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    every: int | Callable[[Array], Scalar],
    max_every: int | None,
) -> StepFunctions:
    """One microbatch a call; at the end of a window the replicas exchange, and the optimizer runs."""
    of_gradients = objective.window(every, max_every, has_aux=False)
    with_aux = objective.window(every, max_every, has_aux=True)

    def init(params: Tree, *example: Tree, carry: Tree = None, **kwargs: Tree) -> TrainState:
        params = require_init(objective, params, example, carry, kwargs)
        specs = parts_like(objective, params, carry, example, kwargs)
        window = with_aux if "aux" in specs else of_gradients
        return begun(objective, optimizer, params, window.init(specs), carry)

    def function(params: Tree, state: TrainState, *args: Tree, **kwargs: Tree) -> tuple[Tree, TrainState, StepMetrics]:
        require_tree(args, kwargs)
        state = opened(objective, state)
        params, has_aux = as_arrays(params), holds_aux(state.window)
        window = window_of(state, params)

        def contribute(called: list[Tree], kwargs: dict[str, Tree], position: Tree, own: Tree) -> tuple[Tree, Tree]:
            held, carry = AccumulateState(own[0], *position), own[1]
            if objective.loss.carry_argnum is not None:
                objective.batch_positions(called)  # refuses fewer arguments
                called[objective.loss.carry_argnum] = carry
            added = microbatch(objective, called, kwargs, of_gradients.next(held)[0], of_gradients.number(held))
            if ("aux" in added.parts) != has_aux:
                expected = "a state made by step.init(params, *example), whose example shows the loss's aux"
                raise invalid(expected, f"one made {'with' if has_aux else 'without'} aux")
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
        params = as_arrays(params)
        window, kept = window_of(state, params), (params, state.opt_state)

        def end(position: Tree, rows: Tree, levels: Tree) -> tuple[Tree, Tree]:
            held = window.mark_varying(AccumulateState(levels, *position))
            partial = window.is_partial(held)
            return (partial, window.end(held, partial).step), held.levels

        position = state.window.step, state.window.index
        (partial, ended), levels = on_replicas(objective.over, end, position, own=state.window.levels)
        held = state.window._replace(levels=levels)
        held, (params, opt_state), metrics = window.apply_if(partial, held, close, kept, run_if)
        return params, TrainState(held._replace(step=ended), opt_state, state.carry), metrics

    def close(kept: Tree, combined: dict[str, Tree]) -> tuple[Tree, StepMetrics]:
        (params, opt_state), told = optimize(optimizer, kept[0], kept[1], objective.told(combined))
        return (params, keep_dtypes(opt_state, kept[1])), told

    def window_of(state: TrainState, params: Tree) -> Window:
        return dataclasses.replace(with_aux if holds_aux(state.window) else of_gradients, params=params)

    return init, function, flush


def holds_aux(window: AccumulateState) -> bool:
    """Whether a window has the aux of a loss."""
    # Besides the gradients, the value and the weight, there is one part or more for each reduction of the aux.
    with within(".window"):
        require_state(window)
    level = next(iter(window.levels), None)  # none of a step with microbatches
    parts = getattr(level.value if isinstance(level, NumberedState) else level, "parts", None)
    if not isinstance(parts, tuple):
        received = "none" if level is None else type(level).__name__
        raise invalid("a state that step.init made", received, ".window.levels")
    return len(parts) > 3


def _scalar(dtype: DType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def whole_windows(
    objective: Objective,
    optimizer: optax.GradientTransformationExtraArgs,
    microbatches: int,
    interleaved: bool,
) -> StepFunctions:
    """All microbatches of a window in one call, in a scan; then the replicas exchange, and the optimizer runs."""

    def init(params: Tree, *example: Tree, carry: Tree = None, **kwargs: Tree) -> TrainState:
        params = require_init(objective, params, example, carry, kwargs)
        return begun(objective, optimizer, params, AccumulateState((), np.int32(0), np.int32(0)), carry)

    def function(params: Tree, state: TrainState, *args: Tree, **kwargs: Tree) -> tuple[Tree, TrainState, StepMetrics]:
        require_tree(args, kwargs)
        state = opened(objective, state)
        params, window = as_arrays(params), state.window
        called = loss_arguments(objective, params, state.carry, args)
        objective.batch_positions(called)
        if objective.loss.rng_argnum is not None:
            called[objective.loss.rng_argnum] = objective.key(called, window.index)
        values, carry, _ = scan_window(objective, microbatches, interleaved, called, kwargs)
        (params, opt_state), told = optimize(optimizer, params, state.opt_state, values)
        return params, TrainState(window._replace(index=window.index + 1), opt_state, carry), told

    def flush(params: Tree, state: TrainState) -> tuple[Tree, TrainState, StepMetrics]:
        raise invalid("flush of a step with every: a call with microbatches leaves no partial window", "one")

    return init, function, flush
