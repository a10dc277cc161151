"""States to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gradcombine import tree
from gradcombine.accumulate import depth_of
from gradcombine.errors import GradCombineError
from gradcombine.reductions.algebra import Reduction, require_reduction
from gradcombine.statefile import header as headers
from gradcombine.statefile import stored
from gradcombine.statefile.container import array_name
from gradcombine.statefile.header import Header, Leaf
from gradcombine.statefile.layout import layout, on_host, require_state_of
from gradcombine.statefile.replacing import replacing
from gradcombine.statefile.suffix import format_of
from gradcombine.types import AccumulateState, State


def write(operation: str, path: str | os.PathLike[str], reduction: Reduction, states: Sequence[State]) -> None:
    """Writes one state a replica; see `gradcombine.statefile.save_replicas`."""
    require_reduction(operation, reduction)
    container = format_of(operation, path)
    parts = [on_host(operation, state) for state in states]
    first = layout(operation, parts[0])
    for rank, part in enumerate(parts):
        require_state_of(operation, reduction, part)
        found = layout(operation, part)
        if (found.leaves, found.kinds) != (first.leaves, first.kinds):
            raise GradCombineError(operation, "states of one structure, shapes and dtypes", f"another at rank {rank}")
    columns = [tree.flatten(operation, part)[0] for part in parts]
    arrays = {
        array_name(rank, i): stored.to_stored(leaf)
        for rank, column in enumerate(columns)
        for i, leaf in enumerate(column)
        if leaf is not None
    }
    leaves = []
    for i, (where, described) in enumerate(first.leaves.items()):
        if described is None:
            leaves.append(Leaf(where, None, None, ()))
        else:
            digests = tuple(stored.digest(arrays[array_name(rank, i)]) for rank in range(len(parts)))
            leaves.append(Leaf(where, described[0].name, described[1], digests))
    levels = depth_of(parts[0]) if isinstance(parts[0], AccumulateState) else None
    header = Header(headers.own_version(), reduction.name, len(parts), levels, first.kinds, tuple(leaves))
    with replacing(Path(path)) as file:
        container.write(file, headers.encode(header), arrays)
