"""Merged gradients for Keras optimizers, which sum gradients over the replicas of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from gradcombine.errors import attribute

_UPDATE, _SUM = "_backend_update_step", "_all_reduce_sum_gradients"


@contextmanager
def summed_over_replicas(optimizer: Any) -> Iterator[bool]:
    """Tells a Keras optimizer, within the context, that the gradients are summed over replicas already.

    The method that sums them is private to Keras: it is replaced in optimizers that use Keras' own, while the boundary
    is traced, and the optimizers inside of others are replaced with them.

    Yields:
      Whether this was possible, and all replicas apply the same gradients. If not, the optimizer sums: the gradients
      are for one replica, and zeros for the others.
    """
    optimizers = list(with_inner(optimizer))
    possible = all(map(_sums_as_keras, optimizers))
    if possible:
        for one in optimizers:
            vars(one)[_SUM] = _as_they_are  # not by setattr, which Keras tracks
    try:
        yield possible
    finally:
        if possible:
            for one in optimizers:
                del vars(one)[_SUM]


def has_several(optimizer: Any) -> bool:
    """Whether there is a MultiOptimizer in a chain of optimizers."""
    return any(attribute(x, "optimizers") is not None for x in with_inner(optimizer))


def from_first_replica(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """The gradients, which all replicas have, with zeros on all but the first: for optimizers that sum over replicas.

    What is not finite stays on all of them, so that a LossScaleOptimizer decides the same on each.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return gradients
    first = tf.equal(context.replica_id_in_sync_group, 0)
    return [tf.where(first | ~tf.math.is_finite(x), x, tf.zeros_like(x)) for x in gradients]


def _as_they_are(grads_and_vars: Any) -> Any:
    return grads_and_vars


def with_inner(optimizer: Any) -> Iterator[Any]:
    """An optimizer, those of a MultiOptimizer, and the one inside of a LossScaleOptimizer."""
    yield optimizer
    inner = attribute(optimizer, "inner_optimizer")
    for one in [*([] if inner is None else [inner]), *(attribute(optimizer, "optimizers") or ())]:
        yield from with_inner(one)


def _sums_as_keras(optimizer: Any) -> bool:
    """Whether all that an optimizer does from ``apply`` to the sum is Keras' own, and the sum is in its known place."""
    modules = [str(getattr(attribute(optimizer, x), "__module__", "")) for x in ("apply", _UPDATE, _SUM)]
    updates = [vars(cls).get(_UPDATE) for cls in type(optimizer).__mro__]
    names = [getattr(getattr(x, "__code__", None), "co_names", ()) for x in updates]
    return all(x.startswith("keras.") for x in modules) and any(_SUM in x for x in names)
