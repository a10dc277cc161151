"""The header of a state file: what it holds, and the checksums.

The text is two lines: the SHA-256 of the second line in hexadecimal digits, and a JSON object.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any, NamedTuple

from gradcombine.errors import GradCombineError

FORMAT = "gradcombine state"
VERSION = 2
MAX_LEVELS = 32
"""A window's position is an int32: its binary counter has no more levels than that."""


class Leaf(NamedTuple):
    """One leaf of the state.

    Attributes:
      path: where in the state, for instance ``".levels[0].value['w']"``.
      dtype: its NumPy (or ml_dtypes) name; None for a leaf that is None.
      shape: None for a leaf that is None.
      sha256: of its bytes (C order, little-endian), in hexadecimal digits, one a replica.
    """

    path: str
    dtype: str | None
    shape: tuple[int, ...] | None
    sha256: tuple[str, ...]


class Header(NamedTuple):
    """What a state file says about itself.

    Attributes:
      gradcombine: the version of the library that wrote it.
      reduction: the name of the reduction that made the states.
      replicas: how many states the file holds, one a replica, by rank.
      levels: of windows, how many partial states each has: 1 in order ``"sequential"``, floor(log2(every)) + 1 in order
        ``"tree"``. None for states of a reduction without a window.
      kinds: the class of each NamedTuple in the state, by path. Precision and members of the reduction show there.
      leaves: every leaf of a state; the same on all replicas, except for their values.
    """

    gradcombine: str
    reduction: str
    replicas: int
    levels: int | None
    kinds: dict[str, str]
    leaves: tuple[Leaf, ...]


def own_version() -> str:
    """The version of this library, as installed."""
    return version("gradcombine")


def encode(header: Header) -> str:
    """The text of a header."""
    fields = {"format": FORMAT, "version": VERSION, **header._asdict()}
    fields["leaves"] = [leaf._asdict() for leaf in header.leaves]
    body = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
    return f"{_digest(body)}\n{body}"


def decode(text: str) -> Header:
    """The header of this text.

    Raises:
      GradCombineError: for a damaged text, another format or a newer version.
    """
    digest, _, body = text.partition("\n")
    if _digest(body) != digest:
        raise _refused("a header that matches its checksum", "another one: the file is damaged")
    fields = json.loads(body)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise _refused(f"the format {FORMAT!r}", "another one")
    if fields.get("version") != VERSION:
        written = f"version {fields.get('version')!r}, written by gradcombine {fields.get('gradcombine')!r}"
        raise _refused(f"version {VERSION} of the format", written)
    header = Header(
        gradcombine=_of(str, fields["gradcombine"]),
        reduction=_of(str, fields["reduction"]),
        replicas=_of(int, fields["replicas"]),
        levels=None if fields["levels"] is None else _of(int, fields["levels"]),
        kinds={_of(str, path): _of(str, kind) for path, kind in _of(dict, fields["kinds"]).items()},
        leaves=tuple(_leaf(leaf) for leaf in _of(list, fields["leaves"])),
    )
    if header.levels is not None and not 1 <= header.levels <= MAX_LEVELS:
        raise _refused(f"from 1 to {MAX_LEVELS} levels", header.levels)
    if header.replicas < 1:
        raise _refused("1 replica or more", header.replicas)
    for leaf in header.leaves:
        if len(leaf.sha256) != (0 if leaf.dtype is None else header.replicas):
            raise _refused(f"{header.replicas} checksums", len(leaf.sha256))
    return header


def _leaf(fields: Any) -> Leaf:
    shape, dtype = fields["shape"], fields["dtype"]
    return Leaf(
        path=_of(str, fields["path"]),
        dtype=None if dtype is None else _of(str, dtype),
        shape=None if shape is None else tuple(_of(int, n) for n in shape),
        sha256=tuple(_of(str, digest) for digest in fields["sha256"]),
    )


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise _refused(f"a {kind.__name__}", type(value).__name__)
    return value


def _refused(expected: str, received: Any) -> GradCombineError:
    return GradCombineError("statefile.load", expected, received)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
