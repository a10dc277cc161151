"""A window of `gradcombine.accumulate` in TensorFlow variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradcombine import tree
from gradcombine.types import AccumulateState


class WindowVariables(tf.Module):
    """The arrays of an `AccumulateState`, each in a variable that every replica has of its own.

    In a tf.Graph of TensorFlow 1 they are local variables, which `tf.compat.v1.local_variables_initializer` starts.

    Args:
      empty: the state at the start.
    """

    def __init__(self, empty: AccumulateState) -> None:
        super().__init__()
        leaves, structure = tree.flatten("LocalGradientAggregation", empty)
        # An array of no elements has nothing to write; some carry a dtype for the reduction.
        stored = [x if x is None or 0 in x.shape else _local_variable(x) for x in leaves]
        self.variables_in_order = [x for x in stored if isinstance(x, tf.Variable)]
        self._content = lambda: (stored, structure)

    def read(self) -> AccumulateState:
        """The state, of this replica."""
        stored, structure = self._content()
        return tree.unflatten(structure, [tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in stored])

    def write(self, state: AccumulateState) -> list[tf.Operation]:
        """Replaces the state.

        Returns:
          The operations that do, in a graph whose operations are not ordered by themselves.
        """
        stored, structure = self._content()
        arrays = tree.flatten_as("LocalGradientAggregation", structure, state)
        pairs = zip(stored, arrays, strict=True)
        written = [x.assign(array) for x, array in pairs if isinstance(x, tf.Variable)]
        return [] if tf.executing_eagerly() or tf.inside_function() else [x.op for x in written]


def _local_variable(initial: tf.Tensor) -> Any:
    options: dict[str, Any] = {}
    if tf.distribute.has_strategy():
        options["synchronization"] = tf.VariableSynchronization.ON_READ
        options["aggregation"] = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.compat.v1.Variable(
        initial,
        trainable=False,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
        **options,
    )


def specs_of(gradients: Sequence[Any], variables: Sequence[Any]) -> list[tf.TensorSpec]:
    """Shape and dtype of each gradient; of the variable, where there is no gradient or its shape is not known."""

    def spec(gradient: Any, variable: Any) -> tf.TensorSpec:
        source = variable if gradient is None else gradient
        shape = source.shape if tf.TensorShape(source.shape).is_fully_defined() else variable.shape
        return tf.TensorSpec(shape, source.dtype)

    return [spec(gradient, variable) for gradient, variable in zip(gradients, variables, strict=True)]
