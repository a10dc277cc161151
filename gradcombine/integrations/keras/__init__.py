"""Keras 3: accumulation around any optimizer, on the TensorFlow and the JAX backend."""

from gradcombine.errors import importing

with importing("gradcombine.integrations.keras"):
    from gradcombine.integrations.keras.accumulate import Accumulate
    from gradcombine.integrations.keras.fit import FlushAtEpochEnd, WeightedTrainStep

__all__ = ["Accumulate", "FlushAtEpochEnd", "WeightedTrainStep"]
