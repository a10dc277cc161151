"""The window of the backend that Keras has been imported with."""

from __future__ import annotations

import keras

from gradcombine.errors import GradCombineError

# As in Keras itself, the backend is chosen at import, and the other framework need not be installed.
if keras.backend.backend() == "tensorflow":
    from gradcombine.integrations.keras.on_tensorflow import TensorflowWindow as BackendWindow
elif keras.backend.backend() == "jax":
    from gradcombine.integrations.keras.on_jax import JaxWindow as BackendWindow
else:
    raise GradCombineError("keras", "Keras' backend 'tensorflow' or 'jax'", repr(keras.backend.backend()))

__all__ = ["BackendWindow"]
