"""HDF5, as Keras writes its .weights.h5."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import ml_dtypes
import numpy as np

from gradcombine.formats import Entry, entry, from_blocks, unread

_MOST_SHRUNK = 1 << 16
"""By what compression may shrink a dataset. One that claims more was never written, and would take for ever to read."""


def read(path: Path) -> dict[str, Entry]:
    """The datasets of an HDF5 file, by their paths. It stays open as long as an entry of it lives.

    Links to other places, in this file and in others, are followed. Keras writes bfloat16 as opaque words of two bytes,
    with an attribute that says so.
    """
    return {found.name: found for found in _entries(path, h5py.File(path), "", set())}


def _entries(path: Path, group: Any, prefix: str, seen: set[Any]) -> Iterator[Entry]:
    seen.add(group.id)
    for key in group:
        name, link = prefix + key, group.get(key, getlink=True)
        if isinstance(link, h5py.ExternalLink) and not (path.parent / link.filename).is_file():
            yield unread("diff", name, f"a link to another file, {link.filename}, which is not there")
            continue
        try:
            node = group[key]
        except KeyError:
            yield unread("diff", name, "a link to what is not there")
            continue
        if isinstance(node, h5py.Dataset):
            yield _entry(name, node)
        elif not isinstance(node, h5py.Group):
            yield unread("diff", name, "a type without an array")
        elif node.id in seen:
            # Links may form circles, and more paths than there are stars.
            yield unread("diff", name, "a second link to a group")
        else:
            yield from _entries(path, node, f"{name}/", seen)


def _entry(name: str, node: Any) -> Entry:
    dtype = node.dtype
    if dtype == np.dtype("V2") and node.attrs.get("dtype") == "bfloat16":
        dtype = np.dtype(ml_dtypes.bfloat16)
    if node.shape is None:
        return unread("diff", name, "a dataset without a shape")
    if not entry.holds_numbers(dtype):
        return unread("diff", name, f"elements of dtype {dtype}", node.shape)
    if node.is_virtual or node.external:
        return unread("diff", name, "a dataset whose contents are in other files", node.shape)
    if node.nbytes > _MOST_SHRUNK * (node.id.get_storage_size() + 4096):
        return unread("diff", name, f"{node.nbytes} bytes in {node.id.get_storage_size()} of the file", node.shape)
    return from_blocks("diff", name, node.shape, dtype, partial(_block, node, dtype))


def _block(node: Any, dtype: np.dtype, index: Any) -> np.ndarray:
    return np.asarray(node[index]).view(dtype)
