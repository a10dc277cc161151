# pyright: standard
"""A whole window in one call: a batch in microbatches, and a scan over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.registry import is_absent, load
from gradcombine.errors import invalid
from gradcombine.integrations.jax.arrays import as_arrays, examples
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.integrations.jax.loss import Form
from gradcombine.integrations.jax.objective_of_terms import ObjectiveOfTerms
from gradcombine.integrations.jax.on_replicas import align, aligned, divided, mark_own
from gradcombine.places.time import whole_window
from gradcombine.reductions.adding import Added
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.feedback import require_none
from gradcombine.reductions.treewise import Treewise
from gradcombine.reductions.weights import parse
from gradcombine.types import AccumulateState, Array, Leaf, Scalar, State, Tree


class Microbatches(NamedTuple):
    """A batch, divided.

    Attributes:
      stacked: the microbatches of full size, along a new first axis.
      rest: the last, smaller one; None where there is none.
      full: how many are stacked.
    """

    stacked: Tree
    rest: Tree | None
    full: int

    @property
    def total(self) -> int:
        return self.full + (self.rest is not None)


def divide(batch: Tree, microbatches: int, interleaved: bool = False) -> Microbatches:
    """Divides n examples into microbatches of ceil(n / microbatches), and a smaller one of what is left.

    A batch that is split over devices is taken as so many blocks. Each block is divided by itself, and a microbatch is
    made of the part that each block gives to it: so no example leaves its device.

    Args:
      batch: a tree of arrays with one first axis.
      microbatches: how many, at most.
      interleaved: whether microbatch i gets the examples i, i + count, ... of a block in place of neighbours.
    """
    n = examples(batch)
    if n == 0:
        raise invalid("a batch of one example or more", "an empty one")
    blocks = math.gcd(n, math.lcm(*(_most_blocks(x) for x in jax.tree.leaves(batch))))
    length = n // blocks
    size = -(-length // microbatches)
    count, rest_size = divmod(length, size)

    def stack(x: Leaf) -> Array:
        full = x.reshape((blocks, length, *x.shape[1:]))[:, : count * size]
        if interleaved:
            parts = full.reshape((blocks, size, count, *x.shape[1:])).swapaxes(1, 2)
        else:
            parts = full.reshape((blocks, count, size, *x.shape[1:]))
        return parts.swapaxes(0, 1).reshape((count, blocks * size, *x.shape[1:]))

    def remaining(x: Leaf) -> Array:
        left = x.reshape((blocks, length, *x.shape[1:]))[:, count * size :]
        return left.reshape((blocks * rest_size, *x.shape[1:]))

    rest = jax.tree.map(remaining, batch) if rest_size else None
    return Microbatches(jax.tree.map(stack, batch), rest, count)


def _most_blocks(x: Leaf) -> int:
    """Over how many devices the first axis of an array may be split.

    Which automatic axes of its mesh that are is not known while tracing: a block for each of their devices does for
    any of them.
    """
    if not isinstance(x, jax.Array):
        return 1
    kind = jax.typeof(x).sharding
    entry = kind.spec[0] if kind.spec else None
    explicit = entry if isinstance(entry, tuple) else (entry,)
    names = [*kind.mesh.auto_axes, *(name for name in explicit if name is not None)]
    return math.prod(kind.mesh.shape[name] for name in names)


class Turn(NamedTuple):
    """An iteration of the scan.

    Attributes:
      number: of the microbatch, an int32 scalar. One of weight 0 is not computed, whatever it holds: another one, whose
        weight is not 0, is computed in its place, and weighs 0.
      weight: scalar, by which the loss is scaled; None where the contribution says it.
    """

    number: Array
    weight: Scalar


def weighed_turns(weigh: Callable[[tuple[Tree, Array]], Tree], examples: Tree, numbers: Array) -> tuple[Turn, Array]:
    """The iterations of stacked microbatches, by ``weigh((microbatch, number))``; and whether all weigh 0."""
    backend = load("jax")

    def weighed(x: tuple[Tree, Array]) -> tuple[Array, Array]:
        weight = jnp.asarray(weigh(x))
        return weight, jnp.asarray(parse(backend, weight).zero)

    weights, zeros = jax.lax.map(weighed, (examples, numbers))
    return Turn(jnp.where(zeros, jnp.argmin(zeros).astype(numbers.dtype), numbers), weights), zeros.all()


def scales_loss(objective: Objective, spec: Contribution, traced: ClosedJaxpr) -> bool:
    """Whether the weight of a microbatch may scale its loss, and mean the same.

    Only a plain sum or mean adds gradients as they come. Narrow floats would round the weight, or overflow by it. And
    where a carry goes through the microbatches, all of them have to be computed, also those that may weigh 0.
    """
    known, loss = spec.known.value, objective.loss
    if not loss.differentiate or known in (0, 1) or (known is None and loss.carry_argnum is not None):
        return False
    leaves = [leaf for leaf in tree.flatten(spec.parts["grads"])[0] if not is_absent(leaf)]
    widest = max((jnp.finfo(leaf.dtype).bits for leaf in leaves), default=0)
    return (
        _adds(objective.reduction)
        and jnp.finfo(spec.parts["value"].dtype).bits >= max(widest, 32)
        and not any(dtype == np.float16 for dtype in _dtypes(traced.jaxpr))
    )


class ScaledGradients(Wrapper):
    """A sum or mean of contributions that are multiplied by their weights already."""

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        totals = self.of.update(state._replace(value=(), dtypes=()), (), weight)
        return self.of.update(state, value)._replace(weight=totals.weight, count=totals.count)


def _adds(reduction: Reduction) -> bool:
    # Wrappers are made for gradients that are not multiplied by their weights yet.
    return isinstance(reduction, Treewise) and isinstance(reduction.cell, Added)


def _dtypes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Of all that is computed."""
    for equation in jaxpr.eqns:
        yield from (getattr(x.aval, "dtype", None) for x in equation.outvars)
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            inner = parameter.jaxpr if isinstance(parameter, ClosedJaxpr) else parameter
            if isinstance(inner, Jaxpr):
                yield from _dtypes(inner)


