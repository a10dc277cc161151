"""Processes of one TensorFlow cluster on this machine, with a time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

WORKER = Path(__file__).with_name("tensorflow_worker.py")
ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a process ended. ``printed``: the JSON on its last line of output, or None."""

    code: int
    printed: Any
    stderr: str


def free_addresses(size: int) -> list[str]:
    """Addresses on which nothing listens; all are bound at once, so that they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(size)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run_workers(size: int, *arguments: str, limit: float = 120) -> list[Ended]:
    """Runs `tensorflow_worker` in ``size`` processes; those that have not ended after ``limit`` seconds are killed."""
    addresses, started = free_addresses(size), []
    for rank in range(size):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps(task),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(WORKER), *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, cwd=ROOT, **pipes))
    deadline = time.monotonic() + limit
    try:
        outputs = [each.communicate(timeout=max(0.1, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return [Ended(p.returncode, _last(out), err) for p, (out, err) in zip(started, outputs, strict=True)]


def _last(output: str) -> Any:
    lines = output.strip().splitlines()
    return json.loads(lines[-1]) if lines else None
