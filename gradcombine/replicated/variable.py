"""A variable that every replica has a component of, as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.autograph import ordinary
from gradcombine.backends.protocol import Collective
from gradcombine.backends.registry import is_absent, resolve
from gradcombine.checks import require_order
from gradcombine.errors import GradCombineError
from gradcombine.replicated.cross import CrossContext
from gradcombine.replicated.layouts import Layout, Stacked, layout
from gradcombine.replicated.policy import Aggregation, Policy, Synchronization, decide
from gradcombine.replicated.replica import ReplicaContext
from gradcombine.replicated.values import ReplicatedState
from gradcombine.replicated.writes import own
from gradcombine.types import Order, Tree


class CrossReplica(NamedTuple):
    """What is done to all components at once. A value is one for all replicas, and the same wherever it is given.

    Attributes:
      assign: ``assign(state, value) -> state``: a read gives ``value``.
      assign_add: ``assign_add(state, value) -> state``: every component grows by ``value``.
      assign_sub: ``assign_sub(state, value) -> state``: every component shrinks by ``value``.
      read: ``read(state) -> value``, the variable's one value.
    """

    assign: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_add: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_sub: Callable[[ReplicatedState, Tree], ReplicatedState]
    read: Callable[[ReplicatedState], Tree]


class ReplicatedVariable(NamedTuple):
    """A variable under tf.distribute, as pure functions of a `ReplicatedState`.

    The functions here are those of replica context: each replica gives a value of its own. Over `stacked`, a value has
    the replicas along its first axis. A Python number says the same on every replica. None writes nothing.

    Attributes:
      aggregation, synchronization: as decided; AUTO has become ON_WRITE.
      init: ``init(value) -> state``; ``value`` is the same on every replica.
      assign: ``assign(state, value) -> state``. ON_WRITE: every component becomes the values' aggregation. ON_READ:
        this replica's becomes its own value.
      assign_add, assign_sub: likewise, added or subtracted.
      read: ``read(state) -> value``, this replica's component.
      cross: the functions of cross-replica context.
    """

    aggregation: Aggregation
    synchronization: Synchronization
    init: Callable[[Tree], ReplicatedState]
    assign: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_add: Callable[[ReplicatedState, Tree], ReplicatedState]
    assign_sub: Callable[[ReplicatedState, Tree], ReplicatedState]
    read: Callable[[ReplicatedState], Tree]
    cross: CrossReplica


@ordinary
def variable(
    aggregation: Any = Aggregation.NONE,
    synchronization: Any = Synchronization.AUTO,
    *,
    over: Collective | Stacked,
    order: Order = "sequential",
) -> ReplicatedVariable:
    """A variable, or a tree of variables, of which every replica has a component.

    Args:
      aggregation: how the replicas' values become one: `Aggregation`, its name, or a tf.VariableAggregation.
      synchronization: when they become one: `Synchronization`, its name, or a tf.VariableSynchronization. AUTO is
        ON_WRITE. NONE is for one copy, over `LOCAL`.
      over: the replicas. A collective: the functions run on each replica, on its own component. `stacked`: one program
        holds all components, along a first axis.
      order: of the aggregation, as for `gradcombine.all_reduce`.

    Returns:
      Pure functions. Values have the variables' structure, shapes and dtypes; nothing is cast or broadcast but a Python
      number.

    Raises:
      GradCombineError: for unknown names and for NONE over several copies. The functions raise it for a value of
        another structure, shape or dtype, and where the combination gives the call no meaning: a write in replica
        context with ON_WRITE and aggregation NONE; a Python number with ON_WRITE and SUM; a cross-replica read or write
        with ON_READ and NONE; a cross-replica assign_add or assign_sub with ON_READ and SUM; MEAN of integers.

    Bits: as `gradcombine.all_reduce` and `gradcombine.combine` promise for the order. With ON_READ and SUM,
    ``cross.assign`` gives each replica a share: integers so that the sum is exactly the value; floats divided by the
    number of replicas, as TensorFlow does, so that the sum may round differently unless that is a power of two.

    References: `tf.VariableAggregation <https://www.tensorflow.org/api_docs/python/tf/VariableAggregation>`_,
    `tf.VariableSynchronization <https://www.tensorflow.org/api_docs/python/tf/VariableSynchronization>`_.

    >>> import numpy as np
    >>> from gradcombine import replicated
    >>> seen = replicated.variable("sum", "on_read", over=replicated.stacked(2))
    >>> state = seen.assign_add(seen.init({"tokens": np.int32(0)}), {"tokens": np.int32([3, 7])})
    >>> state.value
    {'tokens': array([3, 7], dtype=int32)}
    >>> seen.cross.read(state)
    {'tokens': array(10, dtype=int32)}

    Per-replica code, here under jax.vmap:

    >>> import jax, gradcombine as gc
    >>> mean = replicated.variable("mean", "on_write", over=gc.jax_axis("data"))
    >>> def step(x):
    ...     return mean.read(mean.assign_add(mean.init(np.float32(10)), x))
    >>> [float(y) for y in jax.vmap(step, axis_name="data")(np.float32([1, 4]))]
    [12.5, 12.5]
    """
    require_order("replicated.variable", order)
    place = layout(over, order)
    policy = decide(aggregation, synchronization, over)
    replica, cross = ReplicaContext(policy, place), CrossContext(policy, place)
    return ReplicatedVariable(
        policy.aggregation,
        policy.synchronization,
        _Init(policy, place).init,
        replica.assign,
        replica.assign_add,
        replica.assign_sub,
        replica.read,
        CrossReplica(cross.assign, cross.assign_add, cross.assign_sub, cross.read),
    )


class _Init(NamedTuple):
    policy: Policy
    layout: Layout

    @ordinary
    def init(self, value: Tree) -> ReplicatedState:
        leaves, structure = tree.flatten("replicated.init", value)
        backend = resolve("replicated.init", leaves)
        arrays = [x if is_absent(x) else backend.asarray(x) for x in leaves]
        kinds = [None if is_absent(x) else np.empty((), backend.dtype(x)) for x in arrays]
        if self.policy.reduction is not None:
            try:
                self.policy.reduction.init(tree.unflatten(structure, kinds))
            except GradCombineError as error:
                expected = f"{error.expected}, for {self.policy}"
                raise GradCombineError("replicated.init", expected, error.received, error.path) from None
        components = [x if is_absent(x) else self.layout.spread(backend, x) for x in arrays]
        if self.policy.on_read:
            components = own(self.layout, components)
        return ReplicatedState(tree.unflatten(structure, components))
