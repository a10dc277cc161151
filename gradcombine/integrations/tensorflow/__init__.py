"""TensorFlow: the algebra in training loops over variables."""

from gradcombine.errors import importing
from gradcombine.places.window import UNTIL_FLUSH

with importing("gradcombine.integrations.tensorflow"):
    from gradcombine.integrations.tensorflow.accumulated_step import AccumulatedStep
    from gradcombine.integrations.tensorflow.islands import Outer
    from gradcombine.integrations.tensorflow.several_terms import WindowMetrics

__all__ = ["UNTIL_FLUSH", "AccumulatedStep", "Outer", "WindowMetrics"]
