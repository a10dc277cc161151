"""States to a file, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradcombine import tree
from gradcombine.accumulate import depth_of
from gradcombine.backends.registry import resolve
from gradcombine.errors import GradCombineError
from gradcombine.formats import Entry
from gradcombine.reductions.algebra import Reduction, require_reduction
from gradcombine.statefile import container
from gradcombine.statefile import header as headers
from gradcombine.statefile.container import array_name, decoding, refused, require_path
from gradcombine.statefile.header import Header, Leaf
from gradcombine.statefile.layout import Layout, difference, layout, on_host, require_state_of, template
from gradcombine.types import AccumulateState, State, Tree


def write(operation: str, path: str | os.PathLike[str], reduction: Reduction, states: Sequence[State]) -> None:
    """Writes one state a replica; see `gradcombine.statefile.save_replicas`."""
    require_reduction(operation, reduction)
    target = require_path(operation, path)
    parts = [on_host(operation, state) for state in states]
    first = layout(operation, parts[0])
    for rank, part in enumerate(parts):
        require_state_of(operation, reduction, part)
        found = layout(operation, part)
        if (found.leaves, found.kinds) != (first.leaves, first.kinds):
            raise GradCombineError(operation, "states of one structure, shapes and dtypes", f"another at rank {rank}")
    columns = [tree.flatten(operation, part)[0] for part in parts]
    arrays = {
        array_name(rank, i): container.to_stored(leaf)
        for rank, column in enumerate(columns)
        for i, leaf in enumerate(column)
        if leaf is not None
    }
    leaves: list[Leaf] = []
    for i, (where, described) in enumerate(first.leaves.items()):
        if described is None:
            leaves.append(Leaf(where, None, None, ()))
        else:
            digests = tuple(container.digest(arrays[array_name(rank, i)]) for rank in range(len(parts)))
            leaves.append(Leaf(where, described[0].name, described[1], digests))
    levels = depth_of(parts[0]) if isinstance(parts[0], AccumulateState) else None
    header = Header(headers.own_version(), reduction.name, len(parts), levels, first.kinds, tuple(leaves))
    container.write(target, headers.encode(header), arrays)


def read_header(operation: str, path: str | os.PathLike[str]) -> Header:
    """The header alone."""
    source = require_path(operation, path)
    with decoding(source):
        return headers.decode(container.read(source).text)


def read(
    operation: str, path: str | os.PathLike[str], reduction: Reduction, like: Tree, replicas: int | None = None
) -> list[State]:
    """One state a replica; see `gradcombine.statefile.load`."""
    require_reduction(operation, reduction)
    source = require_path(operation, path)
    with decoding(source):
        contents = container.read(source)
        header = headers.decode(contents.text)
    if header.reduction != reduction.name:
        raise refused(f"states of {reduction.name!r}", f"states of {header.reduction!r}")
    if replicas is not None and header.replicas != replicas:
        raise refused(f"{replicas} replica (load_replicas takes several)", header.replicas)
    wanted = layout(operation, template(operation, reduction, like, header.levels))
    _require_layout(wanted, header)
    with decoding(source):
        columns = _read(contents.arrays, header, wanted)
    backend = resolve(operation, tree.flatten(operation, like)[0])
    numpy = backend.name == "numpy"

    def state(column: list[Any]) -> State:
        # What stands for "no gradient" is that of ``like``; nothing else is taken from the empty state.
        return tree.unflatten(wanted.structure, [x if x is None or numpy else backend.asarray(x) for x in column])

    return [state(column) for column in columns]


def _require_layout(wanted: Layout, header: Header) -> None:
    for path in [*wanted.kinds, *header.kinds]:
        expected, received = wanted.kinds.get(path), header.kinds.get(path)
        if expected != received and not (_marks_absence(expected) and _marks_absence(received)):
            raise GradCombineError("statefile.load", _named(expected), _named(received), path or "(root)")
    found = {leaf.path: leaf for leaf in header.leaves}
    for path in [*wanted.leaves, *found]:
        if path not in found:
            raise GradCombineError("statefile.load", "a leaf, as in like", "none in the file", path)
        if path not in wanted.leaves:
            raise GradCombineError("statefile.load", "no leaf, as in like", "one in the file", path)
        leaf, described = found[path], wanted.leaves[path]
        expected = (None, None) if described is None else (described[0].name, described[1])
        received = (leaf.dtype, leaf.shape)
        if expected != received:
            raise difference("statefile.load", path, expected, received)


def _marks_absence(kind: str | None) -> bool:
    """Whether this stands for "no gradient", as None or as a JAX float0."""
    return kind is not None and kind.startswith("no_gradient")


def _named(kind: str | None) -> str:
    return "an array or an unnamed container" if kind is None else "no gradient" if _marks_absence(kind) else kind


def _read(arrays: dict[str, Entry], header: Header, wanted: Layout) -> list[list[Any]]:
    """The leaves of every replica, in the order of the wanted layout; None where there is nothing to read."""
    numbers = {leaf.path: i for i, leaf in enumerate(header.leaves)}
    written = [i for i, leaf in enumerate(header.leaves) if leaf.dtype is not None]
    if set(arrays) != {array_name(rank, i) for rank in range(header.replicas) for i in written}:
        raise refused("the arrays that the header names", "others")

    def array(rank: int, path: str, described: tuple[np.dtype, tuple[int, ...]] | None) -> np.ndarray | None:
        number = numbers[path]
        if described is None or header.leaves[number].dtype is None:
            return None
        dtype, shape = container.stored_as(*described)
        entry = arrays[array_name(rank, number)]
        # Nothing is allocated by what a file claims: it is first compared with what ``like`` says.
        if (entry.dtype, entry.shape) != (dtype, shape):
            raise GradCombineError("statefile.load", f"{dtype}{shape} in the file", f"{entry.dtype}{entry.shape}", path)
        found = entry.whole()
        if container.digest(found) != header.leaves[number].sha256[rank]:
            raise GradCombineError("statefile.load", "bytes that match their checksum", "others: damaged", path)
        return container.from_stored(found, *described)

    return [[array(rank, *leaf) for leaf in wanted.leaves.items()] for rank in range(header.replicas)]
