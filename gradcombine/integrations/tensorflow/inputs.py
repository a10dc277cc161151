# pyright: standard
"""Validation of a step's arguments and of the results of its function."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from gradcombine.errors import invalid, require_function, require_tuple, require_type, within
from gradcombine.integrations.tensorflow.indexed_slices import dense
from gradcombine.types import Array, Leaf, Tree


def keras_optimizer(apply: Any) -> Any:
    """The Keras optimizer that is passed, by itself or as one of its methods; None for another function."""
    bound = getattr(apply, "__self__", None)
    owner = apply if bound is None else bound
    if getattr(owner, "apply_gradients", None) is not None and getattr(owner, "built", None) is not None:
        return owner
    require_function("a Keras optimizer or a function", apply)
    return None


def require_context(strategy: tf.distribute.Strategy, *, of_replicas: bool = False) -> None:
    """Raises for a call under another strategy, and for one in replica context, or outside of it."""
    if not of_replicas and not tf.distribute.has_strategy():
        return
    crosses, other = tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is not strategy
    if other:
        raise invalid("a call under the strategy that it was made under", "a call under another one")
    if crosses and of_replicas:
        raise invalid("a call in replica context, inside strategy.run", "a call in cross-replica context")
    if not crosses and not of_replicas:
        raise invalid("a call in cross-replica context", "a call inside strategy.run, which it makes itself")


def require_synchronous(strategy: tf.distribute.Strategy) -> None:
    """Refuses a strategy whose workers do not run in step: then there is no window that all of them share."""
    asynchronous = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    expected = "a strategy whose replicas run in step; gradcombine.accumulate combines what a coordinator fetches"
    if asynchronous:
        raise invalid(expected, type(strategy).__name__)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """The number of replicas of this process."""
    return len(strategy.experimental_local_results(strategy.run(lambda: tf.zeros(()))))


def require_same_length(strategy: tf.distribute.Strategy, every: Any) -> None:
    """Refuses window lengths that differ between the processes of a strategy; exchanges them, where there are any."""
    if strategy.num_replicas_in_sync == local_replicas(strategy) or callable(every):
        return
    lengths = strategy.gather(strategy.run(lambda: tf.constant([every])), axis=0).numpy().tolist()
    if len(set(lengths)) > 1:
        raise invalid("a window length that is the same on all replicas", lengths)


def require_created_in_scope(strategy: tf.distribute.Strategy, target: Any, path: str) -> None:
    """Refuses what is not a variable of this strategy."""
    # A Keras variable holds the tf.Variable as its value.
    variable = target if isinstance(target, tf.Variable) else getattr(target, "value", target)
    variable = require_type("a variable", variable, tf.Variable, path)
    laid_out = isinstance(variable, tf.experimental.dtensor.DVariable)
    expected = "a variable without a DTensor layout; gradcombine.accumulate keeps the layouts of the gradients"
    with within(path):
        if laid_out:
            raise invalid(expected, "a DVariable")
        if not strategy.extended.variable_created_in_scope(variable):
            raise invalid("a variable made under the strategy in scope", f"{variable.name}, which was not")


def checked_result(result: Tree, targets: list[Any]) -> tuple[Any, ...]:
    """Checks the result of ``gradients``: its gradients as a list of one dense tensor or None per variable."""
    gradients, *rest = require_tuple("(gradients, weight) or (gradients, weight, outputs)", result, 2, 3)
    expected = f"a list of {len(targets)} gradients, one per variable"
    require_tuple(expected, gradients, len(targets), kinds=(list, tuple))
    return [dense_gradient(x, target) for x, target in zip(gradients, targets, strict=True)], *rest


def dense_gradient(gradient: Leaf, target: Any) -> Array:
    """A gradient as one dense tensor of its variable's shape, or None."""
    if isinstance(gradient, tf.Tensor) and not gradient.shape.is_fully_defined():
        return tf.ensure_shape(gradient, target.shape)  # checked where the graph runs
    return dense(gradient, target.shape) if isinstance(gradient, tf.IndexedSlices) else gradient
