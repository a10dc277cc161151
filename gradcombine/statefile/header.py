"""The header of a state file, and the layout of a state, which the header has to match.

The header is two lines of text: the SHA-256 of the second line in hexadecimal, and a JSON object.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np

from gradcombine import tree
from gradcombine.backends.registry import load, owner, placeholder
from gradcombine.errors import MOST_REPLICAS, invalid, require_equal, require_given, require_integer, translate_errors
from gradcombine.reductions.algebra import Reduction
from gradcombine.types import AccumulateState, BinaryCounter, State, Tree

FORMAT = "gradcombine state"
VERSION = 3
MAX_LEVELS = 32
"""Most levels of a binary counter: the position of a window is an int32."""


class Leaf(NamedTuple):
    """A leaf of the state.

    Attributes:
      path: for instance ``".levels[0].value['w']"``.
      dtype: NumPy or ml_dtypes name; None for a leaf that is None.
      shape: None for a leaf that is None.
      sha256: checksums of its bytes (C order, little-endian) in hexadecimal, one per replica.
    """

    path: str
    dtype: str | None
    shape: tuple[int, ...] | None
    sha256: tuple[str, ...]


class Header(NamedTuple):
    """The header of a state file.

    Attributes:
      gradcombine: version of the library that wrote the file.
      reduction: name of the reduction that created the states.
      settings: the reduction with all wrappers and settings, for instance ``"clipped(mean(), max_norm=1.0)"``. None for
        files of version 2, which lack it.
      replicas: number of states in the file, one per replica.
      levels: number of partial states of each window: 1 in order ``"sequential"``, floor(log2(every)) + 1 in order
        ``"tree"``. None for states that are not windows.
      kinds: class name of each NamedTuple in the state, by path. Reveals the precision and members of the reduction.
      leaves: the leaves of a state. Only their values differ between replicas.
    """

    gradcombine: str
    reduction: str
    settings: str | None
    replicas: int
    levels: int | None
    kinds: dict[str, str]
    leaves: tuple[Leaf, ...]


def encode(header: Header) -> str:
    """Encodes a header as text."""
    fields = {"format": FORMAT, "version": VERSION, **header._asdict()}
    fields["leaves"] = [leaf._asdict() for leaf in header.leaves]
    body = json.dumps(fields, ensure_ascii=True, separators=(",", ":"))
    return f"{_digest(body)}\n{body}"


def decode(text: str) -> Header:
    """Decodes a header from text.

    Raises:
      GradCombineError: for a damaged text, another format or a newer version.
    """
    digest, _, body = text.partition("\n")
    if _digest(body) != digest:
        raise invalid("a header that matches its checksum", "a mismatch: the file is damaged")
    fields = _of(dict, json.loads(body))
    version = fields.get("version")
    if fields.get("format") != FORMAT:
        raise invalid(f"the format {FORMAT!r}", "another format")
    if version not in (2, VERSION):
        written = f"version {version!r}, written by gradcombine {fields.get('gradcombine')!r}"
        raise invalid(f"version {VERSION} of the format", written)
    levels = fields["levels"]
    header = Header(
        gradcombine=_of(str, fields["gradcombine"]),
        reduction=_of(str, fields["reduction"]),
        settings=None if fields["version"] == 2 else _of(str, fields["settings"]),
        replicas=require_integer("1 replica or more", fields["replicas"], highest=MOST_REPLICAS),
        levels=None if levels is None else require_integer(f"from 1 to {MAX_LEVELS} levels", levels, 1, MAX_LEVELS),
        kinds={_of(str, path): _of(str, kind) for path, kind in _of(dict, fields["kinds"]).items()},
        leaves=tuple(_leaf(leaf) for leaf in _of(list, fields["leaves"])),
    )
    for leaf in header.leaves:
        require_equal("{} checksums", 0 if leaf.dtype is None else header.replicas, len(leaf.sha256))
    return header


def _leaf(fields: Any) -> Leaf:
    shape, dtype = fields["shape"], fields["dtype"]
    return Leaf(
        path=_of(str, fields["path"]),
        dtype=None if dtype is None else _of(str, dtype),
        shape=None if shape is None else tuple(_of(int, n) for n in shape),
        sha256=tuple(_of(str, digest) for digest in fields["sha256"]),
    )


def _of(kind: type, value: object) -> Any:
    if type(value) is not kind:
        raise invalid(f"a {kind.__name__}", type(value).__name__)
    return value


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


class Layout(NamedTuple):
    """Structure, shapes and dtypes of a state, without its values.

    Attributes:
      structure: containers.
      leaves: dtype and shape of each leaf by path; None for a leaf that is None.
      kinds: class name of each NamedTuple, by path.
    """

    structure: tree.Structure
    leaves: dict[str, tuple[np.dtype, tuple[int, ...]] | None]
    kinds: dict[str, str]


def layout(state: State) -> Layout:
    """The layout of a state.

    Raises:
      GradCombineError: for leaves whose paths are equal as text.
    """
    leaves, structure = tree.flatten(state)
    described = dict(zip(structure.paths(), map(_described, leaves), strict=True))
    if duplicates := len(leaves) - len(described):
        raise invalid("leaves with unique paths", f"{duplicates} duplicates")
    kinds = {path: kind.__name__ for path, kind in structure.containers() if hasattr(kind, "_fields")}
    return Layout(structure, described, kinds)


def template(reduction: Reduction, like: Tree, levels: int | None) -> State:
    """The empty state for trees like ``like``, in NumPy arrays: a window with ``levels`` levels unless that is None."""
    part = reduction.init(tree.map(placeholder, like))
    if levels is None:
        return part
    zero = np.zeros((), np.int32)
    if levels == 1:
        return AccumulateState((part,), zero, zero)
    stacked = tree.map(lambda x: np.broadcast_to(x, (levels, *np.shape(x))), part)
    return AccumulateState(BinaryCounter(stacked, zero), zero, zero)


def on_host(state: State) -> State:
    """Copies a state to NumPy arrays.

    Raises:
      GradCombineError: for values that are traced or partly in other processes.
    """
    leaves, structure = tree.flatten(state)
    return tree.unflatten(structure, [value_of(x, path) for x, path in zip(leaves, structure.paths(), strict=True)])


def _described(leaf: Any) -> tuple[np.dtype, tuple[int, ...]] | None:
    backend = None if leaf is None else owner(leaf)
    return None if backend is None else (backend.dtype(leaf), backend.shape(leaf))


def value_of(leaf: Any, path: str) -> Any:
    """The leaf as a NumPy array, or None. Raises as `on_host` does."""
    if leaf is None:
        return None
    backend = owner(leaf)
    assert backend is not None
    expected = "an array whose value is available in this process"
    with translate_errors(expected, RuntimeError, path=path):
        value = backend.concrete(backend.asarray(leaf))
    array = load("numpy").asarray(require_given(expected, value, "a traced one", path))
    if array.dtype.hasobject:
        raise invalid("an array of numbers", array.dtype, path)
    return array
