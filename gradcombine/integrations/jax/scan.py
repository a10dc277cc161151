# pyright: standard
"""A full window in one call: divides a batch into microbatches and scans over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

import gradcombine as gc
from gradcombine import tree
from gradcombine.backends.jax_backend import BACKEND, replaced
from gradcombine.errors import invalid
from gradcombine.integrations.jax.arrays import as_arrays, examples, require_carry, with_jax_arrays
from gradcombine.integrations.jax.jax_window import align, is_aligned
from gradcombine.integrations.jax.loss import Form, Static, batch_positions, folded_key
from gradcombine.integrations.jax.objective import Contribution, Objective
from gradcombine.integrations.jax.on_replicas import axes_of, finalized, mark_varying
from gradcombine.places.time import whole_window
from gradcombine.reductions.adding import Added
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.feedback import require_none
from gradcombine.reductions.treewise import Treewise
from gradcombine.reductions.weights import parse
from gradcombine.types import AccumulateState, Array, Leaf, Scalar, State, Tree


class Microbatches(NamedTuple):
    """A batch divided into microbatches.

    Attributes:
      stacked: the microbatches of full size, along a new first axis.
      rest: the last, smaller microbatch; None if all are of full size.
      full: the number of stacked microbatches.
    """

    stacked: Tree
    rest: Tree | None
    full: int

    @property
    def total(self) -> int:
        return self.full + (self.rest is not None)


def divide(batch: Tree, microbatches: int, interleaved: bool = False) -> Microbatches:
    """Divides n examples into microbatches of ceil(n / microbatches), the last of which may be smaller.

    A batch that is sharded over devices consists of one block per device. Each block is divided separately, and a
    microbatch concatenates one part of each block, so that no example leaves its device.

    Args:
      batch: a tree of arrays whose first axes have the same length.
      microbatches: their largest number.
      interleaved: whether microbatch i gets the examples i, i + count, ... of a block instead of consecutive ones.
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
    """Largest number of devices that the first axis of an array may be sharded over.

    Counts all automatic axes of the mesh, since it is unknown while tracing which of them shard the array: blocks that
    are smaller than a device's shard work as well.
    """
    if not isinstance(x, jax.Array):
        return 1
    sharding = jax.typeof(x).sharding
    names = [*sharding.mesh.auto_axes, *(axes_of(sharding.spec[0]) if sharding.spec else ())]
    return math.prod(sharding.mesh.shape[name] for name in names)


class Iteration(NamedTuple):
    """An iteration of the scan.

    Attributes:
      number: number of the microbatch, an int32 scalar. In place of a microbatch of weight 0, which may contain
        anything, another one of nonzero weight is computed, with weight 0.
      weight: scalar that scales the loss; None to take the weight from the contribution.
    """

    number: Array
    weight: Scalar


def weighed_iterations(
    weigh: Callable[[tuple[Tree, Array]], Tree], examples: Tree, numbers: Array
) -> tuple[Iteration, Array]:
    """Iterations over stacked microbatches of weight ``weigh((microbatch, number))``; and whether all weights are 0."""

    def weighed(x: tuple[Tree, Array]) -> tuple[Array, Array]:
        weight = jnp.asarray(weigh(x))
        return weight, jnp.asarray(parse(BACKEND, weight).zero)

    weights, zeros = jax.lax.map(weighed, (examples, numbers))
    return Iteration(jnp.where(zeros, jnp.argmin(zeros).astype(numbers.dtype), numbers), weights), zeros.all()


FLOAT32_EXPONENT = jnp.finfo(jnp.float32).maxexp
"""Exponent of overflow in float32, and in bfloat16."""


def scales_loss(objective: Objective, spec: Contribution, trace: Callable[[], ClosedJaxpr]) -> bool:
    """Whether the weight of a microbatch can scale its loss instead of its gradients.

    Requires a plain sum or mean, as other reductions process each gradient first, no parameters or values in narrow
    floats, which would round the weight or overflow, and no custom_vjp or linear_call, whose backward pass may clip or
    quantize. With a carry, all microbatches have to be computed, even those that may have weight 0.

    Args:
      trace: traces the loss, without its derivative.
    """
    known_weight, loss = spec.known.value, objective.loss
    if not loss.differentiate or objective.has_ratios or known_weight in (0, 1):
        return False
    if known_weight is None and loss.carry_argnum is not None:
        return False
    dtypes = [leaf.dtype for _, leaf in tree.present(spec.parts["grads"])]
    widest = max((jnp.finfo(dtype).bits for dtype in dtypes), default=0)
    return (
        isinstance(objective.reduction, Treewise)  # no wrapper, which would expect unweighted gradients
        and isinstance(objective.reduction.cell, Added)
        and jnp.finfo(spec.parts["value"].dtype).bits >= max(widest, 32)
        and all(map(_has_range, dtypes))
        and all(_is_linear(equation) for equation in _equations(trace().jaxpr))
    )


