"""optax: the algebra as gradient transformations."""

from gradcombine.integrations.optax.accumulate import (
    AccumulateUpdatesState,
    ApplyingTransformation,
    accumulate,
    accumulate_and_apply,
)
from gradcombine.integrations.optax.multi_steps import MultiSteps, MultiStepsState
from gradcombine.integrations.optax.replicas import all_reduce, map_replicas
from gradcombine.integrations.optax.skip import SkipState, skip_large, skip_large_updates, skip_not_finite
from gradcombine.window import UNTIL_FLUSH

__all__ = [
    "UNTIL_FLUSH",
    "AccumulateUpdatesState",
    "ApplyingTransformation",
    "MultiSteps",
    "MultiStepsState",
    "SkipState",
    "accumulate",
    "accumulate_and_apply",
    "all_reduce",
    "map_replicas",
    "skip_large",
    "skip_large_updates",
    "skip_not_finite",
]
