"""Orbax checkpoints, the usual ones of JAX programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from gradcombine.errors import GradCombineError
from gradcombine.formats import Entry, entry, from_array, unread

BATCH = 1 << 28
"""About how many bytes are restored at a time: each restoration walks through the whole tree."""


def read(path: Path) -> dict[str, Entry]:
    """The arrays and numbers of a checkpoint directory, by their paths in the saved tree."""
    path = path.resolve()
    if (path / "_METADATA").exists():
        return {found.name: found for found in _tree(path)}
    folders = [child for child in sorted(path.iterdir()) if child.is_dir()]
    trees = [child for child in folders if (child / "_METADATA").exists()]
    if len(trees) != 1:
        raise GradCombineError("diff", "a checkpoint of one tree", f"{[child.name for child in trees]}", path.name)
    # The name of the only tree is not a part of its leaves' names.
    others = (unread("diff", child.name, "an item that is no tree") for child in folders if child not in trees)
    found = {leaf.name: leaf for leaf in _tree(trees[0])}
    return found | {f"{other.name} (item)": other for other in others}


def _tree(directory: Path) -> Iterator[Entry]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata: Any = checkpointer.metadata(directory)
    tree = metadata.item_metadata.tree
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)[0]
    store = _Store(directory, tree, leaves)
    names = ["/".join(str(_key(key)) for key in keys) for keys, _ in leaves]
    same_name, same_place = Counter(names), Counter(leaf.name for _, leaf in leaves)
    for name, (keys, leaf) in zip(names, leaves, strict=True):
        name = name if same_name[name] == 1 else jax.tree_util.keystr(keys)
        dtype = getattr(leaf, "dtype", None)
        shape = tuple(getattr(leaf, "shape", None) or ())
        if same_place[leaf.name] > 1:
            # {"a": {"b": x}, "a.b": y} is one array on the disk, and Orbax has lost the other.
            yield unread("diff", name, f"one array, {leaf.name}, for {same_place[leaf.name]} leaves", shape)
        elif dtype is None or not entry.holds_numbers(np.dtype(dtype)):
            yield unread("diff", name, f"a leaf of type {type(leaf).__name__.removesuffix('Metadata')}", shape)
        else:
            yield from_array("diff", name, shape, np.dtype(dtype), partial(store.load, keys))


class _Store:
    """Restores leaves in batches, of which it keeps the last."""

    def __init__(self, directory: Path, tree: Any, leaves: list[tuple[Any, Any]]) -> None:
        self._directory, self._tree = directory, tree
        self._batches: dict[Any, int] = {}
        before = 0
        for keys, leaf in leaves:
            self._batches[keys] = before // BATCH
            shape, dtype = getattr(leaf, "shape", None) or (), getattr(leaf, "dtype", None) or np.float64
            before += int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        self._number, self._batch = -1, None

    def load(self, keys: Any) -> np.ndarray:
        if self._number != self._batches[keys]:
            self._number, self._batch = self._batches[keys], None
            self._batch = self._restored(self._number)
        found: Any = self._batch
        for key in keys:
            found = found[_key(key)]
        return np.asarray(found)

    def _restored(self, number: int) -> Any:
        """The tree with the leaves of one batch; the others stay on the disk."""

        def ask(keys: Any, leaf: Any) -> Any:
            wanted = self._batches[keys] == number and hasattr(leaf, "dtype")
            return ocp.RestoreArgs(restore_type=np.ndarray) if wanted else ocp.PLACEHOLDER

        arguments = jax.tree_util.tree_map_with_path(ask, self._tree, is_leaf=_is_leaf)
        item = jax.tree.map(lambda x: x if x is ocp.PLACEHOLDER else 0, arguments)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            wanted = ocp.args.PyTreeRestore(item=item, restore_args=arguments)
            return checkpointer.restore(self._directory, args=wanted)


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "name") and hasattr(node, "directory")


def _key(key: Any) -> Any:
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
