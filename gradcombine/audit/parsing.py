"""The HLO parser of jaxlib, run for files in a subprocess, as some damaged files crash it.

The subprocess runs this file as a script, so that it imports only jaxlib.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any


def hlo_parser() -> Any:
    """The module of jaxlib that contains the HLO parser."""
    version = import_module("jaxlib.version").__version_info__
    return import_module("jaxlib._jax" if version < (0, 10) else "jaxlib._hlo")


def parse(content: bytes) -> str:
    """Parses HLO, text or proto, and prints it as text.

    Raises:
      Exception: of several classes, for HLO that is damaged, truncated, or of a version that this jaxlib does not know.
    """
    hlo = hlo_parser()
    if content.lstrip().startswith(b"HloModule"):
        return hlo.hlo_module_from_text(content.decode()).to_string()
    fields = dict(_fields(content))
    try:
        module = hlo.HloModule.from_serialized_hlo_module_proto(content)
    except Exception:  # an HloProto, as XLA dumps it, whose first field is the module
        module = hlo.HloModule.from_serialized_hlo_module_proto(first := fields.get(1, b""))
        fields = dict(_fields(first))
    # The parser drops the numbers of devices, which are in the field device_assignment.
    counts = dict(_fields(fields.get(15, b"")))
    header, *lines = module.to_string().split("\n")
    return "\n".join([f"{header}, replica_count={counts.get(1, 1)}, num_partitions={counts.get(2, 1)}", *lines])


def _fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the numbers and values of the fields of a proto.

    Raises:
      ValueError: if it is truncated, which some of XLA's parsers do not notice.
    """
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        if tag & 7 not in (0, 1, 2, 5):
            raise ValueError("it is neither a proto nor text that begins with HloModule")
        size, start = _varint(content, position) if tag & 7 in (0, 2) else ({1: 8, 5: 4}[tag & 7], position)
        position = start + (size if tag & 7 else 0)
        if position > len(content):
            raise ValueError("the file is truncated")
        yield tag >> 3, content[start:position] if tag & 7 else size


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """Decodes a varint; returns it and the position after it."""
    value = shift = 0
    while position < len(content):
        value |= (content[position] & 127) << shift
        shift, position = shift + 7, position + 1
        if content[position - 1] < 128:
            return value, position
    raise ValueError("the file is truncated")


def parse_apart(contents: Iterable[bytes]) -> Iterator[str]:
    """Calls `parse` on each of ``contents`` in one subprocess.

    Raises:
      ValueError: with the message of an exception in `parse`, or if the subprocess crashed.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    requests, responses = process.stdin, process.stdout
    assert requests is not None and responses is not None
    try:
        for content in contents:
            with suppress(BrokenPipeError):
                requests.write(base64.b64encode(content) + b"\n")
                requests.flush()
            if not (response := responses.readline()):
                raise ValueError(f"XLA's parser ended with status {process.wait()}")
            text = base64.b64decode(response[1:]).decode()
            if response.startswith(b"-"):
                raise ValueError(text)
            yield text
    finally:
        process.kill()
        process.communicate()  # drains and closes the pipes


def _serve() -> None:
    """Parses each line of stdin, a base64-encoded file; prints "+" or "-" and its base64-encoded text or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles it
    responses = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep other output out of the pipe
    for line in sys.stdin.buffer:
        try:
            status, text = b"+", parse(base64.b64decode(line))
        except Exception as error:
            status, text = b"-", str(error)
        responses.write(status + base64.b64encode(text.encode(errors="replace")) + b"\n")
        responses.flush()


if __name__ == "__main__":
    _serve()