class ScaledGradients(Wrapper):
    """A sum or mean of contributions that have been multiplied by their weights already."""

    def update(self, state: State, value: Tree, weight: Scalar = 1) -> State:
        totals = self.of.update(state._replace(value=(), dtypes=()), (), weight)
        return self.of.update(state, value)._replace(weight=totals.weight, count=totals.count)


def _is_linear(equation: JaxprEqn) -> bool:
    """Whether the backward pass of an equation is linear up to rounding, also for cotangents of another scale."""
    name, dtypes = equation.primitive.name, [getattr(x.aval, "dtype", np.int32) for x in equation.outvars]
    if name == "reduce_precision" and equation.params["exponent_bits"] < 8:  # fewer than float32
        return False
    return all(map(_has_range, dtypes)) and not name.startswith(("custom_vjp_call", "linear_call"))


def _has_range(dtype: Any) -> bool:
    """Whether a dtype has the range of float32, if it is one of real floats."""
    return not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).maxexp >= FLOAT32_EXPONENT


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a program, and those of its inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, (Jaxpr, ClosedJaxpr))):
            inner = parameter.jaxpr if isinstance(parameter, ClosedJaxpr) else parameter
            if isinstance(inner, Jaxpr):
                yield from _equations(inner)


def scan_microbatches(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Tree], kwargs: dict[str, Tree]
) -> tuple[Reduction, State, Tree, Form]:
    """Combines the microbatches of a batch, one after another, on one replica.

    Returns:
      The reduction of the parts of a `Contribution`, its partial state, the last carry, and the form of the loss.
    """
    loss, at = objective.loss, batch_positions(objective.loss, args)
    args, kwargs = [*map(with_jax_arrays, args)], {name: with_jax_arrays(x) for name, x in kwargs.items()}
    batch = divide(as_arrays(tuple(args[i] for i in at)), microbatches, interleaved)
    stacked = batch.stacked
    # Microbatches of equal size have equal weights, and 1 avoids a multiplication.
    default_weight = None if batch.rest is not None else 1
    first = objective.over.rank() * np.int32(batch.total) if loss.rng_argnum is not None else 0
    carry = None if loss.carry_argnum is None else args[loss.carry_argnum]

    def arguments(examples: Tree, number: Scalar, carry: Tree) -> list[Tree]:
        loss_args = replaced(args, at, examples)
        if loss.carry_argnum is not None:
            loss_args[loss.carry_argnum] = carry
        if loss.rng_argnum is not None:
            loss_args[loss.rng_argnum] = folded_key(loss, args, first + number)
        return loss_args

    numbers = jnp.arange(batch.full, dtype=jnp.int32)
    if objective.terms is not None and loss.totals == "counted":
        terms, initial_carry = objective.terms, carry

        def weigh_terms(x: tuple[Tree, Tree]) -> Tree:
            return objective.denominators(terms, arguments(x[0], x[1], initial_carry), kwargs)

        totals = jax.lax.map(weigh_terms, (stacked, numbers)).sum(0)
        if batch.rest is not None:
            totals += weigh_terms((batch.rest, jnp.int32(batch.full)))
        kwargs = objective.with_totals(terms, kwargs, totals)

    def contribution(examples: Tree, number: Scalar, carry: Tree, scale: Scalar = None) -> Contribution:
        return objective.contribution(arguments(examples, number, carry), kwargs, default_weight, scale)

    def example(i: Scalar) -> Tree:
        return jax.tree.map(lambda x: x[i], stacked)

    def first_update(examples: Tree, carry: Tree) -> Tree:
        """A contribution, and the state after it; evaluated abstractly only."""
        added = contribution(examples, jnp.int32(0), carry)
        init, update, _ = _fold(objective, objective.parts_reduction("aux" in added.parts), batch.total)
        return added, update(init(added.parts), added.parts, added.weight)

    carry = jax.tree.map(jnp.asarray, carry)
    spec, after = jax.eval_shape(first_update, example(0), carry)
    require_carry(spec.carry, carry)
    if not is_aligned(carry, spec.carry):
        carry = align(carry, spec.carry)
        spec, after = jax.eval_shape(first_update, example(0), carry)
    reduction = objective.parts_reduction("aux" in spec.parts)
    init, update, total = _fold(objective, reduction, batch.total)
    state = mark_varying(objective.over, align(jax.tree.map(jnp.asarray, init(spec.parts)), after))

    def trace_loss() -> ClosedJaxpr:
        def value(examples: Tree) -> Array:
            return objective.run(objective.marked(arguments(examples, jnp.int32(0), carry)), kwargs)[0].value

        return jax.make_jaxpr(value)(example(0))

    scaled, scan_update = batch.full > 1 and scales_loss(objective, spec, trace_loss), update
    if scaled:
        wrapped = objective.parts_reduction("aux" in spec.parts, ScaledGradients)
        _, scan_update, _ = _fold(objective, wrapped, batch.total)
    scale = spec.known.value if scaled else None

    def body(state_and_carry: tuple[Tree, Tree], iteration: Iteration) -> tuple[tuple[Tree, Tree], None]:
        state, carry = state_and_carry
        number, weight = iteration
        added = contribution(example(number), number, carry, scale if weight is None else weight)
        state = scan_update(state, added.parts, added.weight if weight is None else weight)
        return (state, added.carry), None

    def weigh(x: tuple[Tree, Tree]) -> Tree:
        return objective.weight_of(arguments(*x, None), kwargs, default_weight)

    if batch.full == 1:
        (state, carry), _ = body((state, carry), Iteration(jnp.int32(0), None))
    elif scaled and scale is None:
        iterations, all_zero = weighed_iterations(weigh, stacked, numbers)
        (after, _), _ = jax.lax.scan(body, (state, carry), iterations)
        state = jax.tree.map(lambda new, old: jnp.where(all_zero, old, new), after, state)
    else:
        (state, carry), _ = jax.lax.scan(body, (state, carry), Iteration(numbers, None))
    if batch.rest is not None:
        added = contribution(batch.rest, jnp.int32(batch.full), carry)
        state, carry = update(state, added.parts, added.weight), added.carry
    return reduction, total(state), carry, spec.form


