# pyright: standard
"""Finds the operations of a TensorFlow step. Imported only if the user's program has imported TensorFlow."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks  # as tf.debugging uses them
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from gradcombine import tree
from gradcombine.backends.registry import dtype_of
from gradcombine.types import Tree
from gradcombine.verify.check.inner import keras_on_tensorflow
from gradcombine.verify.check.leaves import flattened, is_float
from gradcombine.verify.check.running import ONE_BATCH, NotWide, Step, Subject

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
    """Context in which functions run eagerly.

    Raises:
      NotWide: in the context, for a function that a strategy runs on replicas: if it raises, their collectives break.
    """
    eager, original = tf.config.functions_run_eagerly(), tf.distribute.Strategy.run

    def run(self: tf.distribute.Strategy, *args: object, **kwargs: object) -> object:
        if self.num_replicas_in_sync > 1:
            raise NotWide("it runs on replicas of a strategy")
        return original(self, *args, **kwargs)

    tf.config.run_functions_eagerly(True)
    try:
        with patch.object(tf.distribute.Strategy, "run", run):
            yield
    finally:
        tf.config.run_functions_eagerly(eager)


# --- float64 ---


def in_each_precision(make_step: Callable[..., Step], params: Tree, batch: Tree) -> Callable[..., Step]:
    """Returns a factory of steps that run in float64 if their arguments do: made again, and with wider variables."""
    narrow = _dtypes(params, batch)

    @functools.wraps(make_step)
    def make(*numbers: int, **devices: int) -> Step:
        original, wide, objects = make_step(*numbers, **devices), list[Step](), functools.cache(_objects)

        def step(params: Tree, batch: Tree) -> Tree:
            if _dtypes(params, batch) == narrow:
                return original(params, batch)
            if not objects():
                return original(params, batch)
            with _in_float64(objects()):
                if not wide:
                    wide.append(make_step(*numbers, **devices))
                leaves, structure = flattened(wide[0](params, batch))
                return tree.unflatten(structure, [x + 0 if hasattr(x, "assign") else x for x in leaves])

        return step

    return make


@tf.autograph.experimental.do_not_convert
def _dtypes(*values: Tree) -> list[object]:
    return [dtype_of(x) for value in values for x in flattened(value)[0] if is_float(x)]


def _objects() -> list[Any]:
    """Returns the process's variables of floats that have a value, and its Keras objects that have a dtype."""
    types, keras = [BaseResourceVariable], keras_on_tensorflow()
    if keras is not None:
        types += [keras.Variable, keras.KerasTensor, keras.Layer, keras.Loss, keras.Metric]
    gc.collect()
    objects = gc.get_objects()
    chosen = {x for x in {*map(type, objects)} if issubclass(x, (*types,))}
    found = [x for x in objects if type(x) in chosen]
    return [x for x in found if "_dtype_policy" in vars(x) or (tf.as_dtype(x.dtype).is_floating and _has_value(x))]


def _has_value(x: Any) -> bool:
    """Whether this is no variable of a graph, such as those of TensorFlow 1, and is initialized."""
    return not isinstance(x, BaseResourceVariable) or (hasattr(x.handle, "numpy") and bool(x.is_initialized()))


@contextmanager
def _in_float64(objects: Sequence[Any]) -> Iterator[None]:
    """Context in which functions run eagerly, and these objects compute in float64.

    A variable gets the attributes of another one, but keeps the identifier by which optimizers find it.
    """
    before, config = [dict(vars(x)) for x in objects], getattr(keras_on_tensorflow(), "config", None)
    with ExitStack() as stack:
        stack.callback(lambda: [vars(x).update(attributes) for x, attributes in zip(objects, before, strict=True)])
        if config is not None:
            stack.callback(config.set_floatx, config.floatx())
            stack.callback(config.set_dtype_policy, config.dtype_policy())
            config.set_floatx("float64")
            config.set_dtype_policy("float64")
        for x, attributes in zip(objects, before, strict=True):
            if isinstance(x, BaseResourceVariable):
                wide = ResourceVariable(tf.cast(x.value(), tf.float64), trainable=x.trainable)
                vars(x).update(vars(wide) | {"_unique_id": attributes["_unique_id"]})
            else:
                of_class = {"_dtype": "float64", "_dtype_policy": config and config.dtype_policy()}
                vars(x).update({name: y for name, y in of_class.items() if name in attributes})
        stack.enter_context(eagerly())
        yield
