"""A model of tf.VariableAggregation and tf.VariableSynchronization: replicated variables as pure functions."""

from __future__ import annotations

from gradcombine.replicated.layouts import stacked
from gradcombine.replicated.variable import ReplicatedState, variable
from gradcombine.replicated.variable import ReplicatedVariable as ReplicatedVariable

__all__ = ["ReplicatedState", "stacked", "variable"]
