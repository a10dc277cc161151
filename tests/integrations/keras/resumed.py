"""Finishes the windows of a saved model; run as a program, on the backend named by KERAS_BACKEND.

Usage: resumed.py FILE.keras GRADIENTS.npz RESULT.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import keras
import numpy as np

from tests.integrations.keras import cases


def finish(model: Any, gradients: Any) -> dict[str, np.ndarray]:
    """Applies the gradients; returns the window's variables after each and the model's weights at the end."""
    values: dict[str, np.ndarray] = {}
    for k in range(len(gradients.files) // 2):
        model.optimizer.apply(
            [cases.tensor(gradients[f"g{k}"])], model.trainable_variables, weight=gradients[f"w{k}"][()]
        )
        for variable in model.optimizer.variables[2:-2]:
            values[f"{k}.{variable.path.split('/')[-1]}"] = variable.numpy()
    return {**values, "w": model.weights[0].numpy()}


if __name__ == "__main__":
    file, given, result = sys.argv[1:]
    np.savez(result, **finish(keras.models.load_model(file), np.load(given)))
