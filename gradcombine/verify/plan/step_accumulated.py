# pyright: standard
"""A training step around an accumulating optax optimizer, in two programs: a microbatch, and the last of a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import optax

import gradcombine as gc
from gradcombine.integrations.jax import Loss, LossOutput, value_and_grad
from gradcombine.integrations.optax import accumulate_and_apply, map_replicas
from gradcombine.types import Tree


def accumulated_step(
    loss: Callable[..., Tree] | Loss,
    optimizer: optax.GradientTransformation,
    axis: str,
    divided: Sequence[bool],
    weight: Callable[..., Tree] | None = None,
    **settings: Any,
) -> tuple[Callable[..., Tree], ...]:
    """Returns ``init(params, *example)``, and the compiled programs ``(params, state, *batch) -> params, state``.

    Args:
      loss, optimizer, weight: as for `train_step`.
      axis: the mesh axis of the replicas.
      divided: for each argument of the loss after the parameters, whether it is divided among the replicas.
      settings: of `accumulate_and_apply`.
    """
    over = gc.jax_axis(axis)
    tx = accumulate_and_apply(optimizer, over=over, **settings)
    gradient, task = value_and_grad(loss, 1, weight=weight), Loss.of(loss)
    key = task.rng_argnum

    def returns_weight(x: Tree) -> bool:
        return isinstance(x, LossOutput) and x.weight is not None

    def init(params: Tree, *example: Tree) -> Tree:
        return map_replicas(tx.init, over)(params)

    def step(params: Tree, state: Tree, *batch: Tree, flush: bool) -> tuple[Tree, Tree]:
        if key is not None:  # each replica needs another random key
            own = jax.random.fold_in(batch[key - 1], jax.lax.axis_index(axis))
            batch = (*batch[: key - 1], own, *batch[key:])
        value, grads = gradient(params, *batch)
        # The weight is the number of examples or tokens that the loss of this microbatch is the mean over.
        rows = [x for x, each in zip(batch, divided, strict=True) if each]
        total = weight(*rows) if weight else len(jax.tree.leaves(rows)[0])
        outputs = jax.eval_shape(task.function, params, *batch)
        if any(map(returns_weight, jax.tree.leaves(outputs, is_leaf=returns_weight))):
            total = value.weight
        return tx.apply(grads, state, params, weight=total, flush=flush)

    mapped = map_replicas(step, over, batch_argnums=[2 + i for i, each in enumerate(divided) if each])
    call, flush = (jax.jit(partial(mapped, flush=ends), donate_argnums=(0, 1)) for ends in (False, True))
    return init, call, flush
