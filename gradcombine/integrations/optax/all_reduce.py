"""The all-reduce of updates as an optax transformation."""

from __future__ import annotations

from typing import Any

import optax

import gradcombine as gc
from gradcombine.backends.protocol import Collective
from gradcombine.errors import require_collective, require_order
from gradcombine.reductions.algebra import Reduction, require_reduction
from gradcombine.types import Order


def all_reduce(
    reduction: Reduction | None = None, *, over: Collective, order: Order = "sequential"
) -> optax.GradientTransformationExtraArgs:
    """Combines the updates of all replicas, at every step.

    Args:
      reduction: from `gradcombine.reductions`; None: their mean.
      over, order: as for `gradcombine.all_reduce`.

    Returns:
      A transformation without state. Its ``update`` takes ``weight=``, this replica's, as an extra argument.

    Raises:
      GradCombineError: as `gradcombine.all_reduce`.

    Bits: those of `gradcombine.all_reduce`.

    References: `optax.GradientTransformationExtraArgs
    <https://optax.readthedocs.io/en/latest/api/transformations.html>`_.

    >>> import gradcombine as gc, jax, jax.numpy as jnp, optax
    >>> from gradcombine.integrations.optax import all_reduce
    >>> tx = optax.chain(all_reduce(over=gc.jax_axis("data")), optax.sgd(1.0))
    >>> def step(grads, examples):
    ...     return tx.update(grads, tx.init(grads), weight=examples)[0]
    >>> jax.vmap(step, axis_name="data")(jnp.float32([1, 5]), jnp.float32([3, 1])).tolist()
    [-2.0, -2.0]
    """
    reduction = gc.reductions.mean() if reduction is None else reduction
    require_reduction("all_reduce", reduction)
    require_order("all_reduce", order)
    require_collective("all_reduce", over)

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates, state: optax.OptState, params: Any = None, *, weight: Any = 1.0, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        del params, extra_args
        return gc.all_reduce(reduction, updates, over=over, weight=weight, order=order), state

    return optax.GradientTransformationExtraArgs(init, update)
