"""Each replica's own window, in variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from gradcombine import tree
from gradcombine.accumulate import Accumulator
from gradcombine.integrations.tensorflow import in_place
from gradcombine.integrations.tensorflow.in_place import InPlace
from gradcombine.types import AccumulateState

_OPERATION = "AccumulatedStep"


class ReplicaState:
    """The `AccumulateState` of each replica, in variables.

    ON_READ variables are written in replica context and stay each replica's own. Their containers are kept out of
    checkpoints, where tf.distribute would save one combined value for all replicas; the components are tracked instead.
    A CentralStorageStrategy makes one variable for all replicas, so there each replica gets one by number.

    Args:
      strategy: whose replicas hold one state each.
      accumulator: from `gradcombine.accumulate`.
      specs: the shapes and dtypes of the gradients.
    """

    def __init__(self, strategy: tf.distribute.Strategy, accumulator: Accumulator, specs: Sequence[Any]) -> None:
        empty = accumulator.init(list(specs))
        leaves, self._structure = tree.flatten(_OPERATION, empty.levels)
        with strategy.scope():
            self.position = {
                "step": _local_variable(strategy, empty.step),
                "index": _local_variable(strategy, empty.index),
            }
            self._all_leaves = [_local_variable(strategy, x) for x in leaves]
        self.windows = [
            x if isinstance(x, list) else list(strategy.experimental_local_results(x)) for x in self._all_leaves
        ]
        self._accumulator, self._size = accumulator, len(specs)
        self._is_sum = in_place.is_sum(empty.levels)

    def read(self) -> AccumulateState:
        """This replica's state."""
        return self._state([_value(x) for x in self._leaves()])

    def accumulated(self, gradients: list[Any], weight: Any) -> tuple[AccumulateState | InPlace, tf.Tensor]:
        """One more contribution to this replica's window, for `write`, and whether it is full then.

        Nothing is written yet.
        """
        if not (self._is_sum and in_place.pays()):
            after = self._accumulator.update(gradients, self.read(), weight)
            return after, self._accumulator.ready(after)
        # Validates, and counts. What it adds to the stand-ins is not asked for, so that the graph leaves it out.
        leaves = self._leaves()
        accumulators = leaves[: self._size]
        before = self._state([*map(in_place.empty, accumulators), *map(_value, leaves[self._size :])])
        after = self._accumulator.update(gradients, before, weight)
        terms = in_place.terms(_OPERATION, gradients, weight, accumulators)
        totals = tree.flatten_as(_OPERATION, self._structure, after.levels)[self._size :]
        pending = InPlace(self._accumulator.ready(before), terms, totals, after.step, after.index)
        return pending, self._accumulator.ready(after)

    def write(self, pending: AccumulateState | InPlace) -> None:
        """Replaces this replica's state."""
        leaves = self._leaves()
        if isinstance(pending, InPlace):
            in_place.write(pending, leaves[: self._size])
            written = zip(leaves[self._size :], pending.totals, strict=True)
        else:
            arrays = tree.flatten_as(_OPERATION, self._structure, pending.levels)
            written = zip(leaves, arrays, strict=True)
        for x, array in written:
            if isinstance(x, tf.Variable):
                x.assign(array)
        _own(self.position["step"]).assign(pending.step)
        _own(self.position["index"]).assign(pending.index)

    def value(self, state: AccumulateState) -> list[Any]:
        """The combined gradients of a window."""
        if self._is_sum and in_place.pays():
            return in_place.value(state.levels[0], self._outputs(state.levels[0].dtypes))
        return self._accumulator.value(state)

    def _outputs(self, kinds: list[Any]) -> list[np.dtype]:
        """The dtypes of results."""
        scalars = [np.zeros((), kind.dtype) for kind in kinds]
        return [x.dtype for x in self._accumulator.value(self._accumulator.init(scalars))]

    def flat(self) -> list[Any]:
        """This replica's arrays, and its position, in a form that strategy.run can return."""
        state = self.read()
        return [*tree.flatten(_OPERATION, state.levels)[0], state.step, state.index]

    def unflat(self, arrays: Sequence[Any]) -> AccumulateState:
        """The state of what `flat` gave."""
        *leaves, step, index = arrays
        return AccumulateState(tree.unflatten(self._structure, leaves), step, index)

    def _leaves(self) -> list[Any]:
        return [_own(x) for x in self._all_leaves]

    def _state(self, leaves: list[Any]) -> AccumulateState:
        position = {name: tf.convert_to_tensor(_own(x)) for name, x in self.position.items()}
        return AccumulateState(levels=tree.unflatten(self._structure, leaves), **position)


def _value(leaf: Any) -> Any:
    return tf.convert_to_tensor(leaf) if isinstance(leaf, tf.Variable) else leaf


def _own(leaf: Any) -> Any:
    """This replica's variable, where there is a list of them."""
    if not isinstance(leaf, list):
        return leaf
    rank = tf.distribute.get_replica_context().replica_id_in_sync_group
    return leaf[int(tf.get_static_value(rank))]


def _local_variable(strategy: tf.distribute.Strategy, initial: tf.Tensor) -> Any:
    def make() -> tf.Variable:
        return tf.Variable(
            initial,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            # A checkpoint of the position holds one value for all replicas.
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    variable = make()
    # Without the wrapper, which would send what one replica writes through an aggregation over all of them.
    unwrap = getattr(variable, "get", None)
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy) and unwrap is not None:
        return [unwrap(), *(make().get() for _ in range(strategy.num_replicas_in_sync - 1))]
    return variable
