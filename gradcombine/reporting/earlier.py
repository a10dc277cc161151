"""Earlier reports, from the files that ``--json`` wrote: baselines of later ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gradcombine.errors import GradCombineError, invalid, require_equal, require_file
from gradcombine.formats.safetensors import distinct

T = TypeVar("T")


def read_earlier(path: Path, version: int, read: Callable[[Any], T]) -> T:
    """Reads an earlier report of this version; ``read`` takes what is needed from its content.

    Raises:
      GradCombineError: a file that cannot be read, or of another form (where ``read`` raises a KeyError or the like) or
        version.
    """
    expected = "a baseline that --json has written"
    file = require_file(expected, path)
    try:
        content: Any = json.loads(file.read_text(), object_pairs_hook=distinct)
        require_equal("a baseline of version {}", version, content["version"])
        return read(content)
    except GradCombineError:
        raise
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise invalid(expected, f"{path}: {type(error).__name__}: {error}") from None
