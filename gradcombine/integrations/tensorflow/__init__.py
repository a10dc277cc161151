"""TensorFlow: accumulation and all-reduce in training loops over variables."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.tensorflow"):
    from gradcombine.integrations.tensorflow.accumulated_step import AccumulatedStep
    from gradcombine.integrations.tensorflow.islands import Outer
    from gradcombine.integrations.tensorflow.several_terms import WindowMetrics as WindowMetrics

__all__ = ["AccumulatedStep", "Outer"]
