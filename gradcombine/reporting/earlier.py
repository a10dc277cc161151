"""Baselines: earlier reports, as ``--json`` wrote them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gradcombine.errors import GradCombineError, invalid, require_equal, require_file
from gradcombine.formats.safetensors import distinct

T = TypeVar("T")


def read_earlier(path: Path, version: int, read: Callable[[Any], T]) -> T:
    """Returns ``read(content)`` for the parsed JSON of an earlier report.

    Raises:
      GradCombineError: for a file that cannot be read, another version, and content for which ``read`` raises a
        KeyError or a similar error.
    """
    expected = "a baseline written by --json"
    file = require_file(expected, path)
    try:
        content: Any = json.loads(file.read_text(), object_pairs_hook=distinct)
        require_equal("a baseline of version {}", version, content["version"])
        return read(content)
    except GradCombineError:
        raise
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise invalid(expected, f"{path}: {type(error).__name__}: {error}") from None