def scan_microbatches(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Tree], kwargs: dict[str, Tree]
) -> tuple[Reduction, State, Tree, Form]:
    """Combines the microbatches of a batch, one after another, on one replica.

    Returns:
      The reduction of the parts of a `Contribution`, its partial state, the last carry, and the form of the loss.
    """
    positions = objective.batch_positions(args)
    whole = as_arrays(tuple(args[i] for i in positions))
    batch = divide(whole, microbatches, interleaved)
    stacked = batch.stacked
    # Microbatches of one size weigh the same, and 1 is no multiplication.
    default_weight = None if batch.rest is not None else 1
    first = objective.over.rank() * np.int32(batch.total) if objective.loss.rng_argnum is not None else 0

    def arguments(examples: Tree, number: Scalar, carry: Tree) -> list[Tree]:
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

        def weigh_terms(x: tuple[Tree, Tree]) -> Tree:
            return objective.weights_of(arguments(x[0], x[1], begun), kwargs)

        counted = jax.lax.map(weigh_terms, (stacked, numbers)).sum(0)
        if batch.rest is not None:
            counted += weigh_terms((batch.rest, jnp.int32(batch.full)))
        kwargs = objective.with_totals(kwargs, counted)

    def contribution(examples: Tree, number: Scalar, carry: Tree, scale: Scalar = None) -> Contribution:
        return objective.contribution(arguments(examples, number, carry), kwargs, default_weight, scale)

    def example(i: Scalar) -> Tree:
        return jax.tree.map(lambda x: x[i], stacked)

    def begin(examples: Tree, carry: Tree) -> Tree:
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

    def body(before: tuple[Tree, Tree], turn: Turn) -> tuple[tuple[Tree, Tree], None]:
        state, carry = before
        weighs = turn.weight is not None
        added = contribution(example(turn.number), turn.number, carry, turn.weight if weighs else scale)
        return (within.update(state, added.parts, turn.weight if weighs else added.weight), added.carry), None

    def weigh(x: tuple[Tree, Tree]) -> Tree:
        return objective.weight_of(arguments(*x, None), kwargs, default_weight)

    if batch.full == 1:
        (state, carry), _ = body((state, carry), Turn(jnp.int32(0), None))
    elif scaled and scale is None:
        turns, nothing = weighed_turns(weigh, stacked, numbers)
        (after, _), _ = jax.lax.scan(body, (state, carry), turns)
        state = jax.tree.map(lambda new, old: jnp.where(nothing, old, new), after, state)
    else:
        (state, carry), _ = jax.lax.scan(body, (state, carry), Turn(numbers, None))
    if batch.rest is not None:
        added = contribution(batch.rest, jnp.int32(batch.full), carry)
        state, carry = fold.update(state, added.parts, added.weight), added.carry
    return reduction, fold.total(state), carry, spec.form


class _Fold(NamedTuple):
    """One contribution after another, in the objective's order.

    Attributes:
      init: ``init(like) -> state``.
      update: ``update(state, parts, weight) -> state``.
      total: the state as one of the reduction.
    """

    init: Callable[[Tree], State]
    update: Callable[[State, Tree, Scalar], State]
    total: Callable[[State], State]


def _fold(objective: Objective, reduction: Reduction, length: int) -> _Fold:
    if objective.order == "sequential":
        # `accumulate` would ask at each update whether a new window begins, and select: one more pass over memory.
        return _Fold(reduction.init, reduction.update, lambda state: state)
    acc = gc.accumulate(reduction, length, order=objective.order)

    def update(state: AccumulateState, parts: Tree, weight: Scalar) -> AccumulateState:
        return acc.update(parts, state, weight)

    return _Fold(acc.init, update, lambda state: whole_window(reduction, state))


def scan_window(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Tree], kwargs: dict[str, Tree]
) -> tuple[dict[str, Tree], Tree, Form]:
    """Combines the microbatches of a batch, one after another, and then the replicas, by one exchange.

    Returns:
      The parts of a `Contribution`, combined, as `Objective.told` has them; the last carry; and the form of the loss.
    """
    reductions: list[Reduction] = []

    def one(args: list[Tree], kwargs: dict[str, Tree], whole: Tree, carry: Tree) -> tuple[Tree, Tree]:
        """On one replica: the merged state, and what is carried on."""
        if objective.loss.carry_argnum is not None:
            args[objective.loss.carry_argnum] = carry
        reduction, state, carry, form = scan_microbatches(objective, microbatches, interleaved, args, kwargs)
        reductions.append(reduction)
        require_none(state)
        return (gc.merge_replicas(reduction, state, over=objective.over, order=objective.order), form), carry

    others, carry = list(args), None
    if objective.loss.carry_argnum is not None and objective.loss.carry_argnum < len(args):
        others[objective.loss.carry_argnum], carry = None, args[objective.loss.carry_argnum]
    (state, form), carry = objective.on_replicas(one, others, kwargs, own=carry)
    values = divided(objective.over, reductions[0], state, objective.params(args))
    return objective.told(values), carry, form
