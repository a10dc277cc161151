# pyright: standard
"""PyTorch's files and tensors as NumPy arrays."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gradcombine.errors import GradCombineError, invalid
from gradcombine.formats import Entry, from_blocks, unread
from gradcombine.types import Tree

_OWN_DTYPES = {
    "bfloat16": ("int16", ml_dtypes.bfloat16),
    "float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "float8_e4m3fnuz": ("uint8", ml_dtypes.float8_e4m3fnuz),
    "float8_e5m2": ("uint8", ml_dtypes.float8_e5m2),
    "float8_e5m2fnuz": ("uint8", ml_dtypes.float8_e5m2fnuz),
    "float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
"""Dtypes that NumPy lacks: the integer dtype to view a tensor's bits as, and the ml_dtypes dtype."""

_NUMPY_DTYPES = frozenset(
    (
        *("bool", "float16", "float32", "float64", "complex64", "complex128"),
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    )
)

_MOST_REPEATED = 1 << 16
"""Limit of elements per byte of storage. A tensor may be a view that repeats its storage so often that reading it takes
forever."""

_MOST_LEVELS = 100
_MOST_OBJECTS = 1 << 20
"""Limit of dicts, lists and leaves in a file: references to shared lists can multiply exponentially."""


def is_archive(path: Path) -> bool:
    """Whether a file is a ZIP archive, the format of torch.save since PyTorch 1.6."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def read(path: Path) -> dict[str, Entry]:
    """The tensors and numbers of a torch.save file by their keys, such as ``model/layers.0.weight``.

    The file is opened only with PyTorch's weights-only loading, which builds tensors, numbers, text, lists and dicts,
    and calls nothing else that a pickle names. Tensors are read on demand, unless the file was written before PyTorch
    1.6. None and empty lists are skipped; other values without numbers become unread entries.

    Raises:
      GradCombineError: for a pickle that names any other class or function, a TorchScript archive, a tar file from
        before PyTorch 0.2, and a tree that contains itself.
      ModuleNotFoundError: without torch.
      Exception: of various types, for a damaged file.
    """
    import torch  # pyright: ignore[reportMissingImports]

    try:
        with warnings.catch_warnings(action="ignore"):  # about deprecated contents
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive(path))
    except Exception as error:
        raise _load_error(path, error) from None
    leaves = list(_leaves(content, (), itertools.count()))
    counts = Counter("/".join(map(str, keys)) for keys, _ in leaves)
    entries: dict[str, Entry] = {}
    for keys, leaf in leaves:
        name = "/".join(map(str, keys))
        # A key that contains a slash, or 1 and "1", may make the name ambiguous: quoted as in the paths of errors.
        name = name if counts[name] == 1 else "".join(f"[{key!r}]" for key in keys)
        entries[name] = _entry(name, leaf)
    return entries


def _load_error(path: Path, error: Exception) -> GradCombineError:
    """Translates an error of weights-only loading, and drops its advice to load the file unsafely."""
    text = re.sub(r"^\[enforce fail at [^]]*\][ .]*", "", str(error))
    allowed = f"{path.name} to contain only tensors, numbers, text, lists and dicts"
    allowed += " (torch.save(model.state_dict(), path))"
    if (named := re.search(r"GLOBAL (\S+)", text)) is not None:
        return invalid(allowed, f"a pickle that names {named[1]}, which is not called")
    if "TorchScript" in text:
        return invalid(allowed, "a TorchScript archive, which is a program")
    if "legacy .tar" in text:
        return invalid(allowed, "a tar file of PyTorch before 0.2, which is not unpacked")
    if "Weights only load failed" in text or isinstance(error, KeyError):
        return invalid(allowed, "a different pickle, or no pickle")
    first = next(iter(text.splitlines()), "").partition(". ")[0]
    return invalid(f"{path.name} to be a complete torch.save file", f"{type(error).__name__}: {first}")


def _leaves(node: Any, keys: tuple[Any, ...], seen: Iterator[int]) -> Iterator[tuple[Any, Any]]:
    if len(keys) > _MOST_LEVELS or next(seen) > _MOST_OBJECTS:
        expected = f"at most {_MOST_LEVELS} levels of dicts and lists, and {_MOST_OBJECTS} of them"
        raise invalid(expected, "more (a tree that contains itself?)", "/".join(map(str, keys[:3])))
    if isinstance(node, dict):
        below = node.items()
    elif isinstance(node, (list, tuple)):
        below = enumerate(node)
    else:
        if node is not None:
            yield keys or ("value",), node
        return
    for key, child in below:
        yield from _leaves(child, (*keys, key), seen)


def _entry(name: str, leaf: Any) -> Entry:
    import torch  # pyright: ignore[reportMissingImports]

    if isinstance(leaf, torch.Tensor):
        shape, reason = tuple(leaf.shape), _unreadable(leaf)
        if not reason and leaf.numel() > _MOST_REPEATED * (leaf.untyped_storage().nbytes() + 1):
            reason = f"a view of {leaf.numel()} elements of {leaf.untyped_storage().nbytes()} bytes"
        if reason:
            return unread(name, reason, shape)
        return from_blocks(name, shape, _dtype(leaf), lambda index: _array(leaf[index]))
    number = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else None
    if number is None or number.dtype == object:
        return unread(name, f"a value of type {type(leaf).__name__}")
    return from_blocks(name, (), number.dtype, lambda index: number[index])


def converted(value: Tree) -> Tree:
    """Replaces the PyTorch tensors in a tree by NumPy arrays. Returns the tree itself if torch is not imported.

    Args:
      value: dicts, lists and tuples of tensors and other leaves. Gradients need not be detached.

    Raises:
      GradCombineError: for a tensor that is not dense, quantized, sharded over processes, or of a dtype that NumPy and
        ml_dtypes lack.
    """
    torch = sys.modules.get("torch")
    tensor = getattr(torch, "Tensor", None)
    return value if tensor is None else _converted(value, "", tensor, 0)


def _converted(node: Any, path: str, tensor: type, level: int) -> Any:
    if isinstance(node, tensor):
        if reason := _unreadable(node):
            raise invalid("a dense tensor of numbers", reason, path)
        # A copy, since the next step overwrites a parameter and its .grad.
        return _array(node).copy()
    if level == _MOST_LEVELS:
        return node
    inner = partial(_converted, tensor=tensor, level=level + 1)
    if isinstance(node, dict):
        return {key: inner(child, path=f"{path}[{key!r}]") for key, child in node.items()}
    if isinstance(node, (list, tuple)):
        items = [inner(child, path=f"{path}[{i}]") for i, child in enumerate(node)]
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    return node


def _unreadable(tensor: Any) -> str:
    """Why a tensor cannot be read as an array of numbers; empty if it can."""
    dtype = _name(tensor)
    if tensor.is_quantized:
        return f"a quantized tensor, {dtype} (pass its dequantize())"
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        return f"a tensor of layout {tensor.layout} (pass its to_dense())"
    if tensor.is_meta:
        return "a meta tensor, which holds no numbers"
    if hasattr(tensor, "full_tensor"):
        return "a DTensor, one shard of a tensor (pass its full_tensor())"
    return "" if dtype in _NUMPY_DTYPES or dtype in _OWN_DTYPES else f"elements of dtype {dtype}"


def _name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dtype(tensor: Any) -> np.dtype:
    name = _name(tensor)
    return np.dtype(_OWN_DTYPES[name][1] if name in _OWN_DTYPES else name)


def _array(tensor: Any) -> np.ndarray:
    """A readable tensor as an array, which shares its memory if it is contiguous and on the host."""
    dense, dtype = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous(), _dtype(tensor)
    if (bits := _OWN_DTYPES.get(_name(tensor))) is not None:
        dense = dense.view(getattr(sys.modules["torch"], bits[0]))
    return dense.numpy().view(dtype)
