"""Keras' JAX backend, in subprocesses: the tests of this folder, and a window saved on another backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras import resumed
from tests.integrations.keras.cases import Replace, linear, tensor

FOLDER = Path(__file__).parent


@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        pytest.param(
            ["-k", "combine or none or flush or left_alone or scan or in_place or device or warn or losses"],
            40,
            id="core",
            marks=pytest.mark.full,
        ),
        pytest.param(["-m", "slow or not slow"], 80, id="all", marks=pytest.mark.slow),
    ],
)
def test_they_pass_on_jax(arguments: list[str], tests: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(FOLDER)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=FOLDER.parents[2],
        env={**environment, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= tests


@pytest.mark.full
def test_a_window_begun_on_tensorflow_and_ended_on_jax(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gradients = [(rng.normal(size=(2, 1)) * 10.0 ** rng.integers(-6, 7, (2, 1))).astype(np.float32) for _ in range(5)]
    model = linear(Accumulate(Replace(), 3))
    model.optimizer.build(model.trainable_variables)
    for gradient in gradients[:2]:
        model.optimizer.apply([tensor(gradient)], weight=np.float32(0.7))
    model.save(tmp_path / "begun.keras")
    weights = {f"w{k}": np.float32(k + 0.3) for k in range(3)}
    np.savez(tmp_path / "given.npz", **{f"g{k}": x for k, x in enumerate(gradients[2:])}, **weights)
    arguments = [str(tmp_path / name) for name in ("begun.keras", "given.npz", "result.npz")]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run(
        [sys.executable, resumed.__file__, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = resumed.finish(keras.models.load_model(arguments[0]), np.load(arguments[1]))
    with np.load(arguments[2]) as received:
        assert set(received.files) == set(expected)
        assert {name: received[name].tobytes() for name in received.files} == {
            name: x.tobytes() for name, x in expected.items()
        }
