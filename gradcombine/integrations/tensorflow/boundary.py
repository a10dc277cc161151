# pyright: standard
"""The optimizer update at the boundary of a window, restricted to variables that have had a gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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
    """Disables, inside the context, the sum over replicas in a Keras optimizer and its inner optimizers.

    Keras' method is private. It is replaced while the boundary is traced, unless an optimizer overrides it.

    Yields:
      Whether the sum is disabled, and all replicas have to apply the same gradients. Otherwise the optimizer sums:
      one replica has to pass the gradients, and the others zeros.
    """
    optimizers = list(with_inner(optimizer))
    can_disable = all(map(_sums_as_keras, optimizers))
    if can_disable:
        for one in optimizers:
            vars(one)[_SUM] = _identity  # not by setattr, which Keras tracks
    try:
        yield can_disable
    finally:
        if can_disable:
            for one in optimizers:
                del vars(one)[_SUM]


def _from_first_replica(gradients: list[tf.Tensor], targets: Sequence[Any]) -> list[tf.Tensor]:
    """Replaces gradients by zeros on all replicas but the first, for optimizers that sum over replicas.

    Nonfinite values are kept, so that a LossScaleOptimizer decides the same on each replica, and gradients that
    replace their variable's value, which Keras does not sum.
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
    """Whether the gradient of a variable replaces its value, as for the scales of Keras' float8 layers."""
    return getattr(target, "overwrite_with_gradient", False)


def _identity(grads_and_vars: Any) -> Any:
    return grads_and_vars


def _sums_as_keras(optimizer: Any) -> bool:
    """Whether an optimizer inherits Keras' ``apply`` and update step, and the latter calls Keras' sum over replicas."""
    modules = [str(getattr(getattr(optimizer, x, None), "__module__", "")) for x in ("apply", _UPDATE, _SUM)]
    updates = [vars(cls).get(_UPDATE) for cls in type(optimizer).__mro__]
    names = [getattr(getattr(x, "__code__", None), "co_names", ()) for x in updates]
    return all(x.startswith("keras.") for x in modules) and any(_SUM in x for x in names)


class Update:
    """Applies combined gradients to variables, by an optimizer or a function.

    Args:
      strategy: the strategy, in whose cross-replica context the methods are called.
      apply: ``apply(gradients, variables)``, if there is no Keras optimizer.
      complete: whether variables without a gradient are passed to the optimizer, with None, about which Keras warns;
        otherwise they are left out. A MultiOptimizer requires all variables.
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
        """Applies the gradients of the variables with these indices; does nothing if there are none.

        Args:
          merged: combined gradients of all variables, on each replica.
          indices: sorted indices of variables.
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
                merged = merged if summed else _from_first_replica(merged, targets)
                gradients = [merged[i] if i in indices else None for i in chosen]
                self._optimizer.apply(gradients, [targets[i] for i in chosen])

            self._strategy.run(apply, args=(merged,))

    def run_where(
        self, touched_now: Callable[[], Array], merged: Sequence[Leaf], known: Collection[int], status: Any = None
    ) -> None:
        """Applies the gradients of the touched variables.

        Args:
          touched_now: returns a boolean vector: whether each variable has had a gradient. Called unless all are known.
          merged, status: as for `run`.
          known: indices of variables that are known to be touched while tracing.
        """
        all_indices = range(len(self._targets))
        if len(known) == len(all_indices):
            self.run(merged, all_indices, status)
            return
        touched = touched_now()
        if tf.executing_eagerly():
            self.run(merged, np.flatnonzero(touched.numpy()).tolist(), status)
            return
        others = [i for i in all_indices if i not in known]
        others_touched = tf.gather(touched, others)

        def run_masked() -> None:
            self._run_masked(touched, merged, others, status)

        def run_partly() -> None:
            if known and self._optimizer is not None and has_several(self._optimizer):
                run_masked()  # Keras raises if an inner optimizer has no gradients
            else:
                tf.cond(tf.reduce_any(others_touched), run_masked, lambda: self.run(merged, sorted(known), status))

        tf.cond(tf.reduce_all(others_touched), lambda: self.run(merged, all_indices, status), run_partly)

    def _run_masked(self, touched: Array, merged: Sequence[Leaf], others: Sequence[int], status: Any) -> None:
        """Applies all gradients, then reverts the update, if it was not skipped, of untouched variables and slots."""
        optimizer = self._optimizer
        before: Any = None if optimizer is None else tf.convert_to_tensor(optimizer.iterations)
        originals = [
            (i, x, value)
            for i in others
            for x, value in without_update(self._optimizer, self._targets[i], tf.convert_to_tensor)
        ]
        # The combined value of no gradients, -inf for a maximum, must not enter a global norm.
        masked = list(merged)
        for i in others:
            masked[i] = self._strategy.run(lambda x, i=i: tf.where(touched[i], x, tf.zeros_like(x)), args=(merged[i],))
        self.run(masked, range(len(self._targets)), status)
        if optimizer is not None:
            touched |= tf.equal(tf.convert_to_tensor(optimizer.iterations), before)  # all kept if skipped
        for i, x, value in originals:
            x.assign(tf.where(touched[i], tf.convert_to_tensor(x), value))
