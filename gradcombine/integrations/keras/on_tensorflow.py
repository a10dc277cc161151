# pyright: standard
"""Windows on Keras' TensorFlow backend: one per replica, in variables that are updated in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from gradcombine.errors import invalid, operation
from gradcombine.integrations.keras.settings import Parts
from gradcombine.integrations.keras.window_variables import KerasWindow, is_pending, make_variable
from gradcombine.integrations.tensorflow.boundary import Update, overwrites
from gradcombine.integrations.tensorflow.inputs import dense_gradients, require_context, require_synchronous
from gradcombine.integrations.tensorflow.state import Layout, ReplicaState, run_after
from gradcombine.places.replicas import tf_replicas
from gradcombine.places.window import Window
from gradcombine.types import Array, Leaf, Scalar

_NO_SIZES = np.array([np.iinfo(np.int32).max, 0], np.int32)
"""Minimum and maximum of no sizes."""


class TensorflowWindow(KerasWindow):
    """One window per replica; see `KerasWindow`.

    Called in replica context, as ``fit`` and strategy.run call an optimizer. The conditional at the boundary is in
    cross-replica context, as tf.distribute requires if there are collectives inside.
    """

    def __init__(self, rules: Window, parts: Parts, optimizer: Any, variables: Sequence[Any], description: str) -> None:
        self._strategy = tf.distribute.get_strategy()
        require_synchronous(self._strategy)
        if isinstance(self._strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise invalid("a strategy with variables on every replica", type(self._strategy).__name__)
        super().__init__(rules, parts, optimizer, variables, description)
        self.replicas = self._strategy.num_replicas_in_sync
        # Batch sizes may be dynamic in a compiled step: a variable, which is not part of the state, records them.
        self._sizes = make_variable(_NO_SIZES, "sizes")
        *leaves, step, index = [x.value for x in self.leaves]
        position = {"step": step, "index": index}
        over_replicas = replace(rules, over=tf_replicas())
        levels = self.structure.children[0]
        self._windows = ReplicaState(
            over_replicas, levels, leaves, position, lambda state: self.resumed(state, self.touched.value)
        )
        self._update = Update(self._strategy, None, optimizer, variables, complete=True)
        self._flush_all = tf.function(self._flush_replicas, autograph=False)

    @tf.autograph.experimental.do_not_convert
    def contribute(self, gradients: list[Leaf], weight: Scalar) -> None:
        require_context(self._strategy, of_replicas=True)
        pairs = zip(dense_gradients(gradients, self._targets), self._targets, strict=True)
        unscaled = [self._unscaled(x, target) for x, target in pairs]
        pending, full = self._windows.contributed(self.parts.split(unscaled), weight)
        present = {i for i, gradient in enumerate(gradients) if gradient is not None}
        # All replicas compute before any of them writes: a failure on one leaves all windows unchanged.
        context: Any = tf.distribute.get_replica_context()
        with run_after([context.merge_call(lambda strategy: tf.constant(0))]):
            self._windows.write(pending)
            self.touched.value.assign(self.marked(present, full, pending.after.index))
        self._apply_if(full, present)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Array:
        if tf.distribute.get_strategy() is self._strategy and not tf.distribute.in_cross_replica_context():
            return self._flush()
        # In a tf.function: TensorFlow warns that an eager strategy.run is slow.
        return self._flush_all()

    @staticmethod
    def is_tracing() -> bool:
        return not tf.executing_eagerly()

    def record_size(self, size: Scalar, is_first: bool) -> Iterable[int]:
        low, high = tf.unstack(tf.convert_to_tensor(self._sizes.value))
        size = tf.cast(size, low.dtype)
        sizes = tf.stack([tf.minimum(low, size), tf.maximum(high, size)])
        self._sizes.value.assign(sizes)
        return sizes.numpy().tolist() if tf.executing_eagerly() else ()

    def take_sizes(self) -> Iterable[int]:
        if not tf.executing_eagerly():
            return ()
        ranges = [(low, high) for low, high in self.values(self._sizes) if low <= high]
        for component in self.components(self._sizes):
            component.assign(_NO_SIZES)
        return (int(min(low for low, _ in ranges)), int(max(high for _, high in ranges))) if ranges else ()

    def after(self, gradients: Sequence[Leaf]) -> AbstractContextManager[Any]:
        # A compiled step of fit runs past the end of the data: all that does not depend on the failed batch.
        present = [x for x in gradients if x is not None]
        return run_after([x.values if isinstance(x, tf.IndexedSlices) else x for x in present])

    def untraced(self) -> AbstractContextManager[None]:
        return tf.init_scope()

    def layout(self) -> Layout:
        return _Layout(self)

    def position(self) -> list[np.ndarray]:
        """Step, index and `touched`, stacked over the replicas."""
        return [np.stack(self.values(variable)) for variable in self.variables[-3:]]

    def components(self, variable: Any) -> list[Any]:
        return list(self._strategy.experimental_local_results(variable.value))

    @tf.autograph.experimental.do_not_convert
    def _flush(self) -> Array:
        state = self._windows.unread()
        partial = self.rules.is_partial(state)
        self._apply_if(partial, ())
        self.touched.value.assign(self.marked((), partial, state.index))
        return partial

    def _flush_replicas(self) -> Array:
        with self._strategy.scope():
            return self._strategy.experimental_local_results(self._strategy.run(self._flush))[0]

    def _apply_if(self, condition: Scalar, present: Collection[int]) -> None:
        """Ends the window if the condition holds; ``present`` are the variables known to have a gradient in it."""

        @tf.autograph.experimental.do_not_convert
        def in_cross_replica(strategy: tf.distribute.Strategy, condition: Scalar) -> None:
            # All replicas take the same branch: the length of a window depends on its index only.
            tf.cond(strategy.experimental_local_results(condition)[0], lambda: self._apply(present), lambda: None)

        context: Any = tf.distribute.get_replica_context()
        context.merge_call(in_cross_replica, args=(condition,))

    def _apply(self, present: Collection[int]) -> None:
        strategy = self._strategy

        def touched() -> Array:
            # Other variables may have had gradients in another trace or process, on any replica.
            marks = strategy.run(lambda: tf.cast(self.touched_in(self.leaves[-1].value), tf.int32))
            is_present = tf.constant([i in present for i in range(len(self._targets))])
            return is_present | (strategy.reduce("sum", marks, axis=None) > 0)

        self._update.run_where(touched, self.parts.join(strategy.run(self._windows.value)), present)

    def _unscaled(self, gradient: Leaf, target: Any) -> Array:
        """Undoes Keras' division of this replica's loss by the number of replicas."""
        if gradient is None or self.replicas == 1 or not self.parts.reduction.scales_by_weight or overwrites(target):
            return gradient
        return gradient * tf.cast(self.replicas, gradient.dtype)


class _Layout(Layout):
    """The layout of a Keras window; refuses checkpoints that would lose the windows of all replicas but the first."""

    def __init__(self, window: TensorflowWindow) -> None:
        super().__init__([window.description, *(f"{x.dtype}{list(x.shape)}" for x in window.leaves)])
        self._window = window

    @operation("tf.train.Checkpoint.save")
    def serialize(self) -> bytes:
        window = self._window
        # A SavedModel serializes in a graph, too, before its variables are written.
        if window.replicas > 1 and tf.executing_eagerly() and is_pending(window, window.position()):
            expected = "windows that were flushed, or a .keras or .weights.h5 file, which holds those of all replicas"
            raise invalid(expected, f"open windows of {window.replicas} replicas, of which it would hold the first")
        return super().serialize()
