"""Files and checkpoints of arrays. Each format's library is imported as such a file is met."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from gradcombine.errors import GradCombineError
from gradcombine.formats import Entry, npz, safetensors
from gradcombine.formats.entry import first_line

__all__ = ["Dump", "Entry", "detect", "open_dump"]

Dump: TypeAlias = Mapping[str, Entry]
"""The entries of a file, by name."""

_READERS = {
    "h5": ("gradcombine.verify.dumps.hdf5", "h5py"),
    "tensorflow": ("gradcombine.verify.dumps.tensorflow", "tensorflow"),
    "orbax": ("gradcombine.verify.dumps.orbax", "orbax-checkpoint"),
}
"""The module that reads a format, imported only then, and the package that it needs."""

EXPECTED = "a .npz, .safetensors, .h5 or .weights.h5 file, a tf.train checkpoint or an Orbax checkpoint"


def open_dump(path: str | Path) -> Dump:
    """The arrays of a file or checkpoint, by name; read when they are asked for.

    Args:
      path: an .npz, .safetensors, .h5 or .weights.h5 file; the prefix of a tf.train checkpoint, its .index file or its
        directory; or an Orbax checkpoint's directory.

    Raises:
      GradCombineError: for a path that does not exist, a format that is not known, a package that it needs and is not
        installed, and a file that is damaged.
    """
    path = Path(path)
    kind = detect(path)
    if kind is None:
        received = str(path) if path.exists() else f"{path}, which does not exist"
        raise GradCombineError("diff", EXPECTED, received)
    try:
        return _read(kind, path)
    except (GradCombineError, MemoryError):
        raise
    except Exception as error:
        # Each library has its own classes for a damaged file, from zlib.error to tf.errors.DataLossError.
        raise GradCombineError("diff", f"{path.name} to be a whole {kind} file", first_line(error)) from error


def _read(kind: str, path: Path) -> Dump:
    if kind == "npz":
        return npz.read("diff", path)
    if kind == "safetensors":
        return safetensors.read("diff", path).entries
    module, package = _READERS[kind]
    try:
        reader: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise GradCombineError("diff", f"{package} to be installed, to read {path.name}", str(error)) from None
    return reader.read(path)


def detect(path: Path) -> str | None:
    """The format of a path, by its name and by what lies beside it; None where it has none."""
    for suffix, kind in ((".npz", "npz"), (".safetensors", "safetensors"), (".h5", "h5"), (".hdf5", "h5")):
        if path.name.endswith(suffix) and path.is_file():
            return kind
    if path.is_dir():
        if (path / "checkpoint").is_file():
            return "tensorflow"
        if any((child / "_METADATA").is_file() for child in (path, *filter(Path.is_dir, sorted(path.iterdir())))):
            return "orbax"
        return None
    index = path if path.name.endswith(".index") else path.with_name(f"{path.name}.index")
    return "tensorflow" if index.is_file() else None
