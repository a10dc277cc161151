"""optax: the algebra as gradient transformations."""

from gradcombine.integrations.optax.accumulate import AccumulateUpdatesState, accumulate
from gradcombine.integrations.optax.all_reduce import all_reduce

__all__ = ["AccumulateUpdatesState", "accumulate", "all_reduce"]
