"""Windows on Keras' TensorFlow backend: each replica's own, in variables that are written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import tensorflow as tf

from gradcombine.accumulate import Accumulator
from gradcombine.integrations.keras.checks import error
from gradcombine.integrations.keras.settings import Parts
from gradcombine.integrations.keras.window import FULL, Window
from gradcombine.integrations.tensorflow import in_place
from gradcombine.integrations.tensorflow.checks import checked_result, require_synchronous
from gradcombine.integrations.tensorflow.state import ReplicaState
from gradcombine.replicas import merge_replicas, tf_replicas
from gradcombine.types import AccumulateState, Order


class _Variables(ReplicaState):
    """`ReplicaState` over the variables of a `Window` in place of its own."""

    def __init__(self, window: Window, accumulator: Accumulator, size: int) -> None:
        held = [getattr(x, "value", x) for x in window.leaves]
        whole = window.read(lambda variable: variable.value)
        *self._all_leaves, step, index = held
        self.position: dict[str, Any] = {"step": step, "index": index}
        self._structure = window.structure.children[0]
        self._accumulator, self._size, self._is_sum = accumulator, size, in_place.is_sum(whole.levels)
        self._touched = window.touched

    def applied(self) -> tf.Tensor:
        """Whether this replica's window was full, and applied."""
        return tf.equal(self._touched.value[-1], tf.convert_to_tensor(self.position["index"]) + 1)

    def _state(self, leaves: list[Any]) -> AccumulateState:
        state = super()._state(leaves)
        step = tf.where(self.applied(), FULL, tf.where(self._accumulator.ready(state), 0, state.step))
        return state._replace(step=step)


