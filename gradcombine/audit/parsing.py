"""XLA's own parser of HLO, which jaxlib ships; files are read in a process of its own, which some damaged ones end.

That process runs this file alone, so that it imports jaxlib and nothing else.
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
    """The module of jaxlib that reads HLO."""
    version = import_module("jaxlib.version").__version_info__
    return import_module("jaxlib._jax" if version < (0, 10) else "jaxlib._hlo")


def parse(content: bytes) -> str:
    """The text of HLO, from its text or proto.

    Raises:
      Exception: of several classes, for what is damaged, cut off, or of a version that this jaxlib does not know.
    """
    hlo = hlo_parser()
    if content.lstrip().startswith(b"HloModule"):
        return hlo.hlo_module_from_text(content.decode()).to_string()
    first, *_ = _fields(content)
    try:
        return hlo.HloModule.from_serialized_hlo_module_proto(content).to_string()
    except Exception:  # an HloProto, which XLA dumps, holds the module as its first field
        return hlo.HloModule.from_serialized_hlo_module_proto(first).to_string()


def _fields(content: bytes) -> Iterator[bytes]:
    """The fields of a proto; one that is cut off, which not every parser of XLA's minds, is an error."""
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        size, start = _varint(content, at) if tag & 7 in (0, 2) else ({1: 8, 5: 4}[tag & 7], at)
        at = start + (size if tag & 7 else 0)
        if at > len(content):
            raise ValueError("the file is cut off")
        yield content[start:at]


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while at < len(content):
        value |= (content[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if content[at - 1] < 128:
            return value, at
    raise ValueError("the file is cut off")


def parse_apart(contents: Iterable[bytes]) -> Iterator[str]:
    """`parse` in another process, for one after another.

    Raises:
      ValueError: says what `parse` says, or that a file has ended the process.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    questions, answers = process.stdin, process.stdout
    assert questions is not None and answers is not None
    try:
        for content in contents:
            with suppress(BrokenPipeError):
                questions.write(base64.b64encode(content) + b"\n")
                questions.flush()
            if not (answer := answers.readline()):
                raise ValueError(f"XLA's parser ended with status {process.wait()}")
            text = base64.b64decode(answer[1:]).decode()
            if answer.startswith(b"-"):
                raise ValueError(text)
            yield text
    finally:
        process.kill()
        process.communicate()  # closes the pipes, whatever is left in them


def _answer_all() -> None:
    """Answers a line in base 64 with a line: whether it is a text comes before it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the process that asks
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints
    for line in sys.stdin.buffer:
        try:
            kind, text = b"+", parse(base64.b64decode(line))
        except Exception as error:
            kind, text = b"-", str(error)
        answers.write(kind + base64.b64encode(text.encode(errors="replace")) + b"\n")
        answers.flush()


if __name__ == "__main__":
    _answer_all()
