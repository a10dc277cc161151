# pyright: standard
"""Windows on Keras' TensorFlow backend: one per replica, in variables that are written in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gradcombine.errors import invalid
from gradcombine.integrations.keras.settings import Parts
from gradcombine.integrations.keras.window_variables import KerasWindow, make_variable
from gradcombine.integrations.tensorflow.boundary import Update, overwrites
from gradcombine.integrations.tensorflow.inputs import dense_gradient, require_context, require_synchronous
from gradcombine.integrations.tensorflow.state import Layout, ReplicaState
from gradcombine.places.replicas import tf_replicas
from gradcombine.places.window import Window
from gradcombine.types import AccumulateState, Array, Leaf, Scalar

_NO_SIZES = np.array([np.iinfo(np.int32).max, 0], np.int32)
"""The least and the greatest size of none."""


class TensorflowWindow(KerasWindow):
    """Each replica's window, and the optimizer that is run when they are full.

    Called in replica context, as ``fit`` and strategy.run call an optimizer. The branch at the boundary is taken in
    cross-replica context, which tf.distribute asks of a conditional with a collective inside.
    """

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any]) -> None:
        self._strategy = tf.distribute.get_strategy()
        require_synchronous(self._strategy)
        if isinstance(self._strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise invalid("a strategy with variables on every replica", type(self._strategy).__name__)
        super().__init__(rules, parts, optimizer, variables)
        self.replicas = self._strategy.num_replicas_in_sync
        # Shapes are known as a step runs; a variable takes them out of compiled ones. It is no part of the state.
        self._sizes = make_variable(_NO_SIZES, "sizes")
        *leaves, step, index = [x.value for x in self.leaves]
        position = {"step": step, "index": index}
        levels, everywhere = self.structure.children[0], replace(rules, over=tf_replicas())
        self._windows = ReplicaState(everywhere, levels, leaves, position, self.resumed)
        self._update = Update(self._strategy, None, optimizer, variables, complete=True)
        self._flush_all = tf.function(self._flush_replicas, autograph=False)

    @tf.autograph.experimental.do_not_convert
    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        require_context(self._strategy, of_replicas=True)
        pairs = zip(gradients, self._targets, strict=True)
        true = [self._unscaled(dense_gradient(x, target), target) for x, target in pairs]
        pending, full = self._windows.contributed(self.parts.split(true), weight)
        self._windows.write(pending)
        present = [gradient is not None for gradient in gradients]
        self._mark(present, full, pending.after.index)
        self._seen |= {i for i, chosen in enumerate(present) if chosen}
        _in_cross_replica(self._apply_if, full)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Array:
        if tf.distribute.get_strategy() is self._strategy and not tf.distribute.in_cross_replica_context():
            return self._flush()
        # In a function: strategy.run by itself is slow, and TensorFlow says so.
        return self._flush_all()

    def see(self, size: Scalar, is_first: bool) -> Iterable[int]:
        least, greatest = tf.unstack(tf.convert_to_tensor(self._sizes.value))
        size = tf.cast(size, least.dtype)
        sizes = tf.stack([tf.minimum(least, size), tf.maximum(greatest, size)])
        self._sizes.value.assign(sizes)
        return sizes.numpy().tolist() if tf.executing_eagerly() else ()

    def seen(self) -> Iterable[int]:
        if not tf.executing_eagerly():
            return ()
        found = [x for x in self.values(self._sizes) if x[0] <= x[1]]
        for component in self._components(self._sizes):
            component.assign(_NO_SIZES)
        return (int(min(x[0] for x in found)), int(max(x[1] for x in found))) if found else ()

    def load(self, states: list[AccumulateState], touched: Array) -> None:
        for i, variable in enumerate(self.leaves):
            for component, state in zip(self._components(variable), states, strict=True):
                component.assign(self.arrays(state)[i])
        for component in self._components(self.touched):
            component.assign(touched)

    def checkpointed(self, kind: str) -> Layout:
        return Layout([kind, *(f"{x.dtype}{list(x.shape)}" for x in self.leaves)])

    def values(self, variable: Any) -> list[Leaf]:
        return [x.numpy() for x in self._components(variable)]

    def _components(self, variable: Any) -> list[Leaf]:
        return list(self._strategy.experimental_local_results(variable.value))

    @tf.autograph.experimental.do_not_convert
    def _flush(self) -> Array:
        state = self._windows.unread()
        partial = self.rules.is_partial(self.ended(state))
        _in_cross_replica(self._apply_if, partial)
        self._mark([False] * len(self._targets), partial, state.index)
        return partial

    def _mark(self, present: Sequence[bool], full: Scalar, index: Scalar) -> None:
        self.touched.value.assign(self.marked(present, full, index))

    def _flush_replicas(self) -> Array:
        with self._strategy.scope():
            return self._strategy.experimental_local_results(self._strategy.run(self._flush))[0]

    @tf.autograph.experimental.do_not_convert
    def _apply_if(self, strategy: tf.distribute.Strategy, condition: Scalar) -> None:
        # The windows' lengths are the same on all replicas: they depend on the window's index alone.
        known = sorted(self._seen)

        def apply() -> None:
            merged = strategy.run(self._windows.value)
            merged = self.parts.join(merged)
            if len(known) == len(self._targets):
                self._update.run(merged, known)
                return
            # In another process or trace a variable may have had a gradient, on any replica.
            counts = strategy.reduce("sum", strategy.run(self._marks), axis=None)
            noted = tf.constant([i in self._seen for i in range(len(self._targets))])
            self._update.run_where(noted | (counts > 0), merged, known)

        tf.cond(strategy.experimental_local_results(condition)[0], apply, lambda: None)

    def _marks(self) -> Array:
        return tf.cast(self.touched.value[:-1] > 0, tf.int32)

    def _unscaled(self, gradient: Leaf, target: Any) -> Array:
        """The gradient of this replica's loss, which Keras has divided by the number of replicas that sum theirs."""
        if gradient is None or self.replicas == 1 or not self.parts.reduction.scales_by_weight or overwrites(target):
            return gradient
        return gradient * tf.cast(self.replicas, gradient.dtype)


def _in_cross_replica(function: Callable[..., None], *args: Any) -> None:
    context: Any = tf.distribute.get_replica_context()
    context.merge_call(function, args=args)
