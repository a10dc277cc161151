"""Horovod's local gradient aggregation, and its all-reduce over gradcombine's replicas."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.horovod"):
    from gradcombine.integrations.horovod.aggregation import LocalGradientAggregation
    from gradcombine.integrations.horovod.all_reduce import AllReduce

__all__ = ["AllReduce", "LocalGradientAggregation"]
