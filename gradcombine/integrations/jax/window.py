"""A whole window in one call: a scan over its microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine.integrations.jax.axes import align, aligned
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.integrations.jax.loss import Form
from gradcombine.integrations.jax.microbatches import divide
from gradcombine.types import AccumulateState, Tree


class Combined(NamedTuple):
    """A window, combined over microbatches and replicas.

    Attributes:
      values: the parts of a `Contribution`, combined.
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
    positions = objective.batch_positions(args)
    batch = divide(objective.operation, tuple(args[i] for i in positions), microbatches, interleaved)
    uneven = batch.rest is not None

    def contribution(examples: Tree, number: Any, carry: Tree) -> Contribution:
        called = list(args)
        for i, x in zip(positions, examples, strict=True):
            called[i] = x
        if objective.carry_argnum is not None:
            called[objective.carry_argnum] = carry
        if objective.rng_argnum is not None:
            called[objective.rng_argnum] = jax.random.fold_in(args[objective.rng_argnum], first + number)
        # Microbatches of one size weigh the same, and 1 is no multiplication.
        return objective.contribution(called, kwargs, None if uneven else 1)

    first = objective.over.rank() * np.int32(batch.total) if objective.rng_argnum is not None else 0
    carry = None if objective.carry_argnum is None else jax.tree.map(jnp.asarray, args[objective.carry_argnum])
    one = jax.tree.map(lambda x: x[0], batch.stacked)
    spec = jax.eval_shape(partial(contribution, number=jnp.int32(0)), one, carry=carry)
    if not aligned(carry, spec.carry):
        carry = align(carry, spec.carry)
        spec = jax.eval_shape(partial(contribution, number=jnp.int32(0)), one, carry=carry)
    window = objective.window(batch.total, has_aux="aux" in spec.parts)
    state = jax.tree.map(jnp.asarray, window.init(spec.parts))
    state = window.own(align(state, jax.eval_shape(window.contribute, state, spec.parts, spec.weight)))

    def body(before: tuple[AccumulateState, Tree], x: tuple[Tree, Any]) -> tuple[tuple[AccumulateState, Tree], None]:
        state, carry = before
        added = contribution(*x, carry)
        return (window.contribute(state, added.parts, added.weight), added.carry), None

    if batch.full == 1:
        (state, carry), _ = body((state, carry), (one, jnp.int32(0)))
    else:
        numbers = jnp.arange(batch.full, dtype=jnp.int32)
        (state, carry), _ = jax.lax.scan(body, (state, carry), (batch.stacked, numbers))
    if uneven:
        added = contribution(batch.rest, jnp.int32(batch.full), carry)
        state, carry = window.contribute(state, added.parts, added.weight), added.carry
    return Combined(window.value(state), carry, spec.form)
