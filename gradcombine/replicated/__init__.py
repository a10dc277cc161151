"""Variables with a component on every replica, as pure functions.

The model of tf.VariableAggregation x tf.VariableSynchronization.
"""

from __future__ import annotations

from gradcombine.replicated.layouts import stacked
from gradcombine.replicated.variable import ReplicatedState, variable
from gradcombine.replicated.variable import ReplicatedVariable as ReplicatedVariable

__all__ = ["ReplicatedState", "stacked", "variable"]
