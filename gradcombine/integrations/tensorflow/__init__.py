"""TensorFlow: the algebra in training loops over variables."""

from gradcombine.integrations.tensorflow.several_terms import WindowMetrics
from gradcombine.integrations.tensorflow.step import AccumulatedStep

__all__ = ["AccumulatedStep", "WindowMetrics"]
