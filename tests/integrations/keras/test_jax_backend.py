"""The tests of this folder on Keras' JAX backend, which is chosen at import: in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
