# pyright: standard
"""The optimizer's run at the boundary, on merged gradients, for the variables that have had one and no others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from gradcombine.integrations.keras_optimizers import has_several, with_inner, without_update
from gradcombine.integrations.tensorflow.state import converted
from gradcombine.types import Array, Leaf

_UPDATE, _SUM = "_backend_update_step", "_all_reduce_sum_gradients"


@contextmanager
def _summed_over_replicas(optimizer: Any) -> Iterator[bool]:
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


def _from_first_replica(gradients: list[tf.Tensor], targets: Sequence[Any]) -> list[tf.Tensor]:
    """The gradients, which all replicas have, with zeros on all but the first: for optimizers that sum over replicas.

    What is not finite stays on all of them, so that a LossScaleOptimizer decides the same on each; and what takes its
    variable's place, which Keras does not sum.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return gradients
    first = tf.equal(context.replica_id_in_sync_group, 0)
    return [
        x if overwrites(target) else tf.where(first | ~tf.math.is_finite(x), x, tf.zeros_like(x))
        for x, target in zip(gradients, targets, strict=True)
    ]


def overwrites(target: Any) -> bool:
    """Whether the gradient of a variable takes its place, as of the scales of Keras' float8 layers."""
    return getattr(target, "overwrite_with_gradient", False)


def _as_they_are(grads_and_vars: Any) -> Any:
    return grads_and_vars


def _sums_as_keras(optimizer: Any) -> bool:
    """Whether all that an optimizer does from ``apply`` to the sum is Keras' own, and the sum is in its known place."""
    modules = [str(getattr(getattr(optimizer, x, None), "__module__", "")) for x in ("apply", _UPDATE, _SUM)]
    updates = [vars(cls).get(_UPDATE) for cls in type(optimizer).__mro__]
    names = [getattr(getattr(x, "__code__", None), "co_names", ()) for x in updates]
    return all(x.startswith("keras.") for x in modules) and any(_SUM in x for x in names)


class Update:
    """The update that a step applies to its variables.

    Args:
      strategy: in whose cross-replica context the methods are called.
      apply: ``apply(gradients, variables)``, where there is no optimizer.
      optimizer: of Keras, or None.
      targets: all variables.
      complete: whether the optimizer gets None for variables without a gradient, and warns; else it does not get them.
        A MultiOptimizer takes no fewer than all variables.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        apply: Any,
        optimizer: Any,
        targets: Sequence[Any],
        complete: bool = False,
    ) -> None:
        self._strategy, self._apply, self._optimizer, self._targets = strategy, apply, optimizer, list(targets)
        self._complete = complete or has_several(optimizer)

    def run(self, merged: Sequence[Leaf], indices: Collection[int], status: Any = None) -> None:
        """Applies the gradients of the variables of these indices; nothing where there are none.

        Args:
          merged: the combined gradients of all variables, of each replica.
          indices: in order.
          status: as for `converted`.
        """
        if not indices:
            return
        targets = self._targets
        if self._optimizer is None:
            gradients = [self._strategy.experimental_local_results(merged[i])[0] for i in indices]
            with self._strategy.scope():
                converted(self._apply, status)(gradients, [targets[i] for i in indices])
            return
        chosen = range(len(targets)) if self._complete else indices
        with _summed_over_replicas(self._optimizer) as summed:

            def apply(merged: list[Leaf]) -> None:
                whole = merged if summed else _from_first_replica(merged, targets)
                gradients = [whole[i] if i in indices else None for i in chosen]
                self._optimizer.apply(gradients, [targets[i] for i in chosen])

            self._strategy.run(apply, args=(merged,))

    def run_where(self, touched: Array, merged: Sequence[Leaf], known: Collection[int], status: Any = None) -> None:
        """Applies the gradients of the variables that have had one, which is decided where the graph runs.

        Args:
          touched: whether each of the variables has, a boolean vector.
          merged, status: as for `run`.
          known: those of which it is known while tracing that they have.
        """
        everything = range(len(self._targets))
        if tf.executing_eagerly():
            self.run(merged, np.flatnonzero(touched.numpy()).tolist(), status)
            return
        others = [i for i in everything if i not in known]
        has = tf.gather(touched, others)
        tf.cond(
            tf.reduce_all(has),
            lambda: self.run(merged, everything, status),
            lambda: tf.cond(
                tf.reduce_any(has),
                lambda: self._run_mixed(touched, merged, others, status),
                lambda: self.run(merged, sorted(known), status),
            ),
        )

    def _run_mixed(self, touched: Array, merged: Sequence[Leaf], others: Sequence[int], status: Any) -> None:
        """Applies all gradients, and takes back what that has done to variables without one, and to their slots."""
        kept = [
            (i, x, value)
            for i in others
            for x, value in without_update(self._optimizer, self._targets[i], tf.convert_to_tensor)
        ]
        # A maximum over nothing, say, is no number that a norm over all gradients may hold.
        given = list(merged)
        for i in others:
            given[i] = self._strategy.run(lambda x, i=i: tf.where(touched[i], x, tf.zeros_like(x)), args=(merged[i],))
        self.run(given, range(len(self._targets)), status)
        for i, x, value in kept:
            x.assign(tf.where(touched[i], tf.convert_to_tensor(x), value))
