"""TensorFlow: the algebra in training loops over variables."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.tensorflow"):
    from gradcombine.integrations.tensorflow.several_terms import WindowMetrics
    from gradcombine.integrations.tensorflow.step import AccumulatedStep

__all__ = ["AccumulatedStep", "WindowMetrics"]
