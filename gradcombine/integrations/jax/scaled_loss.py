"""Weights that scale the loss before it is differentiated, so that gradients are added as they come.

A gradient that is multiplied, or masked, on its way into the accumulator is written to memory and read again. One that
is only added is not: XLA lets the product that makes it add to the accumulator. And it moves the exchange of such
gradients out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from gradcombine import tree
from gradcombine.backends.registry import is_absent, load
from gradcombine.integrations.jax.contribution import Contribution, Objective
from gradcombine.reductions.adding import Added
from gradcombine.reductions.algebra import Reduction, Wrapper
from gradcombine.reductions.treewise import Treewise
from gradcombine.reductions.weights import parse
from gradcombine.types import Array, State, Tree


class Turn(NamedTuple):
    """Result of one iteration of the scan.

    Attributes:
      number: of the microbatch, an int32 scalar. One of weight 0 is not computed, whatever it holds: another one, whose
        weight is not 0, is computed in its place, and weighs 0.
      weight: of the turn; scalar.
    """

    number: Array
    weight: Array


def scan_turns(
    operation: str,
    weigh: Callable[[tuple[Tree, Array]], Any],
    update: Callable[[State, Turn], State],
    state: State,
    xs: tuple[Tree, Array],
) -> State:
    """The state after all turns of a window; as it was, where all of them weigh 0.

    Args:
      operation: what error messages call the caller.
      weigh: ``weigh((microbatch, number)) -> weight``.
      update: ``update(state, turn) -> state``.
      state: before the first turn.
      xs: the microbatches and their numbers, stacked.
    """
    backend, numbers = load("jax"), xs[1]

    def weighed(x: tuple[Tree, Array]) -> tuple[Array, Array]:
        weight = jnp.asarray(weigh(x))
        return weight, jnp.asarray(parse(operation, backend, weight).is_zero(backend))

    weights, zeros = jax.lax.map(weighed, xs)
    turns = Turn(jnp.where(zeros, jnp.argmin(zeros).astype(numbers.dtype), numbers), weights)
    after, _ = jax.lax.scan(lambda state, turn: (update(state, turn), None), state, turns)
    return jax.tree.map(lambda new, old: jnp.where(zeros.all(), old, new), after, state)


def scales_loss(objective: Objective, spec: Contribution, traced: ClosedJaxpr) -> bool:
    """Whether the weight of a microbatch may scale its loss, and mean the same.

    Only a plain sum or mean adds gradients as they come. Narrow floats would round the weight, or overflow by it. And
    where a carry goes through the microbatches, all of them have to be computed, also those that may weigh 0.
    """
    known, loss = spec.known.value, objective.loss
    if not loss.differentiate or known in (0, 1) or (known is None and loss.carry_argnum is not None):
        return False
    leaves = [leaf for leaf in tree.flatten(objective.operation, spec.parts["grads"])[0] if not is_absent(leaf)]
    widest = max((jnp.finfo(leaf.dtype).bits for leaf in leaves), default=0)
    return (
        _adds(objective.reduction)
        and jnp.finfo(spec.parts["value"].dtype).bits >= max(widest, 32)
        and not any(dtype == np.float16 for dtype in _dtypes(traced.jaxpr))
    )


class ScaledGradients(Wrapper):
    """A sum or mean of contributions that are multiplied by their weights already."""

    def update(self, state: State, value: Tree, weight: Any = 1) -> State:
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