def _fold(objective: Objective, reduction: Reduction, length: int) -> tuple[Callable[..., State], ...]:
    """Functions that combine contributions one after another, in the objective's order.

    Returns:
      ``init(like) -> state``; ``update(state, parts, weight) -> state``; and ``total(state)``, which converts the state
      to one of the reduction.
    """
    if objective.order == "sequential":
        # `accumulate` would select between old and new window in each update: one more pass over memory.
        return reduction.init, reduction.update, lambda state: state
    acc = gc.accumulate(reduction, length, order=objective.order)

    def update(state: AccumulateState, parts: Tree, weight: Scalar) -> AccumulateState:
        return acc.update(parts, state, weight)

    return acc.init, update, lambda state: whole_window(reduction, state)


def scan_window(
    objective: Objective, microbatches: int, interleaved: bool, args: Sequence[Tree], kwargs: dict[str, Tree]
) -> tuple[dict[str, Tree], Tree, Form]:
    """Combines the microbatches of a batch one after another, and then the replicas by one all-reduce.

    Returns:
      The combined parts of the contributions; the last carry; and the form of the loss.
    """

    def on_one(args: list[Tree], kwargs: dict[str, Tree], shared: Tree, local: Tree) -> tuple[Tree, Tree, Tree]:
        reduction, state, carry, form = scan_microbatches(objective, microbatches, interleaved, args, kwargs)
        require_none(state)
        merged = gc.merge_replicas(reduction, state, over=objective.over, order=objective.order)
        return (merged, form, Static(reduction)), (), carry

    (state, form, reduction), _, carry = objective.on_replicas(on_one, args, kwargs)
    return finalized(objective.over, reduction.value, state, objective.params(args)), carry, form
