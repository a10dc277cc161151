"""Makes writes wait in a graph, whose operations run in any order that their dependencies allow."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def operations() -> int:
    """How many operations the graph that is being traced has; 0 where none is."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def after(begun: int, values: Any) -> list[Any]:
    """What to wait for, by tf.control_dependencies, until everything since ``begun`` has been computed.

    Eagerly that is nothing: operations run in order.

    Args:
      begun: what `operations` returned before.
      values: tensors, in any structure.

    Returns:
      One operation that runs after the tensors and after everything with an effect, an assertion for instance.
    """
    if tf.executing_eagerly():
        return []
    since = tf.compat.v1.get_default_graph().get_operations()[begun:]
    effects = [op for op in since if op.op_def.is_stateful and op.type != "ReadVariableOp"]
    tensors = [x for x in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(x)]
    with tf.control_dependencies([*effects, *tensors]):
        return [tf.no_op()]
