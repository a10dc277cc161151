"""Updates that a parameter-server worker made before it was killed count twice; its return values count once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("tensorflow"), pytest.mark.full]


def test_what_is_returned_with_its_number_counts_once() -> None:
    command = [sys.executable, "-m", "tests.integrations.tensorflow.parameter_servers"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["merged"] == 1 + 4 + 16 + 64
    # One of the four was interrupted when its worker was killed, and ran again.
    assert found["added"] - found["merged"] in (1, 4, 16, 64)
    assert "expected each microbatch once, received twice: 0" in found["refused"]
