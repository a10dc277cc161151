"""optax: accumulation over microbatches and replicas as gradient transformations."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.optax", "optax"):
    from gradcombine.integrations.optax.accumulation import AccumulateUpdatesState, accumulate, accumulate_and_apply
    from gradcombine.integrations.optax.mapped_replicas import all_reduce, map_replicas
    from gradcombine.integrations.optax.multi_steps import MultiSteps
    from gradcombine.integrations.optax.skip import skip_large, skip_not_finite

__all__ = [
    "AccumulateUpdatesState",
    "MultiSteps",
    "accumulate",
    "accumulate_and_apply",
    "all_reduce",
    "map_replicas",
    "skip_large",
    "skip_not_finite",
]
