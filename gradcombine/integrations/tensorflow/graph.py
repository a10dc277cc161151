"""Branches and order in eager execution, in a tf.function, and in a tf.Graph that orders nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf


def branch(condition: tf.Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """One of the two results: eagerly by plain Python, so that a branch may hold a collective; else by tf.cond."""
    if tf.executing_eagerly():
        return if_true() if condition else if_false()
    return tf.cond(condition, if_true, if_false)


def after(first: Sequence[Any]) -> AbstractContextManager[Any]:
    """What is made inside of this runs after ``first``, tensors or operations."""
    return nullcontext() if tf.executing_eagerly() else tf.control_dependencies(_operations(first))


def completed(tensors: Sequence[Any], operations: Sequence[Any]) -> list[Any]:
    """The tensors, not to be had before the operations have run."""
    if tf.executing_eagerly() or not operations:
        return list(tensors)
    with tf.control_dependencies(_operations(operations)):
        return [tf.identity(x) for x in tensors]


def size() -> int:
    """How many operations the graph that is being traced has; 0 where none is."""
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


def effects_since(begun: int) -> list[tf.Operation]:
    """The operations with an effect, an assertion for instance, since the graph had the `size` ``begun``."""
    if tf.executing_eagerly():
        return []
    since = tf.compat.v1.get_default_graph().get_operations()[begun:]
    return [op for op in since if op.op_def.is_stateful and op.type != "ReadVariableOp"]


def converted(function: Callable[..., Any], status: Any = None) -> Callable[..., Any]:
    """A caller's function, rewritten by AutoGraph where the tf.function around has that, or had it at ``status``."""
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, status or autograph.control_status_ctx(), convert_by_default=False)


def _operations(things: Sequence[Any]) -> list[tf.Operation]:
    # Of other things, as Keras variables, a tf.function keeps the order by itself.
    operations = [x if isinstance(x, tf.Operation) else getattr(x, "op", None) for x in things]
    return [x for x in operations if isinstance(x, tf.Operation)]
