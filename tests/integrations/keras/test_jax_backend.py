"""Keras' JAX backend, in subprocesses: the tests of this folder, and a window saved on another backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import Replace, linear, tensor

FOLDER = Path(__file__).parent


def on_jax(*arguments: str) -> Any:
    """Runs Python in a subprocess, on Keras' JAX backend."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER.parents[2],
        env={**environment, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        pytest.param(
            [
                "-k",
                "combine or none or flush or left_alone or scan or in_place or device or warn or losses or epoch "
                "or labels or end_of or around",
            ],
            40,
            id="core",
            marks=pytest.mark.full,
        ),
        pytest.param(["-m", "slow or not slow"], 80, id="all", marks=pytest.mark.slow),
    ],
)
def test_they_pass_on_jax(arguments: list[str], tests: int) -> None:
    done = on_jax("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(FOLDER))
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= tests


def finish(model: Any, gradients: Any) -> dict[str, np.ndarray]:
    """Applies the gradients; returns the window's variables after each and the model's weights at the end."""
    values: dict[str, np.ndarray] = {}
    for k in range(len(gradients.files) // 2):
        model.optimizer.apply([tensor(gradients[f"g{k}"])], model.trainable_variables, weight=gradients[f"w{k}"][()])
        for variable in model.optimizer.variables[2:-2]:
            values[f"{k}.{variable.path.split('/')[-1]}"] = variable.numpy()
    return {**values, "w": model.weights[0].numpy()}


@pytest.mark.full
def test_a_window_begun_on_tensorflow_and_ended_on_jax(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gradients = [(rng.normal(size=(2, 1)) * 10.0 ** rng.integers(-6, 7, (2, 1))).astype(np.float32) for _ in range(5)]
    model = linear(Accumulate(Replace(), 3))
    model.optimizer.build(model.trainable_variables)
    for gradient in gradients[:2]:
        model.optimizer.apply([tensor(gradient)], weight=np.float32(0.7))
    begun, given, result = (str(tmp_path / name) for name in ("begun.keras", "given.npz", "result.npz"))
    model.save(begun)
    weights = {f"w{k}": np.float32(k + 0.3) for k in range(3)}
    np.savez(given, **{f"g{k}": x for k, x in enumerate(gradients[2:])}, **weights)
    done = on_jax("-m", "tests.integrations.keras.test_jax_backend", begun, given, result)
    assert done.returncode == 0, done.stderr
    expected = finish(keras.models.load_model(begun), np.load(given))
    with np.load(result) as received:
        assert {name: received[name].tobytes() for name in received.files} == {
            name: x.tobytes() for name, x in expected.items()
        }


if __name__ == "__main__":
    file, gradients, results = sys.argv[1:]
    np.savez(results, **finish(keras.models.load_model(file), np.load(gradients)))
