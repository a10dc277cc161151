"""Each replica's own window, in variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradcombine import tree
from gradcombine.integrations.tensorflow import in_place
from gradcombine.integrations.tensorflow.in_place import InPlace
from gradcombine.types import AccumulateState
from gradcombine.window import Window


class ReplicaState:
    """The `AccumulateState` of each replica, in variables.

    ON_READ variables are written in replica context and stay each replica's own. Their containers are kept out of
    checkpoints, where tf.distribute would save one combined value for all replicas; the components are tracked instead.
    A CentralStorageStrategy makes one variable for all replicas, so there each replica gets one by number. In a
    tf.Graph of TensorFlow 1 they are local variables, which `tf.compat.v1.local_variables_initializer` starts.

    Args:
      window: whose state it is; made in the scope of its strategy.
      specs: the shapes and dtypes of the gradients.
    """

    def __init__(self, window: Window, specs: Sequence[Any]) -> None:
        empty = window.init(list(specs))
        leaves, structure = tree.flatten(window.operation, empty.levels)
        self.position = {"step": _local_variable(empty.step), "index": _local_variable(empty.index)}
        self._hold(window, [_local_variable(x) for x in leaves], structure)
        local = tf.distribute.get_strategy().experimental_local_results
        self.windows = [x if isinstance(x, list) else list(local(x)) for x in self._all_leaves]

    def _hold(self, window: Window, leaves: list[Any], structure: tree.Structure) -> None:
        self.window, self._all_leaves, self._structure = window, leaves, structure
        state = AccumulateState(tree.unflatten(structure, leaves), **self.position)
        self._is_added = in_place.is_added(window, state)
        self._size = len(state.levels[0].value) if self._is_added else 0

    def read(self) -> AccumulateState:
        """This replica's state."""
        return self._state([tf.convert_to_tensor(x) for x in self._leaves()])

    def unread(self) -> AccumulateState:
        """This replica's state, of which the position alone is read."""
        return self._state(self._leaves())

    def contributed(self, gradients: Any, weight: Any) -> tuple[AccumulateState | InPlace, tf.Tensor]:
        """One more contribution to this replica's window, for `write`, and whether it is full then.

        Nothing is written yet.
        """
        if not (self._is_added and in_place.pays()):
            after = self.window.contribute(self.read(), gradients, weight)
            return after, self.window.is_full(after)
        accumulators, totals = self._divided()
        before = self._state([*accumulators, *map(tf.convert_to_tensor, totals)])
        pending = in_place.contribute(self.window, before, gradients, weight)
        return pending, self.window.is_full(pending.after)

    def write(self, pending: AccumulateState | InPlace) -> list[tf.Operation]:
        """Replaces this replica's state.

        Returns:
          The operations that do, in a graph whose operations are not ordered by themselves.
        """
        if isinstance(pending, InPlace):
            accumulators, leaves = self._divided()
            in_place.write(pending, accumulators, self._empty)
            after = pending.after
            arrays = tree.flatten(self.window.operation, after.levels)[0]
        else:
            leaves, after = self._leaves(), pending
            arrays = tree.flatten_as(self.window.operation, self._structure, after.levels)
        leaves = [*leaves, *(_own(x) for x in self.position.values())]
        written = [x.assign(array) for x, array in zip(leaves, [*arrays, after.step, after.index], strict=True)]
        return [] if tf.executing_eagerly() or tf.inside_function() else [x.op for x in written]

    def write_step(self, step: tf.Tensor) -> None:
        """Replaces the number of contributions in the window."""
        _own(self.position["step"]).assign(step)

    def value(self) -> Any:
        """The combined gradients of the window."""
        read = in_place.value if self._is_added and in_place.pays() else Window.value
        return read(self.window, self.read())

    def flat(self) -> list[Any]:
        """This replica's arrays, and its position, in a form that strategy.run can return."""
        state = self.read()
        return [*tree.flatten(self.window.operation, state.levels)[0], state.step, state.index]

    def unflat(self, arrays: Sequence[Any]) -> AccumulateState:
        """The state of what `flat` gave."""
        *leaves, step, index = arrays
        return AccumulateState(tree.unflatten(self._structure, leaves), step, index)

    def _leaves(self) -> list[Any]:
        return [_own(x) for x in self._all_leaves]

    def _divided(self) -> tuple[list[Any], list[Any]]:
        """The accumulators, and the other variables."""
        leaves = self._leaves()
        return leaves[: self._size], leaves[self._size :]

    def _empty(self) -> list[Any]:
        """What the accumulators hold in an empty window."""
        (level,) = tree.unflatten(self._structure, self._leaves())
        return self.window.reduction.clear(level).value

    def _state(self, leaves: list[Any]) -> AccumulateState:
        position = {name: tf.convert_to_tensor(_own(x)) for name, x in self.position.items()}
        return AccumulateState(levels=tree.unflatten(self._structure, leaves), **position)


def _own(leaf: Any) -> Any:
    """This replica's variable, where there is a list of them."""
    if not isinstance(leaf, list):
        return leaf
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    return leaf[int(tf.get_static_value(rank))]


def _local_variable(initial: tf.Tensor) -> Any:
    strategy = tf.distribute.get_strategy()
    options: dict[str, Any] = {}
    if tf.distribute.has_strategy():
        options["synchronization"] = tf.VariableSynchronization.ON_READ
        # A checkpoint of the position holds one value for all replicas.
        options["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA

    def make() -> Any:
        return tf.compat.v1.Variable(
            initial,
            trainable=False,
            use_resource=True,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            **options,
        )

    variable = make()
    # Without the wrapper, which would send what one replica writes through an aggregation over all of them.
    unwrap = getattr(variable, "get", None)
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) and unwrap is not None:
        return [unwrap(), *(make().get() for _ in range(strategy.num_replicas_in_sync - 1))]
    return variable
