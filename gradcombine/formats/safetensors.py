"""The .safetensors format: the length of the header, a JSON header, and the concatenated arrays.

References: `safetensors <https://huggingface.co/docs/safetensors/index>`_.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from gradcombine import formats
from gradcombine.errors import GradCombineError, invalid, require_equal
from gradcombine.formats import Entry, from_pieces, unread
from gradcombine.types import Array

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"{sign}{bits}": np.dtype(f"<{sign.lower()}{bits // 8}") for sign in "IU" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "C64": np.dtype("<c8"),
}
"""NumPy dtypes by their names in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000
"""Limit that the format sets."""


class Contents(NamedTuple):
    """The arrays of a file by name, and the text metadata of its header."""

    entries: dict[str, Entry]
    texts: dict[str, str]


def write(file: IO[bytes], arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Writes arrays and text metadata to an empty file that is open for writing. Equal contents give equal bytes."""
    # Not with the safetensors package: it copies all arrays, or hides the OSError of a full disk in its own class.
    fields: dict[str, Any] = {"__metadata__": dict(texts)}
    end = 0
    # Widest dtype first, which aligns every array to its element size.
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
    """Reads the header of a .safetensors file; its arrays are read on access.

    Raises:
      GradCombineError: for a damaged header, and unless the arrays fill the rest of the file exactly.
      OSError: if the file cannot be opened.
      Exception: of several other classes, for a malformed header.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise invalid(f"a header of up to {size - 8} bytes in {path.name}", length)
        fields = parsed(path.name, file.read(length))
    texts = fields.pop("__metadata__", {})
    end, entries = 0, {}
    described = [(*_described(name, array), name) for name, array in fields.items()]
    for start, stop, shape, dtype_name, name in sorted(described):
        dtype = DTYPES.get(dtype_name)
        if start != end or stop < start:
            raise invalid(f"bytes that begin at {end}", f"{start} to {stop}", name)
        end = stop
        if dtype is None:
            entries[name] = unread(name, f"elements of dtype {dtype_name}", shape)
            continue
        require_equal(f"the bytes of {dtype}{shape}, {{}}", math.prod(shape) * dtype.itemsize, stop - start, name)
        contents = partial(_pieces, path, 8 + length + start, stop - start, dtype)
        entries[name] = from_pieces(name, shape, dtype, contents)
    require_equal(f"a file of {{}} bytes in {path.name}", 8 + length + end, size)
    return Contents({name: entries[name] for name in fields}, texts)


def _pieces(path: Path, start: int, nbytes: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        file.seek(start)
        while nbytes and (data := file.read(min(nbytes, formats.PIECE * dtype.itemsize))):
            nbytes -= len(data)
            yield np.frombuffer(data, dtype)


def _described(name: str, array: Array) -> tuple[int, int, tuple[int, ...], str]:
    """Start, stop, shape and dtype name of an array, as the header declares them."""
    try:
        start, stop = map(_natural, array["data_offsets"])
        return start, stop, tuple(map(_natural, array["shape"])), str(array["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        expected = "a dtype, a shape and two data_offsets, all integers 0 or greater"
        raise invalid(expected, "other fields", name) from error


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size")
    return number


def parsed(name: str, content: bytes) -> dict[str, Any]:
    """Parses a file's JSON object; raises for duplicate keys."""
    try:
        value: Any = json.loads(content.decode(), object_pairs_hook=distinct)
    except GradCombineError:
        raise
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON in {name}", "other or too deeply nested text") from error
    if not isinstance(value, dict):
        raise invalid(f"a JSON object in {name}", type(cast(object, value)).__name__)
    return cast(dict[str, Any], value)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An ``object_pairs_hook`` for ``json`` that rejects duplicate keys, of which ``json`` keeps the last."""
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise invalid("unique keys in a JSON object", f"{count} equal ones", name)
    return dict(pairs)
