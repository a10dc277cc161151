# pyright: standard
"""Finds the operations of a TensorFlow step. Imported only if the user's program has imported TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # as tf.debugging uses them

from gradcombine.verify.check.running import ONE_BATCH, Subject

Operations: TypeAlias = set[tuple[str, np.dtype | None]]
"""Names of operations, each with the dtypes of its operands, and once with None."""


def operations(subject: Subject) -> tuple[Operations, bool]:
    """Returns the operations of one batch's step, and whether they are those of its graph.

    Otherwise they are those that run, since it reads values or makes variables; it may also compute with NumPy.

    Raises:
      Exception: of any type, if the step does not run.
    """
    step = subject.step(ONE_BATCH)
    try:
        graph = tf.function(step).get_concrete_function(subject.params, subject.batch).graph.as_graph_def()
    except Exception:
        return _executed(lambda: subject.call(step, subject.batch, wide=False)), False
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    found: Operations = {(node.op, None) for node in nodes}
    types = ((node.op, node.attr["T"].type) for node in nodes)
    return found | {(name, np.dtype(tf.as_dtype(x).as_numpy_dtype)) for name, x in types if x}, True


def _executed(run: Callable[[], object]) -> Operations:
    found: Operations = set()

    def observed(operation: str | bytes, inputs: Sequence[tf.Tensor], *_: object, **__: object) -> None:
        name = operation if isinstance(operation, str) else operation.decode()
        numbers = (x.dtype for x in inputs if x.dtype.is_floating or x.dtype.is_complex)
        found.update((name, x) for x in (None, *(np.dtype(x.as_numpy_dtype) for x in numbers)))

    with eagerly():
        op_callbacks.add_op_callback(observed)
        try:
            run()
        finally:
            op_callbacks.remove_op_callback(observed)
    return found


@contextmanager
def eagerly() -> Iterator[None]:
    """Context in which functions run eagerly."""
    eager = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(eager)
