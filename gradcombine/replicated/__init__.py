"""Variables with a component on every replica, as pure functions.

The model of tf.VariableAggregation x tf.VariableSynchronization.
"""

from __future__ import annotations

from gradcombine.replicated.layouts import Stacked, stacked
from gradcombine.replicated.policy import Aggregation, Synchronization
from gradcombine.replicated.variable import CrossReplica, ReplicatedState, ReplicatedVariable, variable

__all__ = [
    "Aggregation",
    "CrossReplica",
    "ReplicatedState",
    "ReplicatedVariable",
    "Stacked",
    "Synchronization",
    "stacked",
    "variable",
]
