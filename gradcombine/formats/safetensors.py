"""The .safetensors format: the length of a header, the header in JSON, and the arrays one after another.

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

from gradcombine.errors import GradCombineError, invalid, require_equal
from gradcombine.formats import entry
from gradcombine.formats.entry import Entry
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
"""Names of dtypes in the format."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MOST_IN_HEADER = 100_000_000
"""The format's own limit, in bytes."""


class Contents(NamedTuple):
    """The arrays of a file by name, and the texts that its header holds beside them."""

    entries: dict[str, Entry]
    texts: dict[str, str]


def write(file: IO[bytes], arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> None:
    """Writes arrays and texts to a file that is open and empty. The same contents give the same bytes."""
    # The library's own writers copy all arrays, or hide the OSError of a full disk in a class of theirs.
    fields: dict[str, Any] = {"__metadata__": dict(texts)}
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
    """The arrays of a .safetensors file; all that is read before they are asked for is the header.

    Raises:
      GradCombineError: for a damaged header, and for arrays that are not exactly the rest of the file.
      OSError: for a path that is not there.
      Exception: of some other classes, for a header that is not JSON of the right form.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _MOST_IN_HEADER):
            raise invalid(f"a header of up to {size - 8} bytes in {path.name}", length)
        fields = parsed(path.name, file.read(length))
    texts = fields.pop("__metadata__", {})
    end, entries = 0, {}
    described = [(*_described(name, array), name) for name, array in fields.items()]
    for begin, after, shape, kind, name in sorted(described):
        dtype = DTYPES.get(kind)
        if begin != end or after < begin:
            raise invalid(f"bytes that begin at {end}", f"{begin} to {after}", name)
        end = after
        if dtype is None:
            entries[name] = entry.unread(name, f"elements of dtype {kind}", shape)
            continue
        require_equal(f"the bytes of {dtype}{shape}, {{}}", math.prod(shape) * dtype.itemsize, after - begin, name)
        contents = partial(_pieces, path, 8 + length + begin, after - begin, dtype)
        entries[name] = entry.from_pieces(name, shape, dtype, contents)
    require_equal(f"a file of {{}} bytes in {path.name}", 8 + length + end, size)
    return Contents({name: entries[name] for name in fields}, texts)


def _pieces(path: Path, start: int, nbytes: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        file.seek(start)
        while nbytes and (data := file.read(min(nbytes, entry.PIECE * dtype.itemsize))):
            nbytes -= len(data)
            yield np.frombuffer(data, dtype)


def _described(name: str, array: Array) -> tuple[int, int, tuple[int, ...], str]:
    """Where an array begins and ends, its shape and its dtype's name, as the header has them."""
    try:
        begin, after = map(_natural, array["data_offsets"])
        return begin, after, tuple(map(_natural, array["shape"])), str(array["dtype"])
    except (TypeError, KeyError, ValueError) as error:
        expected = "a dtype, a shape and two data_offsets of numbers from 0 on"
        raise invalid(expected, "other fields", name) from error


def _natural(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no size")
    return number


def parsed(name: str, content: bytes) -> dict[str, Any]:
    """A file's object in JSON, whose names differ."""
    try:
        found: Any = json.loads(content.decode(), object_pairs_hook=distinct)
    except GradCombineError:
        raise
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON in {name}", "another text, or one nested without end") from error
    if not isinstance(found, dict):
        raise invalid(f"an object of JSON in {name}", type(cast(object, found)).__name__)
    return cast(dict[str, Any], found)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object in JSON, for ``object_pairs_hook``: its names must differ, of which json keeps the last."""
    for name, times in Counter(name for name, _ in pairs).items():
        if times > 1:
            raise invalid("names that differ in an object of JSON", f"{times} that do not", name)
    return dict(pairs)
