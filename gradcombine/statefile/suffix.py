"""Which format a path names."""

from __future__ import annotations

import os
from pathlib import Path

from gradcombine.errors import GradCombineError
from gradcombine.statefile import npz_format, safetensors_format
from gradcombine.statefile.container import Format

_FORMATS: dict[str, Format] = {".npz": npz_format, ".safetensors": safetensors_format}


def format_of(operation: str, path: str | os.PathLike[str]) -> Format:
    """The format that a path's suffix names.

    Raises:
      GradCombineError: for another suffix, and where anything else than a file has this path: a FIFO would wait for
        ever, and nobody means to replace a device or a folder.
    """
    suffix = Path(path).suffix
    if suffix not in _FORMATS:
        raise GradCombineError(operation, f"a path that ends in {' or '.join(_FORMATS)}", repr(str(path)))
    if os.path.exists(path) and not os.path.isfile(path):
        raise GradCombineError(operation, "a regular file", repr(str(path)))
    return _FORMATS[suffix]