class Layout(tf.train.experimental.PythonState):
    """What a window is made of: tf.train.Checkpoint would restore another one's variables by their numbers alone.

    Args:
      lines: that are the same where windows are.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._text = "\n".join(lines).encode()

    def serialize(self) -> bytes:
        """For the checkpoint."""
        return self._text

    def deserialize(self, string_value: bytes) -> None:
        """Refuses a checkpoint of another window, before its variables are read."""
        if string_value != self._text:
            pair = zip_longest(self._text.decode().split("\n"), string_value.decode().split("\n"))
            raise error(*next((f"a window with {a}", b) for a, b in pair if a != b))


class TensorflowWindow:
    """Each replica's window, and the optimizer that is run when they are full.

    Called in replica context, as ``fit`` and strategy.run call an optimizer. The branch at the boundary is taken in
    cross-replica context, which tf.distribute asks of a conditional with a collective inside.

    Args:
      accumulator: from `gradcombine.accumulate`.
      parts: the gradients' tree.
      order: in which the replicas' windows are merged.
      optimizer: run at the boundary; built.
      variables: what it trains.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        parts: Parts,
        order: Order,
        optimizer: Any,
        variables: Sequence[Any],
    ) -> None:
        self._strategy = tf.distribute.get_strategy()
        require_synchronous(self._strategy)
        if isinstance(self._strategy, tf.distribute.experimental.CentralStorageStrategy):
            raise error("a strategy with variables on every replica", type(self._strategy).__name__)
        self.state = Window(accumulator, parts, variables)
        self._windows = _Variables(self.state, accumulator, len(variables))
        self.accumulator, self._parts = accumulator, parts
        self._merge = partial(merge_replicas, parts.reduction, over=tf_replicas(), order=order)
        self._optimizer, self._targets = optimizer, list(variables)
        self._seen: set[int] = set()
        self._flush_all = tf.function(self._flush_replicas, autograph=False)

    @tf.autograph.experimental.do_not_convert
    def contribute(self, gradients: list[Any], weight: Any) -> None:
        """One more microbatch of this replica; where the windows are full, all replicas run the optimizer."""
        self._require_strategy()
        dense, weight = checked_result((gradients, weight), self._targets)
        dense = [self._unscaled(x, target) for x, target in zip(dense, self._targets, strict=True)]
        pending, ready = self._windows.accumulated(self._parts.split(dense), weight)
        self._windows.write(pending)
        present = [gradient is not None for gradient in gradients]
        touched = self.state.touched.value
        marked = tf.concat([present, [ready]], 0)
        touched.assign(tf.where(marked, pending.index + 1, tf.convert_to_tensor(touched)))
        self._seen |= {i for i, chosen in enumerate(present) if chosen}
        _in_cross_replica(self._apply_if, ready)

    @tf.autograph.experimental.do_not_convert
    def flush(self) -> Any:
        """Runs the optimizer on a partial window, and ends it."""
        if tf.distribute.get_strategy() is self._strategy and not tf.distribute.in_cross_replica_context():
            return self._flush()
        # In a function: strategy.run by itself is slow, and TensorFlow says so.
        return self._flush_all()

    @property
    def replicas(self) -> int:
        """How many windows there are."""
        return self._strategy.num_replicas_in_sync

    def load(self, states: list[AccumulateState], touched: Any) -> None:
        """Replaces the state of each replica."""
        for i, variable in enumerate(self.state.held):
            for component, state in zip(self._components(variable), states, strict=True):
                component.assign(self.state.arrays(state)[i])
        for component in self._components(self.state.touched):
            component.assign(touched)

    def holds(self, variables: Sequence[Any]) -> bool:
        """Whether variables have values."""
        return True

    def unshare(self, variables: Sequence[Any]) -> None:
        """Nothing: variables have buffers of their own."""

    def checkpointed(self, kind: str) -> Layout:
        """What tf.train.Checkpoint saves beside the variables."""
        return Layout([kind, *(f"{x.dtype}{list(x.shape)}" for x in self.state.held)])

    def values(self, variable: Any) -> list[Any]:
        """The value of a variable of the window on each replica."""
        return [x.numpy() for x in self._components(variable)]

    def _components(self, variable: Any) -> list[Any]:
        return list(self._strategy.experimental_local_results(variable.value))

    @tf.autograph.experimental.do_not_convert
    def _flush(self) -> Any:
        before = self._windows.read()._replace(step=tf.convert_to_tensor(self._windows.position["step"]))
        begun = tf.logical_and(before.step > 0, tf.logical_not(self._windows.applied()))
        _in_cross_replica(self._apply_if, begun)
        self._windows.write(self.accumulator.restart(before))
        return begun

    def _flush_replicas(self) -> Any:
        with self._strategy.scope():
            return self._strategy.experimental_local_results(self._strategy.run(self._flush))[0]

    @tf.autograph.experimental.do_not_convert
    def _apply_if(self, strategy: tf.distribute.Strategy, condition: Any) -> None:
        # The windows' lengths are the same on all replicas: they depend on the window's index alone.
        unseen = sorted(set(range(len(self._targets))) - self._seen)

        def apply(left_out: Sequence[int]) -> None:
            strategy.extended.call_for_each_replica(self._apply, args=(left_out,))

        def rest() -> None:
            if self._seen:
                apply(unseen)

        def full() -> None:
            if unseen:
                current = self._windows.read().index + 1
                touched = tf.equal(tf.gather(self.state.touched.value, unseen), current)
                tf.cond(tf.reduce_any(touched), lambda: apply(()), rest)
            else:
                apply(())

        tf.cond(strategy.experimental_local_results(condition)[0], full, lambda: None)

    @tf.autograph.experimental.do_not_convert
    def _apply(self, left_out: Sequence[int]) -> None:
        merged = self._parts.join(self._windows.value(self._merge(self._windows.read())))
        gradients = [self._to_be_summed(x, target) for x, target in zip(merged, self._targets, strict=True)]
        given = [None if i in left_out else x for i, x in enumerate(gradients)]
        self._optimizer.apply(given, self._targets)

    def _unscaled(self, gradient: Any, target: Any) -> Any:
        """The gradient of this replica's own loss, of which Keras has taken the part that is summed over replicas."""
        if gradient is None or self.replicas == 1 or not self._parts.reduction.scales_by_weight or _overwrites(target):
            return gradient
        return gradient * tf.cast(self.replicas, gradient.dtype)

    def _to_be_summed(self, gradient: Any, target: Any) -> Any:
        """What each replica hands to the optimizer, which sums over replicas: zeros on all but the first.

        What is not finite stays on all of them, so that a LossScaleOptimizer decides the same on each. A value that
        takes its variable's place is not summed.
        """
        if self.replicas == 1 or _overwrites(target):
            return gradient
        context: Any = tf.distribute.get_replica_context()
        first = tf.equal(context.replica_id_in_sync_group, 0)
        given = tf.logical_or(first, tf.logical_not(tf.math.is_finite(gradient)))
        return tf.where(given, gradient, tf.zeros_like(gradient))

    def _require_strategy(self) -> None:
        if tf.distribute.get_strategy() is not self._strategy:
            raise error("a call under the strategy that it was built under", "a call under another one")
        if tf.distribute.in_cross_replica_context():
            raise error("a call in replica context, inside strategy.run", "a call in cross-replica context")


def _in_cross_replica(function: Callable[..., None], *args: Any) -> None:
    context: Any = tf.distribute.get_replica_context()
    context.merge_call(function, args=args)


def _overwrites(target: Any) -> bool:
    return getattr(target, "overwrite_with_gradient", False)
