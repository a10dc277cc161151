"""Processes on this machine that work together, with a time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """How a process ended. ``printed``: its last line of JSON among the lines that frameworks print, or None."""

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


def run_workers(module: str, tasks: Sequence[tuple[Sequence[str], dict[str, str]]], limit: float) -> list[Ended]:
    """Runs a module of this folder in one process per task; those that have not ended after the limit are killed.

    Args:
      module: its name.
      tasks: arguments and environment variables of each process.
      limit: in seconds.
    """
    started, deadline = list[subprocess.Popen[str]](), time.monotonic() + limit
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    try:
        for arguments, environment in tasks:
            command = [sys.executable, "-m", f"tests.multi_process.{module}", *arguments]
            started.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, **pipes))
        outputs = [each.communicate(timeout=max(0.1, deadline - time.monotonic())) for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    return [Ended(each.returncode, _printed(out), err) for each, (out, err) in zip(started, outputs, strict=True)]


def _printed(output: str) -> Any:
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return found[-1] if found else None
