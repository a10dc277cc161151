"""A whole window in one call: a scan over its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import gradcombine as gc
from gradcombine.integrations.jax.arrays import as_arrays
from gradcombine.integrations.jax.contribution import Contribution, Form, Objective
from gradcombine.integrations.jax.microbatches import divide
from gradcombine.integrations.jax.objective_of_terms import ObjectiveOfTerms
from gradcombine.integrations.jax.on_replicas import align, aligned, divided, mark_own
from gradcombine.integrations.jax.scaled_loss import ScaledGradients, Turn, scales_loss, scan_turns
from gradcombine.places.time import whole_window
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, State, Tree


class Scanned(NamedTuple):
    """A window, combined over the microbatches of one replica.

    Attributes:
      reduction: of the parts of a `Contribution`.
      state: its partial state.
      carry: of the last microbatch.
      form: how the loss returned its value.
    """

    reduction: Reduction
    state: State
    carry: Tree
    form: Form


def scan_microbatches(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> Scanned:
    """Combines the microbatches of a batch, one after another."""
    positions = objective.batch_positions(args)
    whole = as_arrays(objective.operation, tuple(args[i] for i in positions))
    batch = divide(objective.operation, whole, microbatches, interleaved)
    stacked = batch.stacked
    # Microbatches of one size weigh the same, and 1 is no multiplication.
    default_weight = None if batch.rest is not None else 1
    first = objective.over.rank() * np.int32(batch.total) if objective.loss.rng_argnum is not None else 0

    def arguments(examples: Tree, number: Any, carry: Tree) -> list[Any]:
        called = list(args)
        for i, x in zip(positions, examples, strict=True):
            called[i] = x
        if objective.loss.carry_argnum is not None:
            called[objective.loss.carry_argnum] = carry
        if objective.loss.rng_argnum is not None:
            called[objective.loss.rng_argnum] = objective.key(args, first + number)
        return called

    numbers = jnp.arange(batch.full, dtype=jnp.int32)
    if isinstance(objective, ObjectiveOfTerms) and objective.counts:
        begun = None if objective.loss.carry_argnum is None else args[objective.loss.carry_argnum]

        def weigh_terms(x: tuple[Tree, Any]) -> Any:
            return objective.weights_of(arguments(x[0], x[1], begun), kwargs)

        counted = jax.lax.map(weigh_terms, (stacked, numbers)).sum(0)
        if batch.rest is not None:
            counted += weigh_terms((batch.rest, jnp.int32(batch.full)))
        kwargs = objective.with_totals(kwargs, counted)

    def contribution(examples: Tree, number: Any, carry: Tree, scale: Any = None) -> Contribution:
        return objective.contribution(arguments(examples, number, carry), kwargs, default_weight, scale)

    def example(i: Any) -> Tree:
        return jax.tree.map(lambda x: x[i], stacked)

    def begin(examples: Tree, carry: Tree) -> Any:
        """A first contribution, the empty state, and the state after it."""
        added = contribution(examples, jnp.int32(0), carry)
        fold = _fold(objective, objective.combined("aux" in added.parts), batch.total)
        empty = fold.init(added.parts)
        return added, empty, fold.update(empty, added.parts, added.weight)

    at = objective.loss.carry_argnum
    carry = None if at is None else jax.tree.map(jnp.asarray, args[at])
    traced, (spec, _, after) = jax.make_jaxpr(begin, return_shape=True)(example(0), carry)
    if not aligned(carry, spec.carry):
        carry = align(carry, spec.carry)
        traced, (spec, _, after) = jax.make_jaxpr(begin, return_shape=True)(example(0), carry)
    reduction = objective.combined("aux" in spec.parts)
    fold = _fold(objective, reduction, batch.total)
    state = mark_own(objective.over, align(jax.tree.map(jnp.asarray, fold.init(spec.parts)), after))
    scaled = batch.full > 1 and scales_loss(objective, spec, traced)
    within = fold
    if scaled:
        within = _fold(objective, objective.combined("aux" in spec.parts, ScaledGradients), batch.total)
    scale = spec.known.value if scaled else None

    def body(before: tuple[Any, Tree], number: Any) -> tuple[tuple[Any, Tree], None]:
        state, carry = before
        added = contribution(example(number), number, carry, scale)
        return (within.update(state, added.parts, added.weight), added.carry), None

    def weigh(x: tuple[Tree, Any]) -> Any:
        return objective.weight_of(arguments(*x, None), kwargs, default_weight)

    def update(state: Any, turn: Turn) -> Any:
        added = contribution(example(turn.number), turn.number, None, turn.weight)
        return within.update(state, added.parts, turn.weight)

    if batch.full == 1:
        (state, carry), _ = body((state, carry), jnp.int32(0))
    elif scaled and scale is None:
        state = scan_turns(objective.operation, weigh, update, state, (stacked, numbers))
    else:
        (state, carry), _ = jax.lax.scan(body, (state, carry), numbers)
    if batch.rest is not None:
        added = contribution(batch.rest, jnp.int32(batch.full), carry)
        state, carry = fold.update(state, added.parts, added.weight), added.carry
    return Scanned(reduction, fold.total(state), carry, spec.form)


class _Fold(NamedTuple):
    """One contribution after another, in the objective's order.

    Attributes:
      init: ``init(like) -> state``.
      update: ``update(state, parts, weight) -> state``.
      total: the state as one of the reduction.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Any, Tree, Any], Any]
    total: Callable[[Any], State]


def _fold(objective: Objective, reduction: Reduction, length: int) -> _Fold:
    if objective.order == "sequential":
        # `accumulate` would ask at each update whether a new window begins, and select: one more pass over memory.
        return _Fold(reduction.init, reduction.update, lambda state: state)
    acc = gc.accumulate(reduction, length, order=objective.order)

    def update(state: AccumulateState, parts: Tree, weight: Any) -> AccumulateState:
        return acc.update(parts, state, weight)

    return _Fold(acc.init, update, lambda state: whole_window(reduction, state))


class Combined(NamedTuple):
    """A window, combined over microbatches and replicas.

    Attributes:
      values: the parts of a `Contribution`, combined, as `Objective.told` has them.
      carry: of the last microbatch.
      form: how the loss returned its value.
    """

    values: dict[str, Tree]
    carry: Tree
    form: Form


def scan_window(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> Combined:
    """Combines the microbatches of a batch, one after another, and then the replicas, by one exchange."""
    reductions: list[Reduction] = []

    def one(args: list[Any], kwargs: dict[str, Any], whole: Tree, carry: Tree) -> tuple[Any, Tree]:
        """On one replica: the merged state, and what is carried on."""
        if objective.loss.carry_argnum is not None:
            args[objective.loss.carry_argnum] = carry
        reduction, state, carry, form = scan_microbatches(objective, microbatches, interleaved, args, kwargs)
        reductions.append(reduction)
        return (gc.merge_replicas(reduction, state, over=objective.over, order=objective.order), form), carry

    others, carry = list(args), None
    if objective.loss.carry_argnum is not None and objective.loss.carry_argnum < len(args):
        others[objective.loss.carry_argnum], carry = None, args[objective.loss.carry_argnum]
    (state, form), carry = objective.on_replicas(one, others, kwargs, own=carry)
    values = divided(objective.operation, objective.over, reductions[0], state, objective.params(args))
    return Combined(objective.told(values), carry, form)
