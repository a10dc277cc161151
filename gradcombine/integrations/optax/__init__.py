"""optax: the algebra as gradient transformations."""

from gradcombine.errors import importing
from gradcombine.places.window import UNTIL_FLUSH

with importing("gradcombine.integrations.optax", "optax"):
    from gradcombine.integrations.optax.accumulation import (
        AccumulateUpdatesState,
        ApplyingTransformation,
        accumulate,
        accumulate_and_apply,
    )
    from gradcombine.integrations.optax.mapped_replicas import all_reduce, map_replicas
    from gradcombine.integrations.optax.multi_steps import MultiSteps, MultiStepsState
    from gradcombine.integrations.optax.skip import SkipState, skip_large, skip_large_updates, skip_not_finite

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
