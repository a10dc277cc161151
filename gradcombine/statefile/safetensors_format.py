"""The .safetensors format. Imported only when such a file is asked for: the library is optional.

References: `safetensors <https://huggingface.co/docs/safetensors/index>`_.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors

from gradcombine.statefile.container import refused

_KEY = "gradcombine"
_DTYPES = {"bool": "BOOL", **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)}}
_DTYPES |= {f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)}
_DTYPES |= {f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)}


def write(file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
    # The library's own writers copy all arrays, or hide the OSError of a full disk in a class of theirs.
    fields: dict[str, Any] = {"__metadata__": {_KEY: text}}
    end = 0
    # The widest first, so that each is aligned to its elements.
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    for name, array in ordered:
        offsets = [end, end + array.nbytes]
        fields[name] = {"dtype": _DTYPES[array.dtype.name], "shape": array.shape, "data_offsets": offsets}
        end += array.nbytes
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    file.write(len(header).to_bytes(8, "little") + header)
    for _, array in ordered:
        file.write(array.reshape(-1).view(np.uint8).data)


@contextmanager
def opened(path: Path) -> Iterator[SafetensorsReader]:
    with path.open("rb"):  # for the OSError of a file that is not there
        yield SafetensorsReader(path)


class SafetensorsReader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def text(self) -> str:
        # Dtypes, shapes and offsets are checked against the size of the file here; nothing is read yet.
        self._file: Any = safetensors.safe_open(self._path, framework="numpy")
        metadata = self._file.metadata() or {}
        if _KEY not in metadata:
            raise refused("a gradcombine state file", "a .safetensors file without a header")
        return metadata[_KEY]

    def names(self) -> frozenset[str]:
        return frozenset(self._file.keys())

    def array(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        found = self._file.get_slice(name)
        if (found.get_dtype(), tuple(found.get_shape())) != (_DTYPES[dtype.name], shape):
            raise refused(f"an array of {dtype}{shape}", f"one of {found.get_dtype()}{tuple(found.get_shape())}")
        return self._file.get_tensor(name)
