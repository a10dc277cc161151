"""The .safetensors format.

References: `safetensors <https://huggingface.co/docs/safetensors/index>`_.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from gradcombine.formats import safetensors
from gradcombine.statefile.container import Contents, refused

_KEY = "gradcombine"
_NAMES = {dtype: name for name, dtype in safetensors.DTYPES.items()}


def write(file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
    # The library's own writers copy all arrays, or hide the OSError of a full disk in a class of theirs.
    fields: dict[str, Any] = {"__metadata__": {_KEY: text}}
    end = 0
    # The widest first, so that each is aligned to its elements.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    for name, array in ordered:
        offsets = [end, end + array.nbytes]
        fields[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": offsets}
        end += array.nbytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for _, array in ordered:
        file.write(array.reshape(-1).view(np.uint8).data)


def read(path: Path) -> Contents:
    found = safetensors.read("statefile.load", path)
    if _KEY not in found.texts:
        raise refused("a gradcombine state file", "a .safetensors file without a header")
    return Contents(found.texts[_KEY], found.entries)
