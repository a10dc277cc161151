"""The .npz format: a ZIP archive of .npy files, not compressed.

References: `numpy.lib.format <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>`_; `numpy.savez
<https://numpy.org/doc/stable/reference/generated/numpy.savez.html>`_.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from gradcombine.formats import npz
from gradcombine.statefile.container import Contents, refused

_HEADER = "header"
_SUFFIX = ".npy"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write(file: IO[bytes], text: str, arrays: Mapping[str, np.ndarray]) -> None:
    header = np.frombuffer(text.encode(), np.uint8)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in {_HEADER: header, **arrays}.items():
            # A fixed date: the same state gives the same file.
            with archive.open(zipfile.ZipInfo(name + _SUFFIX, _EPOCH), "w", force_zip64=True) as entry:
                npy.write_array(entry, array, version=(1, 0), allow_pickle=False)


def read(path: Path) -> Contents:
    arrays = npz.read("statefile.load", path, compressed=False)
    header = arrays.pop(_HEADER, None)
    if header is None:
        raise refused("a gradcombine state file", "an archive without a header")
    if header.dtype != np.uint8 or len(header.shape) != 1:
        raise refused("a header of bytes", f"one of {header.dtype}{header.shape}")
    return Contents(header.whole().tobytes().decode(), arrays)
