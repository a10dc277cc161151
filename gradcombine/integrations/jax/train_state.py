"""The state of a training step, and the pure functions over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradcombine.backends.registry import require_count
from gradcombine.errors import GradCombineError
from gradcombine.integrations.jax.arrays import as_arrays, in_own_words
from gradcombine.integrations.jax.contribution import Objective
from gradcombine.types import AccumulateState, Array, Tree

if TYPE_CHECKING:
    import optax


class TrainState(NamedTuple):
    """The state of `train_step`.

    Attributes:
      window: the microbatches so far. ``window.levels`` is each replica's own, and empty where every call is a whole
        window; ``step`` and ``index`` are the same on all replicas. Of a window that was applied nothing is promised
        but that it is full: over replicas, the exchange may have taken its arrays over.
      opt_state: the optimizer's.
      carry: what the next microbatch gets in the place ``carry_argnum``, each replica's own; None without one.
    """

    window: AccumulateState
    opt_state: Any
    carry: Tree


class StepMetrics(NamedTuple):
    """Metrics of the window that a call of `train_step` has applied; zeros where it has applied none.

    Attributes:
      applied: boolean scalar, whether the optimizer has run.
      value: the loss, combined as the gradients are; of a loss of several terms, a dict of them.
      weight: the sum of weights, float32; of a loss of several terms, a dict by denominator.
      aux: combined by ``aux_reduction``. None where the loss returns none.
    """

    applied: Array
    value: Array
    weight: Array
    aux: Tree


class StepFunctions(NamedTuple):
    """A training step as pure functions, not compiled.

    Attributes:
      init: ``init(params, *example, carry=None) -> state``.
      function: ``function(params, state, *args, **kwargs) -> params, state, metrics``.
      flush: ``flush(params, state) -> params, state, metrics``.
    """

    init: Callable[..., TrainState]
    function: Callable[..., tuple[Tree, TrainState, StepMetrics]]
    flush: Callable[[Tree, TrainState], tuple[Tree, TrainState, StepMetrics]]


def optimize(
    optimizer: optax.GradientTransformationExtraArgs, params: Tree, opt_state: Any, values: dict[str, Tree]
) -> tuple[tuple[Tree, Any], StepMetrics]:
    """Runs the optimizer on the combined parts of a window: parameters, its state, and what is told of the window."""
    import optax

    shards = [np.shape(x) for x in jax.tree.leaves(values["grads"])] != [np.shape(x) for x in jax.tree.leaves(params)]
    try:
        updates, opt_state = optimizer.update(values["grads"], opt_state, params, value=values["total"])
        if shards and jax.tree.map(np.shape, updates) != jax.tree.map(np.shape, params):
            raise TypeError("updates of other shapes than the parameters")
    except (TypeError, ValueError) as error:
        if not shards:
            raise
        expected = (
            "an optimizer that gathers its updates, for gradients that are shards (zero.shard and zero.gather; or "
            "value_and_grad, or integrations.optax.accumulate around an optimizer of zero.shard(params, over))"
        )
        raise GradCombineError("train_step", expected, str(error)) from error
    told = StepMetrics(jnp.asarray(True), values["value"], values["weight"], values.get("aux"))
    return (optax.apply_updates(params, updates), opt_state), told


KEPT = "a state of the optimizer that it keeps"


def keep_dtypes(new: Tree, old: Tree) -> Tree:
    """A state in the dtypes that it had: some transformations promote theirs, which no conditional or scan allows."""

    def keep(x: Any, like: Any) -> Any:
        expected, received = getattr(like, "dtype", None), getattr(x, "dtype", None)
        return x if expected is None or received is None or expected == received else x.astype(expected)

    with in_own_words("update", KEPT):
        return jax.tree.map(keep, new, old)


def loss_arguments(objective: Objective, params: Tree, carry: Tree, args: Sequence[Any]) -> list[Any]:
    """The positional arguments of the loss: those of the step, with the carry in its place among them."""
    called = [params, *args]
    if objective.loss.carry_argnum is not None:
        called.insert(objective.loss.carry_argnum, carry)
    return called


def owned(values: Tree) -> Tree:
    """Copies: a donated buffer may belong to one argument only, and some optimizers begin with the parameters."""
    return jax.tree.map(jnp.copy, as_arrays("train_step", values))


def is_bound(objective: Objective) -> bool:
    """Whether the axis of the replicas is bound: outside of the mapped function it is not."""
    try:
        objective.over.size()
    except GradCombineError:
        return False
    return True


def require_carry(objective: Objective, carry: Tree) -> None:
    """Refuses a carry that nothing takes, and a missing one."""
    carried = objective.loss.carry_argnum is not None
    if (carry is None) == carried:
        expected = "step.init(params, carry=...), for carry_argnum" if carried else "no carry"
        raise objective.error(expected, "none" if carry is None else type(carry).__name__)


def opened(objective: Objective, state: Any) -> TrainState:
    """The state, of JAX's arrays; refuses what is not a `TrainState`."""
    if not isinstance(state, TrainState) or not isinstance(state.window, AccumulateState):
        received = state.window if isinstance(state, TrainState) else state
        raise objective.error("a TrainState, from step.init(params)", type(received).__name__)
    for name in ("step", "index"):
        require_count(objective.operation, getattr(state.window, name), f".window.{name}")
    return as_arrays(objective.operation, state)
