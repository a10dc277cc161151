# pyright: standard
"""Validation of a step's arguments, and of the results of the functions that it calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gradcombine.errors import (
    invalid,
    require_function,
    require_tuple,
    require_type,
    translate_errors,
    type_name,
    within,
)
from gradcombine.integrations.keras_optimizers import require_not_accumulating
from gradcombine.integrations.tensorflow.indexed_slices import dense
from gradcombine.sparse import is_row_sparse
from gradcombine.types import Leaf, Tree


def keras_optimizer(apply: Any) -> Any:
    """Returns the Keras optimizer if ``apply`` is one or a method of one, None for any other function."""
    expected = "a Keras optimizer or a function"
    bound = getattr(apply, "__self__", None)
    owner = apply if bound is None else bound
    if getattr(owner, "apply_gradients", None) is not None:
        if isinstance(owner, type):
            raise invalid(expected, type_name(owner))
        if getattr(owner, "built", None) is not None:
            require_not_accumulating(owner)
            return owner
    require_function(expected, apply)
    return None


def require_context(strategy: tf.distribute.Strategy, *, of_replicas: bool = False) -> None:
    """Raises for a call under another strategy, or in the wrong context: ``of_replicas`` selects replica context."""
    if not of_replicas and not tf.distribute.has_strategy():
        return
    is_cross_replica = tf.distribute.in_cross_replica_context()
    if tf.distribute.get_strategy() is not strategy:
        raise invalid("a call under the strategy of its creation", "a call under another one")
    if is_cross_replica and of_replicas:
        raise invalid("a call in replica context, inside strategy.run", "a call in cross-replica context")
    if not is_cross_replica and not of_replicas:
        raise invalid("a call in cross-replica context", "a call inside strategy.run, which it calls itself")


def require_synchronous(strategy: tf.distribute.Strategy) -> None:
    """Raises for parameter servers: asynchronous workers do not share a window."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        expected = "a synchronous strategy; use gradcombine.accumulate on gradients that a coordinator fetches"
        raise invalid(expected, type(strategy).__name__)


def local_replicas(strategy: tf.distribute.Strategy) -> int:
    """Number of replicas of this process."""
    return len(strategy.experimental_local_results(strategy.run(lambda: tf.zeros(()))))


def require_same_length(strategy: tf.distribute.Strategy, every: Any) -> None:
    """Raises if the window length differs between the processes of a strategy; communicates if there are several."""
    if strategy.num_replicas_in_sync == local_replicas(strategy) or callable(every):
        return
    lengths = strategy.gather(strategy.run(lambda: tf.constant([every])), axis=0).numpy().tolist()
    if len(set(lengths)) > 1:
        raise invalid("a window length that is the same on all replicas", lengths)


def require_created_in_scope(strategy: tf.distribute.Strategy, target: Any, path: str) -> None:
    """Raises unless the target is a variable of this strategy."""
    # The value of a Keras variable is a tf.Variable.
    variable = target if isinstance(target, tf.Variable) else getattr(target, "value", target)
    variable = require_type("a variable", variable, tf.Variable, path)
    if isinstance(variable, tf.experimental.dtensor.DVariable):
        expected = "a variable without a DTensor layout; gradcombine.accumulate keeps the layouts of the gradients"
        raise invalid(expected, "a DVariable", path)
    if not strategy.extended.variable_created_in_scope(variable):
        received = f"{variable.name}, created under another"
        raise invalid("a variable created under the strategy in scope", received, path)


def checked_result(result: Tree, targets: list[Any]) -> tuple[Any, ...]:
    """Validates the result of ``gradients``; returns it with one dense tensor or None per variable."""
    gradients, *rest = require_tuple("(gradients, weight) or (gradients, weight, outputs)", result, 2, 3)
    expected = f"a list of {len(targets)} gradients, one per variable"
    require_tuple(expected, gradients, len(targets), kinds=(list, tuple))
    return dense_gradients(gradients, targets), *rest


def require_gradients(combined: Tree) -> list[Leaf]:
    """Returns the combined gradients; raises for a reduction whose result has another structure than the gradients."""
    is_list = isinstance(combined, list)
    wrong = next((x for x in combined if isinstance(x, tuple) and not is_row_sparse(x)), None) if is_list else combined
    if wrong is not None:
        raise invalid("a reduction whose result has the structure of the gradients", type(wrong).__name__)
    return combined


def dense_gradients(gradients: Sequence[Leaf], targets: Sequence[Any]) -> list[Leaf]:
    """Converts gradients to dense tensors of their variables' shapes; None stays None."""

    def converted(gradient: Leaf, shape: Any) -> Leaf:
        if isinstance(gradient, tf.Tensor) and not gradient.shape.is_fully_defined():
            with translate_errors(f"shape {tuple(shape)}", received=str(gradient.shape)):
                return tf.ensure_shape(gradient, shape)  # checked at run time
        return dense(gradient, shape) if isinstance(gradient, tf.IndexedSlices) else gradient

    results = []
    for i, (gradient, target) in enumerate(zip(gradients, targets, strict=True)):
        with within(f"[{i}]"):
            results.append(converted(gradient, target.shape))
    return results
